"""Shared by ``calibrate`` and ``search``: samples, scores of methods, and the log.

Windows of a text measure how well a model continues it, and the answer tokens of needles whether it
finds distant information, as in LongRoPE2 (arXiv 2502.20082, section 3.2).

A run is a function of its seed and of the logged scores: a resumed run is replayed, and logged
scores are not measured again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from rope_eval.cases import digest
from rope_eval.data.prompts import Frame, blanks, encode
from rope_eval.data.text import MOST_REPEATED, NOUNS, read_texts, share_of_copies
from rope_eval.folder import Log, read_lines, to_line, writing
from rope_eval.forward import Advance, cost, score
from rope_eval.reports.calibration import mean
from rope_eval.reports.results import grouped
from rope_eval.tasks.passkey import ASK, FILLER, INTRO, LEAD, MIN_FOUND, NEEDLE
from rope_eval.tasks.perplexity import Perplexity
from rope_eval.tune.options import TuneOptions
from rope_eval.versions import versions
from rope_ext.config.record import method_to_json
from rope_ext.errors import MeasureError, OptionError
from rope_ext.methods import Method, Rope
from rope_ext.patching import first_site, patched
from rope_ext.rotary.sites import evaluating, unwrap
from rope_ext.saving import checkpoints

HAY = ("filler", "text")
_SPAN = 50  # characters
_DIGITS = 5
_logger = logging.getLogger("rope_ext")


@dataclass(frozen=True)
class Prompt:
    """A prompt for a key hidden in ``hay``: the last ``count`` of ``ids`` spell it."""

    hay: str
    ids: tuple[int, ...]
    count: int

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Rows:
    """Windows of text with equal length, and the document index of each."""

    windows: tuple[tuple[int, ...], ...] = ()
    documents: tuple[int, ...] = ()

    def by_document(self, values: Sequence[float]) -> list[list[float]]:
        """Group values of windows by document."""
        groups = grouped(list(zip(self.documents, values, strict=True)), lambda pair: pair[0])
        return [[value for _, value in group] for group in groups.values()]

    def some(self, numbers: Iterable[int]) -> Rows:
        kept = list(numbers)
        return Rows(tuple(self.windows[i] for i in kept), tuple(self.documents[i] for i in kept))


def read(text: str | os.PathLike[str] | Iterable[str]) -> list[str]:
    """Return documents: given ones, a text with line breaks, or a file, folder or ``hf:ID``."""
    if isinstance(text, str) and "\n" in text:
        return [text]
    if isinstance(text, (str, os.PathLike)):
        return read_texts([os.fspath(text)])
    texts = list(text)
    if not texts or not all(isinstance(each, str) for each in texts):
        raise OptionError("text is not valid; give a path, or documents that are strings")
    return texts


def windows_of(
    tokenizer: Any, texts: Sequence[str], length: int, count: int, seed: int, cure: str
) -> Rows:
    """Return ``count`` windows from as many documents as possible; ``cure`` is for the error."""
    task = Perplexity(texts, windows=count, protocol="start")
    found = task.choose(Frame(tokenizer, ()), [length], seed, option="--length")
    if len(found.texts) < count:
        raise MeasureError(
            f"the text has only {len(found.texts)} windows of {length} tokens, and {cure}"
        )
    if found.joined:
        _logger.warning(
            "rope_ext: too few documents of %d tokens: documents are joined, so that a window may "
            "hold unrelated texts",
            length,
        )
    windows = tuple(map(tuple, found.at(length)))
    share = repeated_share([tokenizer.decode(window) for window in windows])
    if share > MOST_REPEATED:
        raise MeasureError(
            f"{share:.0%} of the text is repeated (spans of {_SPAN} characters that occur "
            f"earlier), and at most {MOST_REPEATED:.0%} may be; give a text without copies"
        )
    return Rows(windows, found.documents)


def repeated_share(texts: Iterable[str]) -> float:
    """Return the share of 50-character spans that occurred before, in the same text or another.

    Python's library and Django's documentation have 2 to 5 %, ten copies of a text 90 %.
    """
    return share_of_copies((" ".join(text.split()) for text in texts), _SPAN)


def _parts(frame: Frame, hay: str, key: str) -> tuple[Sequence[int], ...]:
    """Return head, needle, question with answer, and the number of tokens of the answer."""
    intro = encode(frame.tokenizer, INTRO) if hay == "filler" else []
    question, count = frame.whole(ASK, LEAD, key)
    count -= blanks(frame.tokenizer, question, count)
    needle = encode(frame.tokenizer, NEEDLE.format(key=key))
    return [*frame.head, *intro], needle, question[len(frame.head) :], question[-count:]


def shortest(tokenizer: Any, hay: str) -> int:
    """Minimum tokens of a prompt, without chat template, since it may contain the date."""
    parts = _parts(Frame.from_tokenizer(tokenizer, "no"), hay, "9" * _DIGITS)
    return sum(map(len, parts[:3]))


def prompts_for(
    given: TuneOptions, tokenizer: Any, trained: int, texts: Sequence[Sequence[int]], seed: int
) -> tuple[Prompt, ...]:
    """Build the prompts of one sample, of the trained and of the target length, in tokens.

    ``texts`` are the token ids of its windows. Samples with other seeds have other keys.
    """
    return prompts_of(
        tokenizer,
        lengths=(trained, given.target_length),
        count=given.prompts,
        texts=texts,
        seed=seed,
        needle=given.needle,
    )


def prompts_of(
    tokenizer: Any,
    lengths: Sequence[int],
    count: int,
    texts: Sequence[Sequence[int]],
    seed: int,
    needle: str = "number",
) -> tuple[Prompt, ...]:
    """Build ``count`` prompts of each length, alternately in filler and in the text, at all depths.

    A hay in which no prompt of the shortest length fits is left out. ``texts`` are token ids.
    """
    frame = Frame.from_tokenizer(tokenizer, "no")
    prompts = []
    hays = [hay for hay in HAY if count and shortest(tokenizer, hay) <= min(lengths)]
    for length in lengths:
        filler = encode(tokenizer, "".join(islice(cycle(FILLER), length)))
        for turn, hay in enumerate(hays):
            # By hay and length: a prompt stays the same when others are added or left out.
            rng = random.Random(f"needles:{seed}:{hay}:{length}")
            number = len(range(turn, count, len(hays)))
            for index, text in enumerate(islice(cycle(texts), number)):
                depth = (index + rng.random()) / number
                key = "".join(rng.choice("0123456789") for _ in range(_DIGITS))
                key = rng.choice(NOUNS) if needle == "word" else key
                head, hidden, question, answer = _parts(frame, hay, key)
                room = length - len(head) - len(hidden) - len(question)
                cut = round(depth * room)
                text = filler if hay == "filler" else text
                ids = chain(head, text[:cut], hidden, text[cut:room], question)
                prompts.append(Prompt(hay, tuple(ids), len(answer)))
    return tuple(prompts)


def require_tokens(model: nn.Module, samples: Iterable[Sample]) -> None:
    """Raise MeasureError if a model lacks tokens of its samples, as with another's tokenizer."""
    texts = [
        tokens
        for sample in samples
        for tokens in (*sample.rows.windows, *(prompt.ids for prompt in sample.prompts))
    ]
    checkpoints.require_tokens(model, max(map(max, texts)), "these texts")


