"""Writes a patch into llama.cpp's GGUF files; needs the ``gguf`` library."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import nn

from rope_ext.apply.gguf_source import TABLE
from rope_ext.engines.base import Refusal, Scaling, refuse_adapting, refuse_tempered
from rope_ext.engines.families import LLAMA_CPP
from rope_ext.engines.gguf_model import require_gguf
from rope_ext.engines.llama_cpp import Plan, plan, planned
from rope_ext.errors import ExportError, first_line
from rope_ext.methods import FrequencyMethod, Method, Rope
from rope_ext.patching import current_patch
from rope_ext.rotary.sites import text_config, text_decoder
from rope_ext.saving.drafts import draft_of

_CHUNK = 1 << 24  # bytes copied at a time
_MAGIC, _VERSION = b"GGUF", 3
_FLOAT32, _UINT32, _STRING = 6, 4, 8


@dataclass(frozen=True)
class GGUFFile:
    """The rotary embedding of a GGUF file.

    Args:
        path: path of the file.
        architecture: name of the architecture in llama.cpp.
        rope: the unscaled embedding.
        scaled: whether the file already scales it.
        reader: reader of the ``gguf`` library.
    """

    path: Path
    architecture: str
    rope: Rope
    scaled: bool
    reader: Any

    @classmethod
    def read(cls, path: str | Path) -> GGUFFile:
        """Read the header of a file, without the weights.

        Raises:
            ExportError: not a GGUF file of a model with a rotary embedding, or only a part of one.
        """
        path, gguf = Path(path), require_gguf()
        try:
            reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise ExportError(
                f"cannot read {path} ({first_line(error)}); give a GGUF file as written by "
                f"convert_hf_to_gguf.py"
            ) from error

        def value(key: str, default: Any = None) -> Any:
            there = reader.get_field(key)
            return default if there is None else there.contents()

        if reader.byte_order != "I" or value("split.count", 1) > 1:
            raise ExportError(
                f"{path} is big-endian or one of several parts; convert it to a single "
                f"little-endian file first (llama-gguf-split --merge)"
            )
        architecture = value("general.architecture", "")
        length = value(f"{architecture}.context_length")
        heads = value(f"{architecture}.attention.head_count")
        width = value(f"{architecture}.embedding_length")
        dim = value(f"{architecture}.rope.dimension_count")
        dim = dim or value(f"{architecture}.attention.key_length")
        if dim is None and width and isinstance(heads, int):
            dim = width // heads
        if not (length and dim):
            raise ExportError(f"{path} is not a language model: head or context keys are missing")
        base = value(f"{architecture}.rope.freq_base", 10000.0)
        kind = value(f"{architecture}.rope.scaling.type", "none")
        table = any(tensor.name == TABLE for tensor in reader.tensors)
        rope = Rope.geometric(base, dim, length)
        return cls(path, architecture, rope, table or kind != "none", reader)

    def write(self, output: str | Path, keys: Mapping[str, Any], table: list[float] | None) -> None:
        """Write a copy with new keys for the rotary embedding, and optionally a frequency table.

        All other keys and tensors are copied byte for byte.

        Args:
            output: path of the new file.
            keys: full names and values of the new keys.
            table: divisors of the frequencies.

        Raises:
            ExportError: ``output`` is this file, a directory, a pipe or device, or cannot be
                written, or this file was truncated since it was read.
        """
        output = Path(output)
        if output.is_dir():
            raise ExportError(f"{output} is a directory; give --output the name of a file")
        if output.exists() and output.samefile(self.path):
            raise ExportError(f"{output} is the input file; give --output another name")
        if output.exists() and not output.is_file():
            raise ExportError(f"{output} is a pipe or device; give --output the name of a file")
        try:
            with (
                open(self.path, "rb") as source,
                draft_of(output) as draft,
                open(draft, "xb") as target,
            ):
                self._write(source, target, keys, table)
        except OSError as error:
            raise ExportError(f"cannot write {output} ({error.strerror})") from error

    def _write(
        self, source: BinaryIO, target: BinaryIO, keys: Mapping[str, Any], table: list[float] | None
    ) -> None:
        reader, prefix = self.reader, f"{self.architecture}.rope.scaling."
        drop = {name for name in reader.fields if name.startswith(prefix)} | set(keys)
        fields = [
            field
            for name, field in reader.fields.items()
            if name not in drop and not name.startswith("GGUF.")
        ]
        kept = [tensor for tensor in reader.tensors if tensor.name != TABLE]
        count = len(kept) + (table is not None)
        target.write(_MAGIC + struct.pack("<IQQ", _VERSION, count, len(fields) + len(keys)))
        for field in fields:
            _copy(source, target, field.offset, sum(part.nbytes for part in field.parts))
        for name, value in keys.items():
            target.write(_text(name) + _value(value))
        alignment = int(reader.alignment)
        offset = 0
        for tensor in kept:
            target.write(_info(tensor.name, tensor.shape.tolist(), int(tensor.tensor_type), offset))
            offset += _padded(int(tensor.n_bytes), alignment)
        if table is not None:
            target.write(_info(TABLE, [len(table)], 0, offset))
        for tensor in kept:
            _pad(target, alignment)
            _copy(source, target, int(tensor.data_offset), int(tensor.n_bytes))
        _pad(target, alignment)
        if table is not None:
            target.write(struct.pack(f"<{len(table)}f", *table))
            _pad(target, alignment)


def extended(
    path: str | Path,
    output: str | Path,
    method: Method,
    trained_length: int | None = None,
) -> Plan:
    """Extend the GGUF file of an unscaled model with a method.

    Args:
        path: the input file.
        output: the output file.
        method: with its options.
        trained_length: overrides the trained length in the file, tokens.

    Raises:
        ExportError: the file cannot be read or is already scaled, or llama.cpp cannot run the
            method.
    """
    file = GGUFFile.read(path)
    if file.scaled:
        raise ExportError(
            f"{path} already scales its rotary embedding; convert the unscaled model, or give the "
            f"folder of a model that was patched with compose=True before the file"
        )
    known = list(dict.fromkeys(family.name for family in LLAMA_CPP.values() if family.kinds))
    if file.architecture not in known:
        raise ExportError(
            f"the architecture {file.architecture!r} has not been tested in llama.cpp; tested "
            f"architectures: {', '.join(known)}"
        )
    rope = dataclasses.replace(file.rope, length=trained_length or file.rope.length)
    try:
        made = plan(_scaling(method, rope), file.architecture, in_file=True)
    except Refusal as refusal:
        raise ExportError(f"llama.cpp cannot run {method.name}: {refusal}") from None
    file.write(output, made.keys, made.table)
    return made


def _scaling(method: Method, rope: Rope) -> Scaling:
    if not isinstance(method, FrequencyMethod):
        raise Refusal("it has no setting that changes the positions of queries and keys")
    refuse_adapting(method)
    if method.start_tokens:
        raise Refusal("it rotates all tokens with the same frequencies; leave start_tokens out")
    refuse_tempered(method, rope)
    return Scaling(
        rope,
        method.inv_freq(rope),
        method.attention_scaling(rope),
        method.target_length(rope),
        method.rope_parameters(rope),
    )


def following(model: nn.Module, path: str | Path, output: str | Path) -> Plan:
    """Write a model's patch into its GGUF file.

    Args:
        model: a model that is patched, or scaled by its configuration.
        path: GGUF file of the same model, scaled or not.
        output: the output file.

    Raises:
        RopeExtError: the file cannot be read or belongs to another model, or llama.cpp cannot run
            the patch.
    """
    file, state = GGUFFile.read(path), current_patch(model)
    try:
        if state is None:
            scaling = Scaling.configured(model)
            made = plan(scaling, file.architecture, in_file=True)
        else:
            scaling, made = Scaling.from_patch(state), planned(state, in_file=True)
    except Refusal as refusal:
        raise ExportError(f"llama.cpp cannot run the patch of this model: {refusal}") from None
    family = LLAMA_CPP.get(text_config(text_decoder(model)).model_type)
    architecture = None if family is None else family.name
    if (file.rope.dim, file.architecture) != (scaling.rope.dim, architecture):
        raise ExportError(
            f"{path} holds a {file.architecture!r} with {file.rope.dim // 2} rotary pairs, but the "
            f"model is a {architecture!r} with {scaling.rope.dim // 2}; give the file of the same "
            f"model"
        )
    file.write(output, made.keys, made.table)
    return made


def _copy(source: BinaryIO, target: BinaryIO, offset: int, size: int) -> None:
    source.seek(offset)
    while size:
        data = source.read(min(size, _CHUNK))
        if not data:
            raise ExportError(
                f"{source.name} is truncated: {size} bytes are missing at byte {source.tell()}; is "
                f"another program writing it? Convert or download it again"
            )
        target.write(data)
        size -= len(data)


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _pad(target: BinaryIO, alignment: int) -> None:
    here = target.tell()
    target.write(bytes(_padded(here, alignment) - here))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    return struct.pack("<If", _FLOAT32, value)


def _info(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    shape_data = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _text(name) + shape_data + struct.pack("<IQ", kind, offset)
