"""Runs the cases of a plan on every system, the longest first, and logs each result.

An unfinished batch is repeated as a whole, so that a resumed run computes identical numbers.
"""

from __future__ import annotations

import io
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from rope_eval.cases import (
    Case,
    Outcome,
    Result,
    case_log,
    digest,
    loss,
    read_outcomes,
    share_found,
    tail,
)
from rope_eval.embedder import Embedder, Recipe
from rope_eval.folder import HIDDEN, Log, log_name, world_size, writing
from rope_eval.forward import Advance, cost, score, write
from rope_eval.run.plan import Plan, automatic_tokens, require_free, rows_per_forward
from rope_eval.run.served import Served
from rope_eval.settings import Settings
from rope_eval.sliding import in_blocks
from rope_eval.systems import System, under
from rope_eval.tasks.harness import HarnessTask, outcomes
from rope_ext.command.arguments import UNPATCHED
from rope_ext.command.terminal import tell
from rope_ext.errors import MeasureError, RopeExtError, brief, first_line
from rope_ext.saving import checkpoints as models

LOG = log_name(0)


@dataclass(frozen=True)
class Ranks:
    """The processes that share the work, one per device; one process unless launched with more."""

    rank: int
    count: int
    device: str
    wait: Callable[[], None]

    @classmethod
    def join(cls, device: str) -> Ranks:
        """Find this process among those that ``accelerate launch`` or ``torchrun`` started."""
        if world_size() < 2:
            return cls(rank=0, count=1, device=device, wait=lambda: None)
        from accelerate import PartialState

        # A process may finish long before others: the default timeout would abort the run.
        cpu = models.resolve_device(device) == "cpu"  # accelerate uses this setting
        state = PartialState(cpu=cpu, timeout=timedelta(days=7))
        if state.num_processes != world_size():  # each would do all of the work, into one log
            raise MeasureError(
                f"{world_size()} processes were launched, and accelerate knows no way to join "
                f"them on {state.device}; launch one, or give --device cpu"
            )
        chosen = str(state.device) if device == "auto" else device
        return cls(
            rank=state.process_index,
            count=state.num_processes,
            device=chosen,
            wait=state.wait_for_everyone,
        )

    def share(self, batches: Sequence[Any]) -> list[Any]:
        # Interleaved: the longest come first, and every process gets some of them.
        return list(batches[self.rank :: self.count])


def run(
    plan: Plan, advance: Advance = lambda work: None, begin: Advance = lambda work: None
) -> list[Outcome] | None:
    """Measure what is left of ``plan``; calls ``begin`` with the work, ``advance`` with progress.

    Returns all outcomes of the plan, in its order; None in every process but the first. A model
    that refuses a method is measured without it, and ``plan.refused`` has the reason.
    """
    ranks = Ranks.join(plan.settings.device)
    if ranks.rank == 0:
        require_free(plan.settings)  # another run may have finished since planning
    ranks.wait()  # read the logs only once the folder is locked
    done = dict(plan.stored)
    work = {system: ranks.share(plan.left(system)) for system in plan.systems}
    ranks.wait()  # change no logs before all processes have read them
    if ranks.rank == 0 and plan.settings.overwrite:
        plan.folder.clear()
        shutil.rmtree(plan.settings.output / HIDDEN / "harness", ignore_errors=True)
        for path in (plan.settings.output / HIDDEN).glob(f"{_vectors('*')}*"):
            path.unlink()
    ranks.wait()
    begin(sum(_work(batch) for batches in work.values() for batch in batches))
    _measure(plan, ranks, work, done=done, advance=advance)
    ranks.wait()
    return None if ranks.rank else _merged(plan, done)