def losses_at_end(
    model: nn.Module, windows: Sequence[Sequence[int]], scored: int, advance: Advance
) -> list[float]:
    """Return the mean loss of each window's last ``scored`` tokens, in nats; infinite if NaN."""
    found: list[float] = []
    for batch in _batches(model, windows, windows):
        losses, _ = score(model, batch, scored)
        found += map(_finite, losses.double().mean(1).tolist())
        advance(len(batch) * cost(len(batch[0])))
    return found


def losses_of_answers(
    model: nn.Module, prompts: Sequence[Prompt], advance: Advance
) -> list[tuple[float, bool]]:
    """Return the mean loss of every answer in nats, and whether greedy decoding would write it."""
    found: dict[int, tuple[float, bool]] = {}
    for length in sorted({prompt.length for prompt in prompts}):
        numbers = [i for i, prompt in enumerate(prompts) if prompt.length == length]
        for batch in _batches(model, numbers, [prompts[numbers[0]].ids]):
            in_batch = [prompts[i] for i in batch]
            tail = max(prompt.count for prompt in in_batch)
            losses, hits = score(model, [prompt.ids for prompt in in_batch], tail)
            for row, (i, prompt) in enumerate(zip(batch, in_batch, strict=True)):
                loss = float(losses[row, -prompt.count :].double().mean())
                found[i] = _finite(loss), bool(hits[row, -prompt.count :].all())
            advance(len(batch) * cost(length))
    return [found[i] for i in range(len(prompts))]


