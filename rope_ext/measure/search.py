"""Finds LongRoPE's numbers for a model, one per rotary pair, by evolution.

Evolution is a function of its seed and of the losses of the tables it tries: a search that was
killed is replayed, and what its log holds is not computed again.

Ding et al. 2024, arXiv 2402.13753, sections 3.2 and 3.3.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext.errors import MeasureError, OptionError
from rope_ext.measure.cases import digest, mend
from rope_ext.measure.folder import held, replace_file, writing
from rope_ext.measure.forward import score
from rope_ext.methods import NTK, PI, FrequencyMethod, LongRoPE, Rope, YaRN
from rope_ext.options import SlidingLayers
from rope_ext.patching import first_site, patched
from rope_ext.rotary.sites import evaluating, unwrap

START_TOKENS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
"""The numbers of start tokens that LongRoPE chooses from."""
_STEPS = 100  # numbers are searched in hundredths
_BEYOND = 1.25  # from 1 to this many times the factor
_REACH = 4  # pairs: a new number lies between those of pairs so far away, at most
_TRIES = 100  # to make a table that is new
_ROOM = "make room and give the same again to go on"
_logger = logging.getLogger("rope_ext")


@dataclass(frozen=True)
class Candidate:
    """The number of every pair in hundredths, ascending, and how many start tokens go without."""

    table: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Space:
    """What evolution chooses from.

    Args:
        most: the largest number, in hundredths; the smallest is 1.
        starts: numbers of start tokens.
        probability: that a mutation changes a number.
    """

    most: int
    starts: Sequence[int]
    probability: float

    def mutated(self, one: Candidate, rng: random.Random) -> Candidate:
        """Some numbers drawn anew, or one of them and all others moved along; ascending again."""
        reach = rng.randint(1, _REACH)
        near = [_STEPS] * reach + [*one.table] + [self.most] * reach
        drawn = [rng.randint(near[i], near[i + 2 * reach]) for i in range(len(one.table))]
        if rng.random() < 0.5:
            pairs = zip(one.table, drawn, strict=True)
            table = sorted(new if self._changes(rng) else old for old, new in pairs)
        else:
            i = rng.randrange(len(drawn))
            table = [self._moved(number, one.table[i], drawn[i]) for number in one.table]
        start = rng.choice(self.starts) if self._changes(rng) else one.start
        return Candidate(tuple(table), start)

    def _changes(self, rng: random.Random) -> bool:
        return rng.random() < self.probability

    def _moved(self, number: int, old: int, new: int) -> int:
        """Where ``number`` goes if ``old`` becomes ``new``, between bounds that stay."""
        bound = _STEPS if number <= old else self.most
        share = (number - bound) / (old - bound) if old != bound else 1
        return round(bound + share * (new - bound))

    def crossed(self, one: Candidate, other: Candidate, rng: random.Random) -> Candidate:
        """Numbers of either parent; sorted, which keeps each between those of the two."""
        table = sorted(map(rng.choice, zip(one.table, other.table, strict=True)))
        return Candidate(tuple(table), rng.choice((one.start, other.start)))


def evolve(
    first: Sequence[Candidate],
    space: Space,
    loss: Callable[[Candidate], float],
    *,
    population: int,
    iterations: int,
    mutations: int,
    crossovers: int,
    seed: int,
) -> Iterator[Candidate]:
    """The best candidate of the first population, then that after every iteration.

    The better half of a population are the parents of the next one, and stay in it. No candidate
    is made twice.
    """
    rng = random.Random(f"search:{seed}")
    young = list(dict.fromkeys(first))
    seen = set(young)

    def add(make: Callable[[], Candidate]) -> None:
        for _ in range(_TRIES):
            made = make()
            if made not in seen:
                seen.add(made)
                young.append(made)
                return

    for turn in range(population - len(young)):
        add(partial(space.mutated, first[turn % len(first)], rng))
    parents: list[Candidate] = []
    losses: dict[Candidate, float] = {}
    for iteration in range(iterations + 1):
        if iteration:
            young.clear()
            for _ in range(mutations):
                add(lambda: space.mutated(rng.choice(parents), rng))
            for _ in range(crossovers):
                add(lambda: space.crossed(*rng.sample(parents, 2), rng))
        losses |= {one: loss(one) for one in young}
        parents[:] = sorted([*parents, *young], key=losses.__getitem__)[: population // 2]
        yield parents[0]


def search(
    model: nn.Module,
    tokenizer: Any,
    text: str | os.PathLike[str] | Iterable[str],
    target_length: int,
    *,
    output: str | os.PathLike[str] | None = None,
    population: int = 64,
    iterations: int = 40,
    mutations: int = 16,
    crossovers: int = 16,
    mutation_probability: float = 0.3,
    samples: int = 5,
    scored: int | None = None,
    start_tokens: Iterable[int] = (0,),
    attention_factor: float | None = None,
    seed: int = 0,
    compose: bool = False,
    sliding_layers: SlidingLayers = "auto",
    original_max_position_embeddings: int | None = None,
) -> LongRoPE:
    """Search the numbers by which ``longrope`` divides the frequencies of ``model``.

    Tables ascend from 1 to at most 1.25 times the factor. The first are those of PI, NTK, YaRN and
    mutations of them; all are judged by their loss on the same windows of text. Beside the paper's
    mutation, which draws some numbers anew, there is one that moves the others along, since half
    of YaRN's numbers are equal. The model is left as it came, also after an exception.

    Args:
        model: not patched.
        tokenizer: of the model.
        text: a file, a folder or ``hf:ID``, as the evaluators read it, or documents; a string
            with a line break in it is one. Measure what was found on another text.
        target_length: context to reach, tokens.
        output: a ``.json`` file for the options of the best method so far. Beside it, in
            ``.jsonl``, is written every table that was tried: the same call goes on from there,
            or goes further with more ``iterations``, as if it had not been interrupted.
        population: tables to begin with; the better half are parents.
        iterations: how often parents make new tables.
        mutations: new tables of each iteration, of one parent.
        crossovers: the same, of two.
        mutation_probability: that a mutation changes a number.
        samples: windows of ``target_length`` tokens.
        scored: tokens at the end of each, whose loss counts. None is half of them: where all
            count, as in the paper, the far end is given up for the many tokens before it.
        start_tokens: numbers of start tokens to choose from. More than 0 cannot be exported; the
            paper's are ``rope_ext.measure.search.START_TOKENS``.
        attention_factor: of all tables, as of ``LongRoPE``.
        seed: of the windows and of evolution.
        compose: as of :func:`rope_ext.patch`, which needs it and the next ones again with what
            was found.
        sliding_layers: likewise.
        original_max_position_embeddings: likewise.

    Returns:
        The best method found, for :func:`rope_ext.patch`.

    Raises:
        OptionError: an option is not valid.
        MeasureError: the text cannot be read or is too short, ``output`` is of another search, or
            the model computes no finite losses.
        AlreadyPatchedError, AlreadyScaledError, NoRopeError, UnsupportedModelError: as
            :func:`rope_ext.patch`.

    Ding et al. 2024, arXiv 2402.13753, sections 3.2 and 3.3.
    """
    from rope_ext.measure.run import require_seed
    from rope_ext.measure.terminal import progress  # rich is not loaded with the package

    _check("target_length", target_length, 2)
    scored = target_length // 2 if scored is None else scored
    _check("scored", scored, 1)
    _check("population", population, 4)
    for name, value in (("iterations", iterations), ("samples", samples)):
        _check(name, value, 1)
    for name, value in (("mutations", mutations), ("crossovers", crossovers)):
        _check(name, value, 0)
    if not isinstance(mutation_probability, (int, float)) or not 0 < mutation_probability <= 1:
        raise OptionError(
            f"mutation_probability={mutation_probability!r} is not valid; it must be above 0 and "
            f"at most 1"
        )
    starts = tuple(start_tokens) if isinstance(start_tokens, Iterable) else ()
    if not starts:
        raise OptionError(
            f"start_tokens={start_tokens!r} is not valid; give numbers to choose from, such as "
            f"(0, 4, 16)"
        )
    require_seed(seed)
    if output is not None and Path(output).suffix != ".json":
        raise OptionError(f"output={str(output)!r} is not valid; it must end in .json")
    if original_max_position_embeddings is not None:
        _check("original_max_position_embeddings", original_max_position_embeddings, 1)
    arguments = {
        "compose": compose,
        "sliding_layers": sliding_layers,
        "original_max_position_embeddings": original_max_position_embeddings,
    }
    rope = first_site(model, sliding_layers, original_max_position_embeddings).rope
    if target_length <= rope.length:
        raise OptionError(
            f"target_length={target_length} is not beyond the {rope.length} tokens that the model "
            f"was trained for; give more"
        )
    if scored >= target_length:
        raise OptionError(
            f"scored={scored} is not valid; it must be below target_length={target_length}, since "
            f"nothing comes before the first token"
        )
    factor = target_length / rope.length

    def method(one: Candidate) -> LongRoPE:
        return LongRoPE(
            factor=factor,
            long_factor=[number / _STEPS for number in one.table],
            attention_factor=attention_factor,
            start_tokens=one.start,
        )

    known = (PI(factor=factor), NTK(factor=factor), YaRN(factor=factor))
    tables = [_table(each, rope) for each in known]
    for start in starts:  # what cannot be patched shows before anything is measured
        with patched(model, method(Candidate(tables[0], start)), **arguments):
            pass
    rows = _windows(tokenizer, text, target_length, samples, seed)
    growth = {"population": population, "mutations": mutations, "crossovers": crossovers}
    settings = {
        "model": _fingerprint(model),
        "text": digest(rows),
        "target_length": target_length,
        "samples": samples,
        "scored": scored,
        **growth,
        "mutation_probability": mutation_probability,
        "start_tokens": starts,
        "attention_factor": attention_factor,
        "seed": seed,
        **arguments,
    }
    space = Space(round(_BEYOND * factor * _STEPS), starts, mutation_probability)
    shown = progress()
    shown.disable |= not (shown.console.is_terminal or shown.console.is_jupyter)
    with Log.of(output, settings) as log, shown, evaluating(model):
        total = len(known) + population + iterations * (mutations + crossovers)
        bar = shown.add_task("search", total=total * samples)

        def judged(each: FrequencyMethod) -> float:
            if log.loss(each) is None:
                with patched(model, each, **arguments):
                    log.add(each, _loss(model, rows, scored, lambda: shown.advance(bar)))
            else:
                shown.advance(bar, samples)
            return log.loss(each)

        *_, yarn = before = [judged(each) for each in known]
        if min(before) == math.inf:
            raise MeasureError(
                f"the model's losses are no numbers at {target_length} tokens; load it in float32 "
                f"or bfloat16"
            )
        bests = evolve(
            [Candidate(table, starts[0]) for table in tables],
            space,
            lambda one: judged(method(one)),
            iterations=iterations,
            seed=seed,
            **growth,
        )
        for best in bests:
            found = method(best)
            text = f"perplexity {_perplexity(log.loss(found))} (yarn {_perplexity(yarn)})"
            shown.update(bar, description=text)
            log.keep(found)
    return found


class Log:
    """What was tried, and its losses: in memory, and in a file that is only ever added to.

    Args:
        path: of the file; None keeps nothing.
        losses: by method.
    """

    def __init__(self, path: Path | None, losses: dict[str, float]) -> None:
        self.path, self.losses = path, losses

    @classmethod
    @contextmanager
    def of(
        cls, output: str | os.PathLike[str] | None, settings: Mapping[str, Any]
    ) -> Iterator[Log]:
        """The log beside ``output``: a new one, or one of the same settings; locked.

        Raises:
            MeasureError: it is of other settings, cannot be read or written, or is in use; or
                what is in ``output`` does not come from it.
        """
        if output is None:
            yield cls(None, {})
            return
        output = Path(output)
        path = output.with_suffix(".jsonl")
        with writing(path, "give another output"):
            path.parent.mkdir(parents=True, exist_ok=True)
        with held(path.parent, path.name):
            yield cls(path, cls._begun(output, path, settings))

    @staticmethod
    def _begun(output: Path, path: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        """The losses that are known; files that are not of this very search stay as they are."""
        with writing(path, "give another output"):
            if path.exists():
                given, losses = _read(path)
                _require_same(path, given, json.loads(json.dumps(settings)))
                if output.exists() and not _comes_from(losses, output):
                    raise MeasureError(
                        f"{output} is not what the search in {path.name} found; move it away, or "
                        f"give another output"
                    )
                mend(path)
                return losses
            if output.exists():
                raise MeasureError(
                    f"{output} exists, without the {path.name} that a search could go on from; "
                    f"delete it, or give another output"
                )
            replace_file(path, (json.dumps({"search": settings}) + "\n").encode())
        return {}

    def loss(self, method: FrequencyMethod) -> float | None:
        """Its loss, nats per token, if it was tried."""
        return self.losses.get(_key(method))

    def add(self, method: FrequencyMethod, loss: float) -> None:
        """Write a loss down."""
        self.losses[_key(method)] = loss
        if self.path is not None:
            text = json.dumps({"method": json.loads(_key(method)), "loss": loss}) + "\n"
            with writing(self.path, _ROOM), self.path.open("a", encoding="utf-8") as file:
                file.write(text)

    def keep(self, best: LongRoPE) -> None:
        """Replace the options in ``output``, at once."""
        if self.path is None:
            return
        output = self.path.with_suffix(".json")
        with writing(output, _ROOM):
            replace_file(output, (json.dumps(_given(best.options())) + "\n").encode())


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of a table's options: those that say something."""
    return {name: value for name, value in options.items() if value}


