"""Turns long documents into training batches: reads, tokenizes, packs and collates them."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value

from recipes.chat import TokenizeChat, Whole, conversation_of, is_conversation, note_of
from recipes.contents import Contents, beginning_of, code_digest, contents, digest_of, texts_of
from recipes.files import (
    Entry,
    Listing,
    first_entries,
    is_saved,
    list_files,
    load_files,
    load_saved,
    stop,
)
from recipes.positions import Drawn, MixedWindows
from recipes.retrieval import Weighted
from recipes.stream import PLACE, PROBLEM, DataError, Packer, Source, Stream
from rope_eval.data.prompts import beginning
from rope_eval.data.text import python_library
from rope_ext.errors import first_line, is_path, nowhere
from rope_ext.methods.checked import not_none

PYTHON_LIBRARY = "python-library"
"""Name of the dataset made of the Python standard library, which needs no download."""

IGNORED = -100  # label without a loss, as in torch and transformers
_LOOKED_AT = 1024  # most documents sampled from a stream
_ENOUGH = 16  # long documents after which sampling stops
_HASHED = 64  # documents hashed at once
_ROWS = 100  # rows packed at once; on average, half a row is dropped


def documents(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    column: str = "text",
    streaming: bool = False,
    strict: bool = False,
    chat: bool = False,
    option: str = "dataset",
) -> Dataset | IterableDataset:
    """Load documents, one per row, in the column ``text``.

    The column ``problem``, where there is one, has the reason why a file or row is left out.

    Args:
        name: ``python-library``, a file (txt and md: one document; jsonl, json and parquet: one
            per row; also .gz), a directory of such files or of datasets' ``save_to_disk``, or a
            Hub dataset ID.
        config: configuration of a Hub dataset.
        split: split of a Hub dataset; ``train`` or ``held_out`` for ``python-library``.
        column: column with the text.
        streaming: read during training instead of storing everything on disk first.
        strict: raise an error for a file or row that cannot be read, instead of leaving it out.
        chat: rows are conversations (recipes/chat.py), which become JSON; ``column`` is not used.
        option: setting with the name, ``dataset`` or ``eval_dataset``, for errors.

    Raises:
        DataError: the dataset or the column does not exist.
    """
    try:
        listing = files_of(name)
        if listing is not None:
            files = listing.files
            entries = first_entries(files, column, _ENOUGH)
            if chat:
                for entry in entries:
                    _conversation(entry)
            _require(name, [not_none(entry.row) for entry in entries], column, chat, option)
            convert = _conversation if chat else None
            return load_files(files, column, streaming=streaming, strict=strict, convert=convert)
        data = _dataset(name, config, split, streaming=streaming, option=option)
        first = list(data.take(_ENOUGH))
    except DataError:
        raise
    except Exception as error:  # datasets raises errors of any format and file system
        cause = error
        while isinstance(cause.__cause__, Exception):  # the outer error is generic
            cause = cause.__cause__
        if isinstance(cause, DataError):
            raise cause from None
        raise DataError(
            f"cannot read the dataset {name!r} ({first_line(cause) or type(cause).__name__})"
            f"{nowhere(name)}; give --{option} an existing file or directory, a Hub dataset ID, or "
            f"{PYTHON_LIBRARY}"
        ) from error
    _require(name, first, column, chat, option)
    if chat:
        for number, row in enumerate(first):
            _conversation(_row(row, number, name))
        return data.map(
            _as_conversation,
            with_indices=True,
            fn_kwargs={"name": name, "strict": strict, "code": code_digest()},
            remove_columns=list(first[0]),
            features=Features({name: Value("string") for name in ("text", PLACE, PROBLEM)}),
        )
    data = data.select_columns(column)
    return data if column == "text" else data.rename_column(column, "text")


def files_of(name: str) -> Listing | None:
    """The files of a dataset; None if it is not a file or a directory of files.

    Raises:
        DataError: the directory has no files to read.
    """
    if name == PYTHON_LIBRARY or not Path(name).exists() or is_saved(Path(name)):
        return None
    return list_files(Path(name))


def _dataset(name: str, config: str | None, split: str, streaming: bool, option: str) -> Any:
    if name == PYTHON_LIBRARY:
        library = python_library("held_out" if split == "held_out" else "train")
        data: Any = Dataset.from_dict({"text": library})
    elif Path(name).exists():
        splits = {"dataset": "--dataset_split", "eval_dataset": "--eval_split"}
        data = load_saved(Path(name), split, splits[option])
    elif is_path(name):  # do not ask the Hub, which takes a minute without a network
        raise DataError(
            f"there is no file or directory {name!r}; give --{option} an existing one, a Hub "
            f"dataset ID, or {PYTHON_LIBRARY}"
        )
    else:
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    return data.to_iterable_dataset() if streaming else data


def _row(row: Mapping[str, Any], number: int, name: str) -> Entry:
    return Entry(f"{name}, row {number + 1}", row, from_arrow=True)


def _as_conversation(
    row: Mapping[str, Any], number: int, name: str, strict: bool, code: str
) -> dict[str, str | None]:
    entry = _row(row, number, name)
    try:
        return {"text": _conversation(entry), PLACE: entry.place, PROBLEM: None}
    except DataError as error:
        # The first rows were checked before: this one differs from them.
        stop(strict, str(error))
        return {"text": None, PLACE: entry.place, PROBLEM: str(error)}


def _conversation(entry: Entry) -> str:
    """Return a row as the JSON of a conversation; DataError with its place if it is none."""
    try:
        return conversation_of(not_none(entry.row), from_arrow=entry.from_arrow)
    except DataError as error:
        raise DataError(f"{entry.place}: {error}") from None


def _require(
    name: str, first: Sequence[Mapping[str, Any]], column: str, chat: bool, option: str
) -> None:
    """Check that a dataset is not empty, and has the column with the text."""
    if not first:
        raise DataError(f"the dataset {name!r} is empty; give another --{option}")
    if chat:
        return
    keys = dict.fromkeys(key for row in first for key in row)
    texts = [key for key in keys if any(isinstance(row.get(key), str) for row in first)]
    if column not in texts:
        fix = "set --text_column"
        if is_conversation(first[0]):
            fix = "give --format chat for conversations, or set --text_column"
        raise DataError(
            f"the dataset {name!r} has no text column {column!r}; {fix}. Text columns: "
            f"{', '.join(texts) or 'none'}"
        )


@dataclass(frozen=True)
class Tokenize:
    """Tokenizes documents, with one start token (if the tokenizer has one) and one end token."""

    tokenizer: Any
    code: str = field(default_factory=code_digest)  # texts of the Hub have it nowhere else
    names = ("input_ids",)

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        head = list(beginning(self.tokenizer))
        end = self.tokenizer.eos_token_id
        tail = [] if end is None else [end]
        encoded = []
        for text in batch["text"]:
            if not isinstance(text, str | None):
                raise DataError(
                    f"a document is not text but {type(text).__name__}: {text!r:.40}; remove it, "
                    f"or give another --text_column"
                )
        # A byte-order mark at the beginning of a file is not text. Long texts are cut later, so the
        # tokenizer's warning (``verbose``) would be wrong.
        texts = [(text or "").removeprefix("\ufeff") for text in batch["text"]]
        for ids in self.tokenizer(texts, add_special_tokens=False, verbose=False).input_ids:
            begun = ids[: len(head)] == head  # the text itself starts with the token
            ended = tail and ids[-1:] == tail
            whole = [*([] if begun else head), *ids, *([] if ended else tail)]
            encoded.append(whole if ids else [])
        digests = [digest_of(text) for text in texts]
        return {"input_ids": encoded, "tokens": [len(ids) for ids in encoded], "digest": digests}


@dataclass(frozen=True)
class Pack:
    """Concatenates documents and cuts them into rows of ``length`` tokens; the rest is dropped.

    With ``masking``, rows also get ``position_ids``, which restart at 0 in each document and at the
    start of the row.
    """

    length: int
    masking: bool = False

    def __call__(self, batch: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, Any]:
        documents = [np.asarray(ids, dtype=np.int32) for ids in batch["input_ids"]]
        rows = sum(map(len, documents)) // self.length
        shape = (rows, self.length)
        size = rows * self.length
        columns = {"input_ids": np.concatenate(documents)[:size].reshape(shape)}
        if self.masking:
            # Positions count from the last start of a document in the row, or from the start of the
            # row.
            first = np.concatenate([np.arange(len(ids)) == 0 for ids in documents])
            first = first[:size].reshape(shape)
            at = np.arange(self.length, dtype=np.int32)
            columns["position_ids"] = at - np.maximum.accumulate(np.where(first, at, 0), axis=1)
        return columns

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
    """Cuts each document into rows of ``length`` tokens and drops the remainder.

    Every row is one span of one document, and documents shorter than a row are dropped, as in
    ProLong's long data: pack.py of CodeCreator/datatools with ``min_length`` = ``pack_length``.

    Args:
        length: length of a row in tokens.
        masking: add ``position_ids``, so that these rows can be mixed with those of :class:`Pack`.
    """

    length: int
    masking: bool = False

    def __call__(self, batch: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, Any]:
        documents = [np.asarray(ids, dtype=np.int32) for ids in batch["input_ids"]]
        whole = [ids[: len(ids) // self.length * self.length] for ids in documents]
        columns = {"input_ids": np.concatenate(whole).reshape(-1, self.length)}
        if self.masking:
            positions = np.arange(self.length, dtype=np.int32)
            columns["position_ids"] = np.tile(positions, (len(columns["input_ids"]), 1))
        return columns

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
    """Concatenates documents and cuts them into rows, each with a start and an end token.

    As in YaRN's data (arXiv 2309.00071, section 4.1): "segments bookended with the BOS and EOS
    token". If a document starts exactly at the start of a row, there is only one start token.

    Args:
        length: length of a row, including both tokens.
        head: tokens at the start of a document.
        tail: tokens at the end of a document.
    """

    length: int
    head: tuple[int, ...]
    tail: tuple[int, ...]

    def __call__(self, batch: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, Any]:
        whole = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in batch["input_ids"]])
        head = np.asarray(self.head, np.int32)
        tail = np.asarray(self.tail, np.int32)
        inner = self.length - len(head) - len(tail)
        rows = []
        at = 0
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
class DocumentStart:
    """Makes one row of each document that is long enough, from its beginning.

    Args:
        length: length of a row in tokens.
        most: number of tokens to take, from which a scheme of positions picks ``length``.
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


