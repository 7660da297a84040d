"""Writes patches into GGUF files for llama.cpp; needs the ``gguf`` library."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from torch import nn
from transformers import LlamaConfig
from typing_extensions import Self

from rope_ext.apply import gguf_source
from rope_ext.apply.gguf_source import TABLE
from rope_ext.engines.base import Refusal, config_of
from rope_ext.engines.families import LLAMA_CPP
from rope_ext.engines.gguf_model import require_gguf, write_out
from rope_ext.engines.llama_cpp import Plan, planned
from rope_ext.errors import ExportError, LoadError
from rope_ext.methods import Method
from rope_ext.patching import Patch, current_patch
from rope_ext.rotary.sites import text_config
from rope_ext.saving.drafts import draft_of, may_replace
from rope_ext.saving.folder import built_on_meta, patch_without_weights, read_saved

_MARK = "rope_ext.gguf"
"""Key that marks files written by this module, which may be overwritten."""


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file and its unscaled rotary embedding."""

    path: Path
    architecture: str  # architecture name in llama.cpp
    base: float
    dim: int  # rotary columns of a head
    length: int  # trained length, tokens
    scaled: bool  # whether the file already scales it
    reader: Any  # a reader of the `gguf` library

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file's header, without the weights."""
        path, gguf = Path(path), require_gguf()
        try:
            keys, tables = gguf_source.read(path)
            reader = gguf.GGUFReader(path)
        except (LoadError, OSError, ValueError, IndexError) as error:
            said = error if isinstance(error, LoadError) else f"cannot read {path} ({error})"
            raise ExportError(
                f"{said}; give a GGUF file as written by convert_hf_to_gguf.py"
            ) from error
        architecture = keys.get("general.architecture", "")
        own = {k.removeprefix(f"{architecture}."): value for k, value in keys.items()}
        length, heads = own.get("context_length"), own.get("attention.head_count")
        dim = own.get("rope.dimension_count") or own.get("attention.key_length")
        if dim is None and isinstance(heads, int):
            dim = own.get("embedding_length", 0) // heads
        if not (length and dim):
            raise ExportError(f"{path} is not a language model: head or context keys are missing")
        base = own.get("rope.freq_base", 10000.0)
        scaled = TABLE in tables or own.get("rope.scaling.type", "none") != "none"
        return cls(path, architecture, base, dim, length, scaled, reader)

    def write(self, output: str | Path, made: Plan) -> Plan:
        """Write a copy with new keys for the rotary embedding, and optionally a frequency table."""
        output, gguf = Path(output), require_gguf()
        if output.exists() and output.samefile(self.path):
            raise ExportError(f"{output} is the input file; give --output another name")
        if not may_replace(output, _MARK):
            raise ExportError(
                f"{output} exists and would be lost, since rope-ext gguf did not write it; give "
                f"--output another name"
            )
        prefix = f"{self.architecture}.rope.scaling."
        own = ("general.architecture", _MARK, *made.keys)  # set by the writer
        try:
            with draft_of(output) as draft:
                writer = gguf.GGUFWriter(draft, self.architecture)
                writer.data_alignment = int(self.reader.alignment)
                writer.add_bool(_MARK, True)
                for name, field in self.reader.fields.items():
                    if not (name in own or name.startswith(("GGUF.", prefix))):
                        part = field.types[-1] if len(field.types) > 1 else None
                        writer.add_key_value(name, field.contents(), field.types[0], part)
                for name, value in made.keys.items():
                    kind = gguf.GGUFValueType.get_type(value)
                    whole = gguf.GGUFValueType.UINT32 if isinstance(value, int) else kind
                    writer.add_key_value(name, value, whole)
                for tensor in self.reader.tensors:
                    if tensor.name != TABLE:
                        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
                if made.table is not None:
                    writer.add_tensor(TABLE, numpy.array(made.table, dtype=numpy.float32))
                write_out(writer)
        except OSError as error:
            raise ExportError(f"cannot write {output} ({error.strerror})") from error
        return made


def extended(
    path: str | Path, output: str | Path, method: Method, trained_length: int | None = None
) -> Plan:
    """Extend the GGUF file of an unscaled model with a method, and write it to ``output``."""
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
    config = LlamaConfig(  # a stand-in with this rotary embedding
        hidden_size=file.dim,
        head_dim=file.dim,
        num_attention_heads=1,
        num_hidden_layers=1,
        max_position_embeddings=file.length if trained_length is None else trained_length,
        rope_parameters={"rope_type": "default", "rope_theta": file.base},
    )
    state = current_patch(patch_without_weights(built_on_meta(config), method))
    assert state is not None
    return file.write(output, plan(state, architecture=file.architecture))


def following(model: nn.Module, path: str | Path, output: str | Path) -> Plan:
    """Write a model's patch, or the scaling in its configuration, into its GGUF file."""
    file, state = GGUFFile.read(path), current_patch(model)
    state = state or current_patch(read_saved(config_of(model)).model)
    if state is None:
        raise ExportError(
            "llama.cpp cannot run the patch of this model: there is none; patch it, or give a "
            "folder that save_pretrained of a patched model wrote"
        )
    family = LLAMA_CPP.get(text_config(state.decoder).model_type)
    architecture, dim = family.name if family else None, state.scaled[0].rope.dim
    if (file.dim, file.architecture) != (dim, architecture):
        raise ExportError(
            f"{path} holds a {file.architecture!r} with {file.dim // 2} rotary pairs, but the "
            f"model is a {architecture!r} with {dim // 2}; give the file of the same model"
        )
    return file.write(output, plan(state))


def plan(state: Patch, in_file: bool = True, architecture: str | None = None) -> Plan:
    try:
        return planned(state, in_file, architecture)
    except Refusal as refusal:
        raise ExportError(f"llama.cpp cannot run {state.method.name}: {refusal}") from None