def _comes_from(losses: Mapping[str, float], output: Path) -> bool:
    """Whether ``output`` holds one of the tables in a log."""
    try:
        found = json.loads(output.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    tried = map(json.loads, losses)
    return any(one.pop("name") == LongRoPE.name and _given(one) == found for one in tried)


def _key(method: FrequencyMethod) -> str:
    return json.dumps({"name": method.name, **method.options()})


def _read(path: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Settings and losses of a log, without the line that a killed search left unfinished."""
    try:
        text, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        head, *lines = map(json.loads, text.split("\n"))
        losses = {json.dumps(line["method"]): float(line["loss"]) for line in lines}
        return dict(head["search"]), losses
    except (ValueError, TypeError, KeyError, RecursionError):
        raise MeasureError(
            f"{path} is not the log of a search; delete it, or give another output"
        ) from None


def summary(output: Path) -> str:
    """The perplexities in the log beside ``output``, for people to read."""
    settings, losses = _read(output.with_suffix(".jsonl"))
    named = [(json.loads(key)["name"], loss) for key, loss in losses.items()]
    tables = [loss for name, loss in named if name == LongRoPE.name]
    lines = [
        f"perplexity of the last {settings['scored']} tokens of {settings['samples']} windows of "
        f"{settings['target_length']}:"
    ]
    known = [(name, loss) for name, loss in named if name != LongRoPE.name]
    for name, loss in [*known, (LongRoPE.name, min(tables))]:
        lines.append(f"  {name:<10}{_perplexity(loss):>8}")
    return "\n".join([*lines, f"the last is the best of {len(tables)} tables on this very text"])


def _perplexity(loss: float) -> str:
    return f"{math.exp(min(loss, 700)):.4g}"  # beyond it, a float is not enough


def _require_same(path: Path, given: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [
        f"another {name}" if name in ("model", "text") else f"{name} was {given.get(name)!r}"
        for name, value in now.items()
        if given.get(name) != value
    ]
    if changed:
        raise MeasureError(
            f"{path} is of another search ({', '.join(changed)}); give the same again to go on "
            f"with it, or another output"
        )


def _check(option: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise OptionError(
            f"{option}={value!r} is not valid; it must be a whole number of at least {least}"
        )


def _table(method: FrequencyMethod, rope: Rope) -> tuple[int, ...]:
    """What ``method`` divides each frequency by, in hundredths."""
    ratio = (rope.inv_freq / method.inv_freq(rope)).nan_to_num(nan=method.factor)  # 0 / 0
    return tuple((ratio * _STEPS).round().int().cummax(0).values.tolist())


def _windows(
    tokenizer: Any,
    text: str | os.PathLike[str] | Iterable[str],
    length: int,
    samples: int,
    seed: int,
) -> list[tuple[int, ...]]:
    """Windows of ``length`` tokens, from as many documents as possible."""
    from rope_ext.measure.perplexity import Perplexity
    from rope_ext.measure.prompts import Frame
    from rope_ext.measure.text import read_texts

    if isinstance(text, str) and "\n" in text:
        texts = [text]
    elif isinstance(text, (str, os.PathLike)):
        texts = read_texts([os.fspath(text)])
    else:
        texts = list(text) if isinstance(text, Iterable) else []
        if not texts or not all(isinstance(each, str) for each in texts):
            raise OptionError("text is not valid; give a path, or documents that are strings")
    task = Perplexity(texts, windows=samples, protocol="start")
    windows = task.choose(Frame(tokenizer, ()), [length], seed)
    if len(windows.texts) < samples:
        raise MeasureError(
            f"the text has only {len(windows.texts)} windows of {length} tokens, and "
            f"samples={samples} are to be judged by; give more text, or fewer samples"
        )
    if windows.joined:
        _logger.warning(
            "rope_ext: search: too few documents of %d tokens: documents are joined, so that a "
            "window may hold unrelated texts",
            length,
        )
    return windows.at(length)


def _loss(
    model: nn.Module, rows: Sequence[Sequence[int]], scored: int, advance: Callable[[], None]
) -> float:
    """Mean of the last ``scored`` tokens of every row, nats; infinite if it is not a number."""
    total = 0.0
    for row in rows:
        losses, _ = score(model, [row], scored)
        total += float(losses.double().sum())
        advance()
    return total / (scored * len(rows)) if math.isfinite(total) else math.inf


def _fingerprint(model: nn.Module) -> str:
    """What tells this model from another one: its configuration, and its losses on some tokens.

    In thousandths of a nat: other numbers of threads change the last digits.
    """
    config = unwrap(model).config.to_dict()
    left = {"_name_or_path", "transformers_version"}
    dtypes = sorted({str(weight.dtype) for weight in model.parameters()})
    with evaluating(model):
        tokens = model.get_input_embeddings().num_embeddings
        losses, _ = score(model, [tuple(i % tokens for i in range(64))], 63)
    mean = f"{float(losses.double().mean()):.3f}"
    return digest({k: v for k, v in config.items() if k not in left}, dtypes, mean)