def tokenization(tokenizer: Any, chat: bool, strict: bool = False) -> Any:
    """Create what tokenizes documents, or conversations; ``strict`` as for :func:`documents`."""
    return TokenizeChat(tokenizer, strict) if chat else Tokenize(tokenizer)


def chat_note(conversations: Dataset | IterableDataset, tokenizer: Any) -> str | None:
    """Return what to know before training on these conversations, by the first ones, or None.

    Raises:
        DataError: the chat template rejects one of these.
    """
    rows: Any = conversations.take(_ENOUGH)
    first = [row for row in rows if row["text"]]
    return note_of(tokenizer, {name: [row[name] for row in first] for name in ("text", PLACE)})


def packer(
    kind: str, tokenizer: Any, length: int, masking: bool, most: int, chat: bool = False
) -> Any:
    """Create the packer for a kind of rows.

    Args:
        kind: ``packed``, ``chunked``, ``bookended`` or ``document``.
        tokenizer: tokenizer of the model, for start and end tokens.
        length: length of a row in tokens.
        masking: add ``position_ids`` that restart in each document (packed and chunked rows).
        most: number of tokens that a row is picked from, for ``document``.
        chat: pack whole conversations.
    """
    if chat:
        # Any token fills a row: it has no loss, and all tokens with one come before it. Not the pad
        # token, for which a model may have no embedding.
        return Whole(length, tokenizer.eos_token_id or 0, masking)
    if kind == "document":
        return DocumentStart(length, most)
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
    files: Listing | None = None,
    tokenize: Any = None,
) -> tuple[Dataset | Stream, Contents]:
    """Pack documents into rows, each with its ``index``; also returns what they contain.

    Rows of a stream are shuffled and repeat forever. Rows of data on disk stay in order, and
    Trainer samples from them.

    Raises:
        DataError: no document is long enough, or the data does not fill a single row.
    """
    if isinstance(data, IterableDataset):
        stream = source(data, tokenizer, pack, minimum=minimum, seed=seed, tokenize=tokenize)
        return Stream([stream], [1.0], seed), first_contents(data, files)
    tokenize = tokenize or Tokenize(tokenizer)
    minimum = max(minimum, pack.shortest)
    longest = getattr(pack, "longest", None)
    problems = _problems(data)  # before ``map`` removes the column
    numbers = {"tokens": Value("int64"), "digest": Value("int64")}
    columns = {
        name: Value("string") if name == PROBLEM else List(Value("int32"))
        for name in tokenize.names
    }
    data = data.map(
        tokenize,
        batched=True,
        batch_size=64,
        remove_columns=data.column_names,
        # Declared, since datasets infers no type from a first batch of empty documents.
        features=Features(columns | numbers),
    )
    problems += _problems(data)  # of conversations that the chat template rejects
    most = math.inf if longest is None else longest
    kept = data.filter(lambda row: minimum <= row["tokens"] <= most)
    counts = data["tokens"][:]
    long = _long(counts, minimum, pack, which="all")
    batch = math.ceil(_ROWS * len(long) / _whole(long, pack))  # documents for _ROWS rows
    features = {name: List(Value("int32")) for name in pack.names}
    packed = kept.map(
        pack,
        batched=True,
        batch_size=batch,
        remove_columns=[*numbers, *columns],
        features=Features(features),
    )
    numbered = Features({**features, "index": Value("int64")})
    packed = packed.map(_number, with_indices=True, features=numbered)
    found = contents(
        counts,
        data["digest"][:],
        problems=problems,
        minimum=minimum,
        longest=longest,
        rows=len(packed),
    )
    return packed, found