def _batches(
    model: nn.Module, rows: Sequence[Any], windows: Sequence[Sequence[int]]
) -> Iterator[Sequence[Any]]:
    """Yield batches of rows of one length, as large as in an evaluation; deterministic."""
    tokens = 8192 if model.device.type == "cpu" else 32768
    size = max(1, tokens // len(windows[0])) if rows else 1
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def fingerprint(model: nn.Module) -> str:
    """Return an identifier of a model: its configuration, and its rounded losses."""
    plain = cast(PreTrainedModel, model)
    config = cast(PreTrainedModel, unwrap(model)).config.to_dict()
    left = {"_name_or_path", "transformers_version"}
    dtypes = sorted({str(weight.dtype) for weight in model.parameters()})
    with evaluating(model):
        tokens = cast(nn.Embedding, plain.get_input_embeddings()).num_embeddings
        losses, _ = score(model, [tuple(i % tokens for i in range(64))], 63)
    mean = f"{float(losses.double().mean()):.3f}"
    return digest({k: v for k, v in config.items() if k not in left}, dtypes, mean)


ROOM = "make room and give the same again to go on"
FORMAT = 2


@dataclass(frozen=True)
class Sample:
    """Data to measure methods on; ``rows`` and ``inside`` are windows of both lengths."""

    name: str
    rows: Rows
    prompts: tuple[Prompt, ...]
    inside: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @property
    def pieces(self) -> list[tuple[int, ...]]:
        """All windows of the trained length."""
        return [piece for pieces in self.inside for piece in pieces]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """Token ids of everything to measure, one row per forward."""
        return [*self.rows.windows, *(prompt.ids for prompt in self.prompts), *self.pieces]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def work(self) -> float:
        return sum(cost(len(ids)) for ids in self.tokens)

    def within(self, trained: int) -> Sample:
        """Return the part for the unpatched model: all rows up to this length."""
        prompts = tuple(prompt for prompt in self.prompts if prompt.length == trained)
        return replace(self, rows=Rows(), prompts=prompts)


@dataclass(frozen=True)
class Scores:
    """Scores of a model on a sample: losses in nats per token, and which answers it would write.

    ``far`` and ``inside`` are of every window (the latter a mean over the windows of the trained
    length in it), ``answers`` and ``found`` of every prompt.
    """

    far: tuple[float, ...]
    inside: tuple[float, ...]
    answers: tuple[float, ...]
    found: tuple[bool, ...]

    @property
    def loss(self) -> float:
        """The objective: the mean loss of the windows plus that of the answers."""
        return sum(mean(part) for part in (self.far, self.answers) if part)

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, (*self.far, *self.inside, *self.answers)))

    def found_at(self, length: int, sample: Sample) -> list[bool]:
        """Return which prompts of ``length`` tokens were answered."""
        both = zip(sample.prompts, self.found, strict=True)
        return [hit for prompt, hit in both if prompt.length == length]

    @classmethod
    def from_json(cls, data: Mapping[str, Sequence[Any]]) -> Scores:
        """Parse the scores in a line of the log, with None for infinite losses."""
        read: Any = {k: tuple(math.inf if x is None else x for x in v) for k, v in data.items()}
        return cls(**read)


