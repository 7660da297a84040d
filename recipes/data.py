"""Long documents as training rows: read, tokenised, packed to one length, positions skipped."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value

from rope_ext.errors import RopeExtError, first_line
from rope_ext.measure.prompts import beginning
from rope_ext.measure.text import python_library

PYTHON_LIBRARY = "python-library"
"""Name of the data that every machine has."""

IGNORED = -100  # label without a loss, as torch and transformers have it
_READERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_LOOKED_AT, _ENOUGH = 1024, 16  # documents of a stream, and long ones, that tell of the rest
_SHUFFLED = 256  # documents, and rows, of a stream that are held to be drawn from
_ROWS = 100  # that are packed at once; on average half a row of them is left over


class DataError(RopeExtError):
    """The data cannot be read, or make no row."""


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
        split: likewise.
        column: that holds the text.
        streaming: read while training; otherwise everything is read and kept on disk first.

    Raises:
        DataError: there is no such data, or no such column.
    """
    try:
        if name == PYTHON_LIBRARY:
            data: Any = Dataset.from_dict({"text": python_library("train")})
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
    masking: bool

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

    @property
    def features(self) -> Features:
        names = ["input_ids", *(["position_ids"] if self.masking else [])]
        return Features({name: List(Value("int32")) for name in names})


def rows(
    data: Dataset | IterableDataset,
    tokenizer: Any,
    *,
    length: int,
    minimum: int = 0,
    masking: bool = False,
    seed: int = 0,
) -> Dataset | IterableDataset:
    """Rows of exactly ``length`` tokens, each with its ``index``.

    A stream is shuffled a little, documents and then rows, and begins again when it ends; rows of
    data on disk stay in order, and Trainer draws them at random.

    Raises:
        DataError: no document has ``minimum`` tokens, or there is not one whole row.
    """
    stream = isinstance(data, IterableDataset)
    tokenise, minimum = Tokenise(tokenizer), max(minimum, 1)
    counts: list[int] = []
    if stream:
        for batch in data.take(_LOOKED_AT).iter(_ENOUGH):
            counts += tokenise(batch)["tokens"]
            if sum(count >= minimum for count in counts) >= _ENOUGH:
                break
        data = data.shuffle(seed=seed, buffer_size=_SHUFFLED)
    tokens = Features({"input_ids": List(Value("int32")), "tokens": Value("int64")})
    data = data.map(tokenise, batched=True, batch_size=64, remove_columns=["text"], features=tokens)
    kept = data.filter(lambda row: row["tokens"] >= minimum)
    counts = counts if stream else data["tokens"][:]
    long = [count for count in counts if count >= minimum]
    if not long:
        raise DataError(
            f"no document is long enough: the longest of {'the first' if stream else 'all'} "
            f"{len(counts)} has {max(counts)} tokens; lower --minimum_document {minimum} or give "
            f"data with longer documents"
        )
    if not stream and sum(long) < length:
        raise DataError(
            f"the data hold {sum(long)} tokens in {len(long)} documents, which is not one row of "
            f"--length {length}; give more data or a smaller --length"
        )
    pack = Pack(length, masking)
    batch = -(-_ROWS * length * len(long) // sum(long))  # documents that make _ROWS rows
    packed = kept.map(
        pack, batched=True, batch_size=batch, remove_columns=["tokens"], features=pack.features
    )
    if stream:  # the rows of a long document follow one another, and would fill a step
        packed = packed.repeat(None).shuffle(seed=seed, buffer_size=_SHUFFLED)
    numbered = Features({**pack.features, "index": Value("int64")})
    return packed.map(_number, with_indices=True, features=numbered)


def _number(row: dict[str, Any], index: int) -> dict[str, Any]:
    return {**row, "index": index}


def skipped_positions(
    length: int, target: int, chunks: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Where the chunks of a PoSE row begin, and by how much their positions are moved.

    Offsets are uniform between the one before and ``target - length``, the first is 0; borders
    between chunks are uniform. (Zhu et al. 2023, arXiv 2309.10400, section 3.2; the text of the
    chunks is one consecutive piece, their ``v_i = 0``.)
    """
    starts = [0, *sorted(rng.sample(range(1, length), chunks - 1))]
    offsets = [0]
    while len(offsets) < chunks:
        offsets.append(rng.randint(offsets[-1], target - length))
    return starts, offsets


@dataclass
class Collator:
    """Rows as a batch.

    With ``pose_chunks``, rows get the positions of ``target`` tokens, drawn from nothing but
    ``seed``, the epoch and the index of the row: a resumed run and any number of processes draw
    the same.

    Args:
        pose_chunks: chunks of a row; 0: every position follows the one before.
        target: tokens that positions may span.
        seed: of the draws.
        epoch: passes over the data before this one.
    """

    pose_chunks: int = 0
    target: int = 0
    seed: int = 0
    epoch: int = 0

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        ids = _stacked(rows, "input_ids")
        batch = {"input_ids": ids, "labels": ids.clone()}
        if "position_ids" in rows[0]:
            # Without a mask transformers keeps documents apart by their positions.
            batch["position_ids"] = _stacked(rows, "position_ids")
            batch["labels"][batch["position_ids"] == 0] = IGNORED
            return batch
        if self.pose_chunks:
            batch["position_ids"] = torch.stack([self._positions(row) for row in rows])
            # Without it transformers takes every jump in the positions for a new document.
            batch["attention_mask"] = torch.ones_like(ids)
        return batch

    def _positions(self, row: Mapping[str, Any]) -> torch.Tensor:
        length = len(row["input_ids"])
        rng = random.Random(f"{self.seed}:{self.epoch}:{row['index']}")
        starts, offsets = skipped_positions(length, self.target, self.pose_chunks, rng)
        positions = torch.arange(length)
        for start, before, offset in zip(starts[1:], offsets, offsets[1:], strict=False):
            positions[start:] += offset - before
        return positions


def _stacked(rows: Sequence[Mapping[str, Any]], name: str) -> torch.Tensor:
    return torch.from_numpy(np.array([row[name] for row in rows], dtype=np.int64))