def _problems(data: Dataset) -> list[str]:
    return [each for each in data[PROBLEM] if each] if PROBLEM in data.column_names else []


def first_contents(data: Dataset | IterableDataset, files: Listing | None = None) -> Contents:
    """Contents of data that is tokenized during training.

    Args:
        data: documents in the column ``text``.
        files: its files, if it is local.
    """
    if isinstance(data, Dataset):
        batches: Any = data.select_columns("text").iter(_HASHED)
        return texts_of([digest_of(text or "") for batch in batches for text in batch["text"]])
    first = [row["text"] for row in data.take(_ENOUGH)]
    sizes = [] if files is None else [(file.name, file.stat().st_size) for file in files.files]
    return beginning_of([*sizes, *first])


def source(
    data: Dataset | IterableDataset,
    tokenizer: Any,
    pack: Packer,
    *,
    minimum: int,
    seed: int,
    tokenize: Any = None,
) -> Source:
    """Create one source of a stream.

    Raises:
        DataError: none of the first documents is long enough, or they do not fill a row.
    """
    if not isinstance(data, IterableDataset):
        data = data.to_iterable_dataset()
    tokenize = tokenize or Tokenize(tokenizer)
    minimum = max(minimum, pack.shortest)
    counts: list[int] = []
    for batch in data.take(_LOOKED_AT).iter(_ENOUGH):
        counts += tokenize(batch)["tokens"]
        if sum(pack.rows(count) for count in counts if count >= minimum) >= 1:
            break
    else:
        long = _long(counts, minimum, pack, which="the first")
        if len(counts) < _LOOKED_AT:
            _whole(long, pack)
    longest = getattr(pack, "longest", None)
    above = 0 if longest is None else sum(count > longest for count in counts)
    if above:
        warnings.warn(
            f"{above} of the first {len(counts)} conversations have more than {longest} tokens; "
            f"such conversations are dropped; give a longer --length to keep them",
            stacklevel=2,
        )
    return Source(documents=data, tokenize=tokenize, pack=pack, minimum=minimum, seed=seed)


