"""Measures cells of the evidence, the most valuable ones first, one JSON line for each.

A cell is the losses of one document, or the answers to a part of the prompts of one task and
length: one prompt at each depth. Answers are decoded.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from lab.evidence.questions import TASKS, Questions
from rope_eval.cases import share_found
from rope_eval.folder import Log, read_lines, to_line
from rope_eval.forward import LOGITS, score, write
from rope_eval.versions import versions
from rope_ext.errors import RopeExtError
from rope_ext.methods import all_methods, build_method
from rope_ext.patching import patched

HEADER = b'{"program": "rope_ext", "log": "evidence", "format": 1}\n'
BUCKET = 512
"""Number of tokens whose losses are averaged in a line."""
FIRST = (
    *("unpatched", "yarn", "rerope", "self_extend", "dual_chunk", "ntk", "llama3", "string"),
    *("dynamic_yarn", "leaky_rerope", "pi", "lampe", "dpe", "mrrope", "dynamic_ntk"),
)
"""Methods to measure first, in this order."""
FRONT = ("unpatched", "yarn", "dynamic_yarn", "self_extend", "rerope")
"""Rows of the front page."""
NEEDS_TABLE = ("longrope", "longrope2")
"""Left out, since their tables have to be searched first."""
STRING = {"factor": 1.98}
"""The largest factor that it can have by default, just below 2."""
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("rerope", {"published": True}),
    ("rerope", {"log_n": False}),
    ("self_extend", {"published": True}),
    ("yarn", {"attention_factor": 1.0}),
    ("yarn", {"attention_factor": 1.15}),
    ("dual_chunk", {"temperature": "log_n"}),
    ("leaky_rerope", {"log_n": False}),
    ("ntk", {"attention_factor": 1.1}),
    ("llama3", {"attention_factor": 1.1}),
    ("rerope", {"window": 0.75}),
    ("self_extend", {"window": 0.5}),
    ("jet_long", {"temperature": "log_n"}),
)
"""Settings in addition to the defaults; a ``window`` is a share of the trained length."""


@dataclass(frozen=True)
class Cell:
    """One measurement of a method, or of ``unpatched``.

    ``document`` is the name of the text of a ``loss``, ``part`` the number of a part of prompts.
    """

    method: str
    options: Mapping[str, Any]
    task: str
    length: int
    document: str | None = None
    part: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        options = tuple(sorted((name, str(value)) for name, value in self.options.items()))
        return self.method, options, self.task, self.length, self.document, self.part


def depends_on_length(method: str, **options: Any) -> bool:
    """Whether the losses of a forward depend on its length."""
    if method in ("unpatched", "lampe"):
        return method == "lampe"
    return build_method(method, **options).is_dynamic


@dataclass
class Measurement:
    """A run over the cells of one model.

    A line of ``output`` counts if its digest matches these questions. No cell starts after
    ``until``, in ``time.monotonic()``; ``methods`` are the only ones to measure (empty: all).
    """

    name: str
    model: nn.Module
    tokenizer: Any
    questions: Questions
    trained: int
    output: Path
    until: float
    methods: Sequence[str] = ()
    lines: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    def run(self) -> bool:
        """Measure all cells that are left; return whether none is left."""
        log = Log(self.output, HEADER, "make room or give --output another file")
        self.output.parent.mkdir(parents=True, exist_ok=True)
        log.open()
        for line in read_lines(self.output):
            if line.get("model") == self.name and line.get("questions") == self._asked(_cell(line)):
                self.lines[_cell(line).key] = line
        weight = next(self.model.parameters())
        cuda = weight.device.type == "cuda"
        device = torch.cuda.get_device_name(weight.device) if cuda else "cpu"
        dtype = str(weight.dtype).removeprefix("torch.")
        common = {"model": self.name, "seed": 0, "dtype": dtype, "device": device, **versions()}
        refused: set[tuple[str, str]] = set()

        def keep(cell: Cell, found: Mapping[str, Any]) -> None:
            line = {**common, "questions": self._asked(cell), **vars(cell), **found}
            log.add(to_line(line))
            self.lines[cell.key] = line

        for method, options, cells in self._plan():
            # A refusal is tried again, since a later version may take the method.
            cells = [cell for cell in cells if "refused" in self.lines.get(cell.key, ["refused"])]
            left_out = self.methods and method not in self.methods
            if left_out or not cells or (method, str(options)) in refused:
                continue
            if time.monotonic() > self.until:
                return False
            try:
                with self._patched(method, options):
                    ids = next(iter(self.questions.documents.values()))
                    score(self.model, [ids[: cells[0].length // 8]], 1)  # a warm-up
                    for cell in cells:
                        if time.monotonic() > self.until:
                            return False
                        keep(cell, self._measure(cell))
                        print(_summary(self.lines[cell.key]), flush=True)
            except (RopeExtError, torch.OutOfMemoryError) as error:
                refused.add((method, str(options)))
                reason = str(error).splitlines()[0]
                # Once, or each run would add a line.
                if self.lines.get(cells[0].key, {}).get("refused") != reason:
                    keep(cells[0], {"refused": reason})
                print(f"{method} {options}: {reason}", flush=True)
        return True

    def _asked(self, cell: Cell) -> str | None:
        return self.questions.digest(cell.task, cell.length, cell.document, cell.part)

    def _patched(self, method: str, options: Mapping[str, Any]) -> Any:
        if method == "unpatched":
            return nullcontext()
        given = dict(options)
        if isinstance(given.get("window"), float):
            given["window"] = int(given["window"] * self.trained)
        return patched(self.model, method, **given)

    def _plan(self) -> Iterator[tuple[str, dict[str, Any], list[Cell]]]:
        """Methods, options, and cells to measure under them, the most valuable first."""
        trained = self.trained
        names = [*self.questions.documents]
        double = 2 * trained
        quadruple = 4 * trained
        longest = min(map(len, self.questions.documents.values()))
        # First the prompts of the front page, in rounds: a run that stops early has every row.
        for part, task in itertools.product(range(self.parts), TASKS):
            for method in FRONT:
                options = {"factor": 2} if method != "unpatched" else {}
                yield method, options, self._prompts(method, options, (double,), (task,), part)
        if longest < quadruple:  # each forward is long
            yield from self._defaults(2, trained // 4, names[:2])
            yield from self._defaults(2, double, names[:2])
        yield from self._defaults(2, double, names[:4], prompts=(3 * trained // 2, double))
        if longest >= quadruple:
            yield from self._defaults(4, quadruple, names[:2], prompts=(quadruple,))
        for method, more in VARIANTS:
            options = {"factor": 2, **more}
            losses = [
                Cell(method=method, options=options, task="loss", length=double, document=name)
                for name in names[:4]
            ]
            yield method, options, losses + self._prompts(method, options, (double,))
        yield from self._defaults(2, double, names[4:], prompts=(trained,))

    def _defaults(
        self, factor: float, length: int, documents: Sequence[str], prompts: Sequence[int] = ()
    ) -> Iterator[tuple[str, dict[str, Any], list[Cell]]]:
        """Methods with their default options: some documents, and ``prompts`` of these lengths."""
        for method, options in self._methods(factor):
            losses = self._losses(method, options, length, documents=documents)
            yield method, options, losses + self._prompts(method, options, prompts)

    def _methods(self, factor: float) -> Iterator[tuple[str, dict[str, Any]]]:
        registered = [cls.name for cls in all_methods()]
        order = [name for name in FIRST if name == "unpatched" or name in registered]
        for name in dict.fromkeys([*order, *registered]):
            if name == "unpatched":
                yield name, {}
            elif name == "string" and factor == 2:
                yield name, dict(STRING)
            elif name not in NEEDS_TABLE:
                yield name, {"factor": factor}

    def _losses(
        self, method: str, options: dict[str, Any], length: int, documents: Sequence[str]
    ) -> list[Cell]:
        lengths = [length]
        factor = options.get("factor", 64)
        # One forward only has the losses of one length.
        if length > self.trained and depends_on_length(method, **options):
            shares = (1.25, 1.5, 2) if factor == 2 else (factor,)
            if factor == 2 and method == "lampe":  # it also changes short texts
                shares = (1, *shares)
            lengths = [round(share * self.trained) for share in shares]
        most = int(factor * self.trained) // BUCKET * BUCKET  # STRING reaches almost 2x
        return [
            Cell(
                method=method,
                options=options,
                task="loss",
                length=min(each, most),
                document=document,
            )
            for document in documents
            for each in lengths
        ]

    @property
    def parts(self) -> int:
        """Number of parts that the prompts of a task and length are divided into."""
        return 1 + max(part for _, _, part in self.questions.prompts)

    def _prompts(
        self,
        method: str,
        options: Mapping[str, Any],
        lengths: Sequence[int],
        tasks: Sequence[str] = TASKS,
        part: int | None = None,
    ) -> list[Cell]:
        """Return the cells of these prompts: of one ``part``, or of all parts."""
        parts = range(self.parts) if part is None else [part]
        return [
            Cell(method=method, options=options, task=task, length=length, part=each)
            for length in lengths
            for task in tasks
            for each in parts
            if (task, length, each) in self.questions.prompts
            and length <= self.trained * options.get("factor", 64)
        ]

    def _measure(self, cell: Cell) -> dict[str, Any]:
        cuda = next(self.model.parameters()).is_cuda
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        found = self._loss(cell, cuda) if cell.document is not None else self._answers(cell)
        if cuda:
            torch.cuda.synchronize()
        seconds = round(time.perf_counter() - start, 4)
        return {**found, "seconds": seconds}

    def _loss(self, cell: Cell, cuda: bool) -> dict[str, Any]:
        ids = self.questions.documents[str(cell.document)][: cell.length]
        losses, _ = score(self.model, [ids], len(ids) - 1, logits=LOGITS * (4 if cuda else 1))
        # The first token has no loss: the first bucket has one token less.
        buckets = losses[0].double().tensor_split(tuple(range(BUCKET - 1, len(ids) - 1, BUCKET)))
        return {"losses": [round(float(bucket.mean()), 5) for bucket in buckets]}

    def _answers(self, cell: Cell) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"right": [], "written": [], "depths": []}
        eos = cast(Any, self.model).generation_config.eos_token_id
        pad = self.tokenizer.pad_token_id or 0
        for case in self.questions.prompts[cell.task, cell.length, int(cell.part or 0)]:
            [ids] = write(self.model, [case.ids], case.count, pad=pad, eos=eos)
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            found["right"].append(int(share_found(case, text)))
            found["written"].append(text)
            found["depths"].append(round(case.depth or 0.0, 3))
        return found


def _cell(line: Mapping[str, Any]) -> Cell:
    return Cell(**{name: line.get(name) for name in Cell.__dataclass_fields__})


def _summary(line: Mapping[str, Any]) -> str:
    if "losses" in line:
        result = f"{line['document']} loss {line['losses'][-1]:.3f} in the last {BUCKET} tokens"
    else:
        result = (
            f"{line['task']} {sum(line['right'])} of {len(line['right'])} (part {line['part']})"
        )
    options = ", ".join(f"{name}={value}" for name, value in line["options"].items())
    return f"{line['method']}({options}) {line['length']} {result} [{line['seconds']:.1f} s]"
