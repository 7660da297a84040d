"""Long documents as training rows: read, tokenised, packed to one length, made a batch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value

from recipes.positions import Drawn
from recipes.stream import DataError, Packer, Source, Stream
from rope_eval.data.prompts import beginning
from rope_eval.data.text import python_library
from rope_ext.errors import first_line

PYTHON_LIBRARY = "python-library"
"""Name of the data that every machine has."""

IGNORED = -100  # label without a loss, as torch and transformers have it
_READERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_LOOKED_AT, _ENOUGH = 1024, 16  # documents of a stream, and long ones, that tell of the rest
_ROWS = 100  # that are packed at once; on average half a row of them is left over


def documents(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    column: str = "text",
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """Documents, one a row, in the column ``text``.

    Args:
        name: ``python-library``, a file (txt and md: one document; jsonl, json and parquet: one
            a row), a folder of such files, or the id of a data set of the Hub.
        config: of a data set of the Hub.
        split: likewise; of ``python-library``, ``train`` or ``held_out``.
        column: that holds the text.
        streaming: read while training; otherwise everything is read and kept on disk first.

    Raises:
        DataError: there is no such data, or no such column.
    """
    try:
        if name == PYTHON_LIBRARY:
            library = python_library("held_out" if split == "held_out" else "train")
            data: Any = Dataset.from_dict({"text": library})
            data = data.to_iterable_dataset() if streaming else data
        elif Path(name).exists():
            data = _local(Path(name), streaming)
        else:
            data = datasets.load_dataset(name, config, split=split, streaming=streaming)
        first = list(data.take(_ENOUGH))
    except DataError:
        raise
    except Exception as error:  # datasets raises those of every format and file system
        cause: BaseException = error
        while cause.__cause__ is not None:  # its own says that there was an error
            cause = cause.__cause__
        raise DataError(
            f"cannot read the data {name!r} ({first_line(cause) or type(cause).__name__}); give "
            f"--dataset an existing file or folder, the id of a data set of the Hub, or "
            f"{PYTHON_LIBRARY}"
        ) from error
    if not first:
        raise DataError(f"the data {name!r} are empty; give --dataset others")
    texts = [key for key in first[0] if any(isinstance(row.get(key), str) for row in first)]
    if column not in texts:
        raise DataError(
            f"the data {name!r} have no column {column!r} with text; give --text_column one that "
            f"has ({', '.join(texts) or 'there is none'})"
        )
    data = data.select_columns(column)
    return data if column == "text" else data.rename_column(column, "text")


def _local(path: Path, streaming: bool) -> Any:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    kinds: dict[str, list[str]] = {}
    for file in files:
        if file.suffix in _READERS and file.is_file():
            kinds.setdefault(_READERS[file.suffix], []).append(str(file))
    if not kinds:
        raise DataError(
            f"{path} holds no text; files are read by their suffix: {', '.join(_READERS)}"
        )
    parts = []
    for kind, names in kinds.items():
        options = {"sample_by": "document"} if kind == "text" else {}
        parts.append(
            datasets.load_dataset(
                kind, data_files=names, split="train", streaming=streaming, **options
            )
        )
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


@dataclass(frozen=True)
class Tokenise:
    """Documents as tokens: one beginning token, where the tokenizer has one, and one end token."""

    tokenizer: Any

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        head = list(beginning(self.tokenizer))
        end = self.tokenizer.eos_token_id
        tail = [] if end is None else [end]
        made = []
        for text in batch["text"]:
            if not isinstance(text, str | None):
                raise DataError(
                    f"a document of the data is no text but {type(text).__name__}: {text!r:.40}; "
                    f"leave it out, or give --text_column another column"
                )
        texts = [(text or "").removeprefix("\ufeff") for text in batch["text"]]
        for ids in self.tokenizer(texts, add_special_tokens=False, verbose=False).input_ids:
            begun = ids[: len(head)] == head  # by the text itself
            ended = tail and ids[-1:] == tail
            whole = [*([] if begun else head), *ids, *([] if ended else tail)]
            made.append(whole if ids else [])
        return {"input_ids": made, "tokens": [len(ids) for ids in made]}


@dataclass(frozen=True)
class Pack:
    """Documents one after the other, cut into rows of ``length`` tokens; the rest is left out.

    With ``masking`` a row also says where its documents begin: ``position_ids`` count from 0 in
    each of them, and in the rest of one that began in the row before.
    """

    length: int
    masking: bool = False

    def __call__(self, batch: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, Any]:
        documents = [np.asarray(ids, dtype=np.int32) for ids in batch["input_ids"]]
        rows = sum(map(len, documents)) // self.length
        shape = (rows, self.length)
        size = rows * self.length
        made = {"input_ids": np.concatenate(documents)[:size].reshape(shape)}
        if self.masking:
            first = np.concatenate([np.arange(len(ids)) == 0 for ids in documents])
            first = first[:size].reshape(shape)
            at = np.arange(self.length, dtype=np.int32)
            made["position_ids"] = at - np.maximum.accumulate(np.where(first, at, 0), axis=1)
        return made

    def rows(self, tokens: int) -> float:
        return tokens / self.length

    @property
    def shortest(self) -> int:
        return 1

    @property
    def names(self) -> list[str]:
        return ["input_ids", *(["position_ids"] if self.masking else [])]


@dataclass(frozen=True)
class Chunk:
    """Each document cut into rows of ``length`` tokens; its remainder is dropped.

    Every row is one span of one document, and a document shorter than a row makes none, as in the
    long data of ProLong: pack.py of CodeCreator/datatools with ``min_length`` = ``pack_length``.

    Args:
        length: of a row, in tokens.
        masking: add ``position_ids``, so that these rows can be mixed with those of :class:`Pack`.
    """

    length: int
    masking: bool = False

    def __call__(self, batch: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, Any]:
        documents = [np.asarray(ids, dtype=np.int32) for ids in batch["input_ids"]]
        whole = [ids[: len(ids) // self.length * self.length] for ids in documents]
        made = {"input_ids": np.concatenate(whole).reshape(-1, self.length)}
        if self.masking:
            positions = np.arange(self.length, dtype=np.int32)
            made["position_ids"] = np.tile(positions, (len(made["input_ids"]), 1))
        return made

    def rows(self, tokens: int) -> float:
        return float(tokens // self.length)

    @property
    def shortest(self) -> int:
        return self.length

    @property
    def names(self) -> list[str]:
        return ["input_ids", *(["position_ids"] if self.masking else [])]


@dataclass(frozen=True)
class Bookend:
    """Documents one after the other, cut into rows that all begin and end as a document does.

    As in the data of YaRN (arXiv 2309.00071, section 4.1): "segments bookended with the BOS and
    EOS token". Where a document happens to begin with a row, its own beginning is the row's.

    Args:
        length: of a row, its ends among them.
        head: tokens that begin a document.
        tail: tokens that end one.
    """

    length: int
    head: tuple[int, ...]
    tail: tuple[int, ...]

    def __call__(self, batch: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, Any]:
        whole = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in batch["input_ids"]])
        head, tail = np.asarray(self.head, np.int32), np.asarray(self.tail, np.int32)
        inner = self.length - len(head) - len(tail)
        rows, at = [], 0
        while True:
            if len(head) and np.array_equal(whole[at : at + len(head)], head):
                at += len(head)
            if at + inner > len(whole):
                break
            rows.append(np.concatenate([head, whole[at : at + inner], tail]))
            at += inner
            if len(tail) and np.array_equal(whole[at : at + len(tail)], tail):
                at += len(tail)
        return {"input_ids": np.array(rows, np.int32).reshape(-1, self.length)}

    def rows(self, tokens: int) -> float:
        return tokens / (self.length - len(self.head) - len(self.tail))

    @property
    def shortest(self) -> int:
        return 1

    @property
    def names(self) -> list[str]:
        return ["input_ids"]


@dataclass(frozen=True)
class Apart:
    """A row of each document that is long enough: its beginning.

    Args:
        length: of a row.
        most: tokens of a document that are kept, for a scheme that picks ``length`` out of them.
    """

    length: int
    most: int

    def __call__(self, batch: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, Any]:
        long = [ids[: self.most] for ids in batch["input_ids"] if len(ids) >= self.length]
        return {"input_ids": long}

    def rows(self, tokens: int) -> float:
        return float(tokens >= self.length)

    @property
    def shortest(self) -> int:
        return self.length

    @property
    def names(self) -> list[str]:
        return ["input_ids"]


def packer(kind: str, tokenizer: Any, length: int, masking: bool, most: int) -> Any:
    """What makes rows.

    Args:
        kind: ``packed``, ``chunked``, ``bookended`` or ``document``.
        tokenizer: of the model; it knows how documents begin and end.
        length: of a row.
        masking: of packed and chunked rows, whether they say where documents begin.
        most: tokens of a document that its row is picked from, for ``document``.
    """
    if kind == "document":
        return Apart(length, most)
    if kind == "bookended":
        end = tokenizer.eos_token_id
        return Bookend(length, beginning(tokenizer), () if end is None else (end,))
    return (Chunk if kind == "chunked" else Pack)(length, masking)


def rows(
    data: Dataset | IterableDataset,
    tokenizer: Any,
    pack: Any,
    *,
    minimum: int = 0,
    seed: int = 0,
) -> Dataset | Stream:
    """Rows of ``pack``, each with its ``index``.

    Rows of a stream are shuffled, and begin again when they end; rows of data on disk stay in
    order, and Trainer draws them at random.

    Raises:
        DataError: no document is long enough, or there is not one whole row.
    """
    if isinstance(data, IterableDataset):
        return Stream([source(data, tokenizer, pack, minimum=minimum, seed=seed)], [1.0], seed)
    minimum = max(minimum, pack.shortest)
    tokens = Features({"input_ids": List(Value("int32")), "tokens": Value("int64")})
    data = data.map(
        Tokenise(tokenizer), batched=True, batch_size=64, remove_columns=["text"], features=tokens
    )
    kept = data.filter(lambda row: row["tokens"] >= minimum)
    counts = data["tokens"][:]
    long = _long(counts, minimum, pack, "all")
    batch = math.ceil(_ROWS * len(long) / _whole(long, pack))  # documents that make _ROWS rows
    features = {name: List(Value("int32")) for name in pack.names}
    packed = kept.map(
        pack, batched=True, batch_size=batch, remove_columns=["tokens"], features=Features(features)
    )
    numbered = Features({**features, "index": Value("int64")})
    return packed.map(_number, with_indices=True, features=numbered)


def source(
    data: Dataset | IterableDataset, tokenizer: Any, pack: Packer, *, minimum: int, seed: int
) -> Source:
    """Data as one source of a stream.

    Raises:
        DataError: none of the first documents is long enough, or all make no row.
    """
    if not isinstance(data, IterableDataset):
        data = data.to_iterable_dataset()
    tokenise, minimum = Tokenise(tokenizer), max(minimum, pack.shortest)
    counts: list[int] = []
    for batch in data.take(_LOOKED_AT).iter(_ENOUGH):
        counts += tokenise(batch)["tokens"]
        if sum(pack.rows(count) for count in counts if count >= minimum) >= 1:
            break
    else:
        long = _long(counts, minimum, pack, "the first")
        if len(counts) < _LOOKED_AT:
            _whole(long, pack)
    return Source(data, tokenise, pack, minimum, seed)


def _long(counts: list[int], minimum: int, pack: Packer, which: str) -> list[int]:
    long = [count for count in counts if count >= minimum]
    if not long:
        needed = "length" if minimum == pack.shortest else "minimum_document"
        raise DataError(
            f"no document is long enough: the longest of {which} {len(counts)} has "
            f"{max(counts, default=0)} tokens; lower --{needed} {minimum} or give "
            f"data with longer documents"
        )
    return long


def _whole(long: list[int], pack: Packer) -> float:
    """Rows that documents of those lengths make."""
    made = sum(map(pack.rows, long))
    if made < 1:
        raise DataError(
            f"the data hold {sum(long)} tokens in {len(long)} documents, which is not one row of "
            f"--length {pack.length}; give more data or a smaller --length"
        )
    return made


def _number(row: dict[str, Any], index: int) -> dict[str, Any]:
    return {**row, "index": index}


@dataclass
class Collator:
    """Rows as a batch.

    What is drawn follows from nothing but ``seed``, the epoch and the index of the row: a resumed
    run and any number of processes draw the same. A row without an index, as those that are held
    out have none, stays as it is.

    Args:
        scheme: of the positions (recipes/positions.py); None: every one follows the one before.
        seed: of the draws.
        epoch: passes over the data before this one.
        retrieval: turns some rows into rows with facts (recipes/retrieval.py); None: no row.
    """

    scheme: Callable[[Sequence[int], random.Random], Drawn] | None = None
    seed: int = 0
    epoch: int = 0
    retrieval: Callable[[Sequence[int], random.Random], Sequence[int]] | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if rows[0].get("index", 0) < 0:  # Trainer is on its way to where it stood
            nothing = torch.full((len(rows), 1), IGNORED)
            return {"input_ids": torch.zeros_like(nothing), "labels": nothing}
        if self.retrieval is not None and "index" in rows[0]:
            # Its own generator: positions are those that a run without such rows draws.
            rows = [
                {**row, "input_ids": self.retrieval(row["input_ids"], self._rng(row, "retrieval:"))}
                for row in rows
            ]
        if self.scheme is not None and "index" in rows[0]:
            drawn = [self._drawn(row) for row in rows]
            ids = _stacked([taken for taken, _ in drawn])
            # Without a mask transformers takes every jump in the positions for a new document.
            return {
                "input_ids": ids,
                "labels": ids.clone(),
                "position_ids": torch.stack([positions for _, positions in drawn]),
                "attention_mask": torch.ones_like(ids),
            }
        ids = _stacked([row["input_ids"] for row in rows])
        batch = {"input_ids": ids, "labels": ids.clone()}
        if "position_ids" in rows[0]:
            # Without a mask transformers keeps documents apart by their positions.
            batch["position_ids"] = _stacked([row["position_ids"] for row in rows])
            batch["labels"][batch["position_ids"] == 0] = IGNORED
        return batch

    def _drawn(self, row: Mapping[str, Any]) -> Drawn:
        return self.scheme(row["input_ids"], self._rng(row))

    def _rng(self, row: Mapping[str, Any], use: str = "") -> random.Random:
        return random.Random(f"{use}{self.seed}:{self.epoch}:{row['index']}")


def _stacked(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.int64))