class Trials:
    """Measures methods on an unpatched model, each once, in the log of this ``kind`` of run."""

    def __init__(
        self,
        model: nn.Module,
        rope: Rope,
        given: TuneOptions,
        path: Path | None,
        kind: str,
        settings: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.rope = rope
        self.given = given
        self.forwards = 0  # one row each, run now or before
        self.known: dict[str, Any] = {}
        self.done: set[str] = set()
        self.log = None
        self.advance = lambda work: None
        self.show = lambda **changes: None
        if path is None:
            return
        # As the log returns them, with lists for tuples.
        whole = {"format": FORMAT, "versions": versions(), **settings}
        settings = json.loads(json.dumps(whole))
        self.log = Log(path, to_line({kind: settings}), ROOM)
        with writing(path, "give another output"):
            if path.exists():
                found, self.known = read_log(path, kind)
                changed = [name for name, value in settings.items() if found.get(name) != value]
                if changed:
                    raise MeasureError(
                        f"{path} is of another {kind} (another {', '.join(changed)}); give the "
                        f"same again to go on with it, or another output"
                    )
        self.log.open()

    @contextmanager
    def progress(self, samples: Sequence[tuple[Sample, int]]) -> Iterator[None]:
        """Print the maximum number of forwards, and show progress, by methods for each sample."""
        from rope_eval.progress import progress, tell  # rich is imported on demand

        rounds = [*samples, *((sample.within(self.rope.length), 1) for sample, _ in samples)]
        forwards = sum(len(sample) * count for sample, count in rounds)
        tokens = sum(len(ids) * count for sample, count in rounds for ids in sample.tokens)
        tell(f"at most {forwards:,} forwards of one row, {tokens:,} tokens")
        with evaluating(self.model), progress() as shown:
            bar = shown.add_task("", total=sum(one.work * count for one, count in rounds))
            self.advance = partial(shown.advance, bar)
            self.show = partial(shown.update, bar)
            yield

    def scores(self, method: Method | None, sample: Sample) -> Scores:
        """Return the scores of a method; None: of the unpatched model within its trained length."""
        sample = sample.within(self.rope.length) if method is None else sample
        trial = {"method": method and method_to_json(method), "sample": sample.name}
        key = json.dumps(trial)
        first = key not in self.done
        self.done.add(key)
        self.forwards += len(sample) * first
        if (known := self.known.get(key)) is not None:
            self.advance(sample.work * first)
            return Scores.from_json(known)
        with (
            nullcontext() if method is None else patched(self.model, method, **self.given.arguments)
        ):
            far = self._losses(sample.rows.windows, self.given.tail)
            pieces = iter(self._losses(sample.pieces, self.rope.length - 1))
            answers = losses_of_answers(self.model, sample.prompts, self.advance)
        inside = [mean([next(pieces) for _ in each]) for each in sample.inside]
        losses = tuple(loss for loss, _ in answers)
        found = tuple(hit for _, hit in answers)
        scores = Scores(far=tuple(far), inside=tuple(inside), answers=losses, found=found)
        plain = asdict(scores).items()
        self.known[key] = {k: [None if x == math.inf else x for x in v] for k, v in plain}
        if self.log is not None:
            self.log.add(to_line({**trial, "scores": self.known[key]}))
        return scores

    def _losses(self, rows: Sequence[Sequence[int]], scored: int) -> list[float]:
        return (
            losses_at_end(self.model, windows=rows, scored=scored, advance=self.advance)
            if scored
            else []
        )

    def counting(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
        """Return the samples with the prompts that count, and a note for each hay that does not.

        A hay counts if the unpatched model finds at least half of its prompts within its length.
        """
        hits: dict[str, list[bool]] = {}
        for sample in samples:
            prompts = sample.within(self.rope.length).prompts
            for prompt, hit in zip(prompts, self.scores(None, sample).found, strict=True):
                hits.setdefault(prompt.hay, []).append(hit)
        # By all samples together, so that what selects and what judges count the same prompts.
        left = [hay for hay, found in hits.items() if sum(found) < MIN_FOUND * len(found)]
        easier = "; an easier one may be found: --needle word" * (self.given.needle == "number")
        notes = [
            f"answers hidden in {hay} do not count: within its {self.rope.length} trained tokens "
            f"the unpatched model finds {sum(hits[hay])} of {len(hits[hay])}{easier}"
            for hay in left
        ]
        return [
            replace(sample, prompts=tuple(p for p in sample.prompts if p.hay not in left))
            for sample in samples
        ], notes


def trained_rope(model: nn.Module, given: TuneOptions) -> Rope:
    plain = unwrap(model)
    if not (isinstance(plain, PreTrainedModel) and plain.can_generate()):
        raise OptionError(
            f"{type(plain).__name__} does not continue a prompt, as causal language models do; "
            f"load it with AutoModelForCausalLM, or measure an embedder with rope-ext compare"
        )
    rope = first_site(model, given.sliding_layers, given.original_max_position_embeddings).rope
    if given.target_length <= rope.length:
        raise OptionError(
            f"target_length={given.target_length} is not beyond the {rope.length} trained tokens; "
            f"give a longer one"
        )
    if given.tail >= given.target_length:
        raise OptionError(
            f"scored={given.tail} is not valid; it must be below "
            f"target_length={given.target_length}, since the first token has no context"
        )
    return rope


def read_log(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    lines = list(read_lines(path))
    settings = lines[0].get(kind) if lines else None
    if not isinstance(settings, dict):
        raise MeasureError(f"{path} is not the log of a {kind}; delete it, or give another output")
    trials = [(line, line.pop("scores")) for line in lines[1:] if "scores" in line]
    return settings, {json.dumps(trial): scores for trial, scores in trials}