def _long(counts: list[int], minimum: int, pack: Packer, which: str) -> list[int]:
    long = [count for count in counts if count >= minimum]
    if not long:
        needed = "length" if minimum == pack.shortest else "minimum_document"
        raise DataError(
            f"no document is long enough: the longest of {which} {len(counts)} has "
            f"{max(counts, default=0)} tokens; lower --{needed} {minimum} or use data with longer "
            f"documents"
        )
    return long


def _whole(long: list[int], pack: Packer) -> float:
    """Number of rows from documents of these lengths."""
    count = sum(map(pack.rows, long))
    fills = getattr(pack, "longest", None) is not None
    if fills and not count:
        raise DataError(
            f"all {len(long)} conversations have more than --length {pack.length} tokens; give a "
            f"longer --length"
        )
    if count < 1 and not fills:
        raise DataError(
            f"the data has {sum(long)} tokens in {len(long)} documents, not enough for one row of "
            f"--length {pack.length}; use more data or a smaller --length"
        )
    return count


def _number(row: dict[str, Any], index: int) -> dict[str, Any]:
    return {**row, "index": index}


@dataclass
class Collator:
    """Collates rows into a batch.

    Random choices depend only on ``seed``, the epoch and the index of the row, so that a resumed
    run and any number of processes make the same choices. Rows without an index, such as
    evaluation rows, are left unchanged.

    Args:
        scheme: scheme of positions (recipes/positions.py); None for consecutive positions.
        seed: random seed.
        epoch: number of completed passes over the data.
        retrieval: adds facts to some rows (recipes/retrieval.py), or None. Batches then have the
            weights of labels, which recipes/loss.py reads.
        positioned: return positions also where they are consecutive.
    """

    scheme: Callable[[Sequence[int], random.Random], Drawn] | None = None
    seed: int = 0
    epoch: int = 0
    retrieval: Callable[[Sequence[int], random.Random], Weighted] | None = None
    positioned: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if rows[0].get("index", 0) < 0:  # Trainer is skipping to the checkpoint
            nothing = torch.full((len(rows), 1), IGNORED)
            return {"input_ids": torch.zeros_like(nothing), "labels": nothing}
        weights: torch.Tensor | None = None
        if self.retrieval is not None and "index" in rows[0]:
            pairs = [self._with_facts(row) for row in rows]
            rows = [row for row, _ in pairs]
            weights = torch.tensor([each for _, each in pairs])
        batch = self._batch(rows)
        for number, row in enumerate(rows):
            if "scored" in row:
                unscored = ~torch.as_tensor(np.asarray(row["scored"], dtype=bool))
                batch["labels"][number][unscored] = IGNORED
        if weights is None:
            return batch
        batch["labels"][weights == 0] = IGNORED
        return {**batch, "loss_weights": weights}

    def _with_facts(self, row: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[float]]:
        """A row of text with facts, and the weights of its tokens; conversations stay."""
        if "scored" in row:
            return row, [1.0] * len(row["input_ids"])
        # A separate generator, so that positions are the same as without such rows.
        ids, weights = not_none(self.retrieval)(row["input_ids"], self._rng(row, "retrieval:"))
        return {**row, "input_ids": ids}, weights

    def _batch(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if self.scheme is not None and "index" in rows[0]:
            drawn = [self._drawn(row) for row in rows]
            ids = _stacked([taken for taken, _ in drawn])
            positions = torch.stack([positions for _, positions in drawn])
            if isinstance(self.scheme, MixedWindows):
                return _separated(ids, positions)
            # Without a mask, transformers treats every gap in the positions as a new document.
            return {
                "input_ids": ids,
                "labels": ids.clone(),
                "position_ids": positions,
                "attention_mask": torch.ones_like(ids),
            }
        ids = _stacked([row["input_ids"] for row in rows])
        if "position_ids" in rows[0]:
            return _separated(ids, _stacked([row["position_ids"] for row in rows]))
        batch = {"input_ids": ids, "labels": ids.clone()}
        if self.positioned:
            batch["position_ids"] = torch.arange(ids.shape[1]).expand_as(ids).clone()
        return batch

    def _drawn(self, row: Mapping[str, Any]) -> Drawn:
        return not_none(self.scheme)(row["input_ids"], self._rng(row))

    def _rng(self, row: Mapping[str, Any], use: str = "") -> random.Random:
        # Of a text, which random hashes the same way in every process.
        return random.Random(f"{use}{self.seed}:{self.epoch}:{row['index']}")


def _separated(ids: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch in which position 0 starts a document that does not attend to any other."""
    labels = ids.masked_fill(positions == 0, IGNORED)
    # Without a mask, transformers separates documents by their positions.
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _stacked(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.int64))