def _measure(
    plan: Plan,
    ranks: Ranks,
    work: Mapping[System, Sequence[Sequence[Case]]],
    done: dict[str, Outcome],
    advance: Advance,
) -> None:
    """Do this process's share of the work; every outcome goes into its log and into ``done``."""
    log = case_log(plan.settings.output / log_name(ranks.rank))
    log.open()
    record = partial(_record, log=log, done=done)
    harness = [task for task in plan.tasks if isinstance(task, HarnessTask)]
    # Systems of a model are adjacent, so that it is loaded once.
    for name, systems in groupby(plan.systems, key=lambda system: system.model):
        # Every process asks about the same systems, so that all know the same refusals.
        systems = [system for system in systems if harness or plan.left(system)]
        if not systems:
            continue
        runner = _runner(plan, name, ranks.device)
        for system in _accepted(plan, runner, systems, work=work, advance=advance):
            with runner.applied(system):
                for results in runner.results(system, work[system]):
                    record(_outcome(system, case, result) for case, result in results)
                    advance(_work([case for case, _ in results]))
                # lm-evaluation-harness makes its own batches; they are not shared.
                if harness and ranks.rank == 0:
                    found = list(_harnessed(plan, runner, system, tasks=harness))
                    plan.harness[system.name] = [outcome.key for outcome in found]
                    record(found)
        del runner  # free it before loading the next one


def _record(outcomes: Iterable[Outcome], log: Log, done: dict[str, Outcome]) -> None:
    """Log the outcomes that are new; a batch that is repeated has some that are known."""
    for outcome in outcomes:
        if outcome.key not in done:
            log.add(outcome.to_line())
            done[outcome.key] = outcome


def _accepted(
    plan: Plan,
    runner: Loaded | Served,
    systems: Sequence[System],
    work: Mapping[System, Sequence[Sequence[Case]]],
    advance: Advance,
) -> list[System]:
    """Return the systems that the model takes; the work of the others counts as done."""
    accepted = []
    # All are tried before any is measured: a refusal should not come after hours.
    for system in systems:
        if _refused(plan, runner, system):
            advance(sum(map(_work, work[system])))
        else:
            accepted.append(system)
    return accepted


def _runner(plan: Plan, name: str, device: str) -> Runner | EmbeddingRunner | Served:
    """Load a model, or return what asks its server."""
    settings = plan.settings
    if settings.url:
        return Served(name, settings)
    in_blocks()
    if any(task.embeds for task in plan.tasks):
        model = models.load_embedder(name, settings.dtype, device, attn=settings.attn)
        return EmbeddingRunner(model, name, settings)
    model = models.load_model(
        name,
        dtype=settings.dtype,
        device=device,
        attn=settings.attn,
        adapter=settings.adapter,
    )
    return Runner(model, name, settings)


def _harnessed(
    plan: Plan, runner: Any, system: System, tasks: Sequence[HarnessTask]
) -> Iterator[Outcome]:
    """Yield what lm-evaluation-harness measures at each length of the plan."""
    size = plan.settings.batch_size
    settings = plan.settings
    for length in plan.lengths:
        window = {"pretrained": runner.model, "tokenizer": runner.tokenizer, "max_length": length}
        window["batch_size"] = size or max(1, automatic_tokens(settings) // length)
        cache = settings.output / HIDDEN / "harness"
        yield from outcomes(
            tasks,
            window,
            chat=plan.chat[system.model],
            seed=settings.seed,
            cache=cache,
            system=system,
        )


def _refused(plan: Plan, runner: Loaded | Served, system: System) -> bool:
    """Try ``system``; note in ``plan.refused`` why the model does not take it.

    The error is raised if every other method on every model is refused as well.
    """
    try:
        with runner.applied(system):
            return False
    except MeasureError:  # of a server or a broken model, not about the method
        raise
    except RopeExtError as error:
        plan.refused[system.name] = str(error)
        if all(s.name in plan.refused for s in plan.systems if s.method != UNPATCHED):
            raise
        tell(f"note: {plan.refusals[-1]}", "yellow")
        return True


def _merged(plan: Plan, done: dict[str, Outcome]) -> list[Outcome]:
    """Return all outcomes of the plan; merges the logs of all processes, in that order."""
    logs = plan.folder.logs
    done |= read_outcomes(logs)
    outcomes = plan.collect(done)
    ours = {outcome.key: outcome for outcome in outcomes if outcome.key in done}
    # Of other settings, which another run may resume.
    others = [outcome for key, outcome in plan.stored.items() if key not in ours]
    path = plan.settings.output / LOG
    with writing(path, "make room; --resume keeps what is finished"):
        case_log(path).replace(one.to_line() for one in (*ours.values(), *others))
        for log in logs:
            if log != path:
                log.unlink()
    return outcomes


def _work(batch: Sequence[Case]) -> float:
    return sum(cost(case.tokens) for case in batch)


def _outcome(system: System, case: Case, result: Result) -> Outcome:
    of_case = ("task", "length", "bin", "depth", "seed", "prompt", "answers", "group")
    known = {name: getattr(case, name) for name in of_case}
    return Outcome(key=system.key(case), system=system.name, **known, **vars(result))


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # On CPUs and Macs it is a plain RuntimeError.
    plain = ("MPS backend out of memory", "DefaultCPUAllocator: can't allocate memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in plain)


class Loaded:
    """One loaded model, which a system patches for as long as it is measured."""

    def __init__(self, model: Any, name: str, settings: Settings) -> None:
        self.model = model
        self.name = name
        self.settings = settings

    def require_runs(self, largest: int, short: Callable[[], Any]) -> None:
        """Raise MeasureError if the model lacks the token ``largest``, or fails on any text.

        ``short`` runs it on a short one.
        """
        models.require_tokens(self.model, largest, self.name)
        try:
            short()
        except RopeExtError:  # a patch refuses it, and says why
            raise
        except Exception as error:
            raise MeasureError(
                f"{self.name} cannot be run ({type(error).__name__}: {first_line(error)}); correct "
                f"its config.json, or download it again"
            ) from error

    @contextmanager
    def applied(self, system: System) -> Iterator[None]:
        """Patch the model with a system's method, with or without its adapter."""
        compose = self.settings.compose
        length = self.settings.trained_length
        with ExitStack() as stack:
            if self.settings.adapter and not system.adapted:
                stack.enter_context(self.model.disable_adapter())
            if system.method != UNPATCHED:
                stack.enter_context(
                    under(
                        self.model,
                        name=system.method,
                        options=system.options,
                        compose=compose,
                        trained_length=length,
                    )
                )
                # Patching draws new values for learned parameters; those of the adapter replace
                # them.
                if system.adapted and self.settings.adapter is not None:
                    models.load_learned(self.model, self.settings.adapter)
            yield


class Runner(Loaded):
    """A language model that scores or writes text."""

    def __init__(self, model: Any, name: str, settings: Settings) -> None:
        super().__init__(model, name, settings)
        self.tokenizer = models.load_tokenizer(name)
        eos = model.generation_config.eos_token_id
        self.eos = self.tokenizer.eos_token_id if eos is None else eos
        ends = self.eos if isinstance(self.eos, list) else [self.eos]
        if not all(isinstance(end, int | None) for end in ends):
            raise MeasureError(
                f"the generation_config.json of {name} has eos_token_id={brief(self.eos)}, which "
                f"is no token; correct it, or download it again"
            )
        pad = self.tokenizer.pad_token_id
        first = self.eos[0] if isinstance(self.eos, list) else self.eos
        self.pad = next(token for token in (pad, first, 0) if token is not None)

    def results(
        self, system: System, batches: Sequence[Sequence[Case]]
    ) -> Iterator[list[tuple[Case, Result]]]:
        """Yield the cases of each batch with their results, a batch as soon as it is measured."""
        for batch in batches:
            if system.is_dynamic:  # resets the longest length seen by transformers' dynamic scaling
                score(self.model, rows=[[self.pad] * 2], tail=1, pad=self.pad)
            yield list(zip(batch, self.measure(batch), strict=True))

    def measure(self, batch: Sequence[Case]) -> list[Result]:
        """Return the results of these cases, in one forward if memory allows."""
        try:
            return self._written(batch) if batch[0].mode == "write" else self._scored(batch)
        except Exception as error:
            if not _is_out_of_memory(error):
                short = partial(score, self.model, rows=[[0, 0]], tail=1, pad=self.pad)
                self.require_runs(max(max(case.ids) for case in batch), short)
                raise
            if self.settings.batch_size is not None or len(batch) == 1:
                raise _out_of_memory(len(batch), batch[0].length, batch[0].task) from None
        # Halves depend on this batch alone, and so does what a resumed run computes.
        half = len(batch) // 2
        return self.measure(batch[:half]) + self.measure(batch[half:])

    def _written(self, batch: Sequence[Case]) -> list[Result]:
        texts = write(
            self.model,
            rows=[case.ids for case in batch],
            count=batch[0].count,
            pad=self.pad,
            eos=self.eos,
        )
        decoded = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in texts]
        return [
            Result(share_found(case, text), len(ids), text)
            for case, text, ids in zip(batch, decoded, texts, strict=True)
        ]

    def _scored(self, batch: Sequence[Case]) -> list[Result]:
        tails = [tail(case) for case in batch]
        losses, hits = score(
            self.model, rows=[case.ids for case in batch], tail=max(tails), pad=self.pad
        )
        results = []
        for row, case in enumerate(batch):
            if case.mode == "argmax":
                found = bool(hits[row, -case.count :].all())
                results.append(Result(float(found), case.count))
            else:
                results.append(loss(case, losses[row, -tails[row] :].double()))
        return results


def _out_of_memory(rows: int, length: int, task: str) -> MeasureError:
    return MeasureError(
        f"out of memory at {rows} x {length} tokens ({task}); give smaller --batch-size or "
        f"--lengths, or --dtype bfloat16, and --resume"
    )


class EmbeddingRunner(Loaded):
    """An embedder; embeddings of documents are on disk, so an interrupted run keeps them."""

    def __init__(self, model: Any, name: str, settings: Settings) -> None:
        super().__init__(model, name, settings)
        self.embedder = Embedder(model, Recipe.from_files(name))

    def results(
        self, system: System, batches: Sequence[Sequence[Case]]
    ) -> Iterator[list[tuple[Case, Result]]]:
        """Yield the questions of each batch with the rank of their document."""
        for batch in batches:
            candidates = batch[0].candidates
            assert candidates is not None  # of the mode ``rank``, the only one of such tasks
            cut = candidates.documents if system.cut is None else candidates.cut(system.cut)
            documents = self._embedded(system, cut)
            questions = self._embedded(system, [case.ids for case in batch])
            # In float64, so that rounding of the products makes no ties.
            alike = questions.double() @ documents.double().T
            yield [(case, ranked(case, row)) for case, row in zip(batch, alike, strict=True)]

    def _embedded(self, system: System, texts: Sequence[array]) -> torch.Tensor:
        """Return the embedding of every text ``[texts, size]``, each different one computed once.

        Rows of a forward depend on the texts alone, and so does what a resumed run computes.
        """
        # Candidates may share texts, and so do questions of several lengths.
        distinct = list({text.tobytes(): text for text in texts}.values())
        size = rows_per_forward(self.settings, max(map(len, distinct)))
        found: dict[bytes, torch.Tensor] = {}
        for start in range(0, len(distinct), size):
            rows = distinct[start : start + size]
            name = digest(system.identity, [row.tobytes().hex() for row in rows])
            vectors = self._stored(name, len(rows))
            if vectors is None:
                try:
                    if system.is_dynamic:  # as for language models
                        self.embedder.embed([rows[0][:2]])
                    vectors = self.embedder.embed(rows)
                except Exception as error:
                    if not _is_out_of_memory(error):
                        short = partial(self.embedder.embed, [[0, 0]])
                        self.require_runs(max(map(max, rows)), short)
                        raise
                    raise _out_of_memory(len(rows), len(rows[0]), "embedding") from None
                self._store(name, vectors)
            found |= {row.tobytes(): vector for row, vector in zip(rows, vectors, strict=True)}
        return torch.stack([found[text.tobytes()] for text in texts])

    def _stored(self, name: str, count: int) -> torch.Tensor | None:
        path = self.settings.output / HIDDEN / _vectors(name)
        try:
            vectors = torch.from_numpy(np.load(path, allow_pickle=False))
        except (OSError, ValueError, EOFError, TypeError):
            return None
        sane = vectors.ndim == 2 and len(vectors) == count and vectors.dtype == torch.float32
        return vectors if sane else None

    def _store(self, name: str, vectors: torch.Tensor) -> None:
        path = self.settings.output / HIDDEN / _vectors(name)
        np.save(content := io.BytesIO(), vectors.numpy())
        # Two processes may embed the same questions, for the unpatched and the cut model.
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        with writing(path, "make room; --resume keeps what is finished"):
            draft.unlink(missing_ok=True)
            with draft.open("xb") as file:
                file.write(content.getvalue())
            draft.replace(path)


def _vectors(name: str) -> str:
    return f"embeddings-{name}.npy"


def ranked(case: Case, alike: torch.Tensor) -> Result:
    """Score a question by its similarity to every document; the right one must be the nearest."""
    own = alike[case.right]
    before = int((alike >= own).sum()) - 1  # a tie is not found
    return Result(float(before == 0), case.count, f"rank {before + 1}")
