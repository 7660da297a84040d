"""Writes GGUF files for llama.cpp: patches into files, and small models; needs ``gguf``.

Details of each family follow llama.cpp's ``conversion/*.py`` and ``src/models/*.cpp``. Names of
fields and tensors are in ``gguf.json``.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from transformers import LlamaConfig
from typing_extensions import Self

from rope_ext.apply import gguf_source
from rope_ext.apply.gguf_source import TABLE
from rope_ext.engines.base import ENGINES, Family, Refusal
from rope_ext.engines.llama_cpp import Plan, planned
from rope_ext.errors import ExportError, LoadError, optional
from rope_ext.methods import Method
from rope_ext.patching import current_patch
from rope_ext.rotary.sites import text_config, unwrap
from rope_ext.saving.drafts import draft_of, may_replace
from rope_ext.saving.folder import built_on_meta, patch_without_weights, read_saved

_MARK = "rope_ext.gguf"
"""Key that marks files written by this module, which may be overwritten."""
_TABLES = json.loads(Path(__file__).with_name("gguf.json").read_text(encoding="utf-8"))
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _gguf() -> Any:
    return optional("gguf", "GGUF files need", "rope-ext[engines]", ExportError)


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
        path, gguf = Path(path), _gguf()
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

    def write(self, output: str | Path, made: Plan) -> None:
        """Write a copy with new keys for the rotary embedding, and optionally a frequency table."""
        output, gguf = Path(output), _gguf()
        if output.exists() and output.samefile(self.path):
            raise ExportError(f"{output} is the input file; give --output another name")
        if not may_replace(output, _MARK):
            raise ExportError(f"{output} exists and would be lost; give --output another name")
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
                _write_out(writer)
        except OSError as error:
            raise ExportError(f"cannot write {output} ({error.strerror})") from error


def extended(
    path: str | Path, output: str | Path, method: Method, trained_length: int | None = None
) -> Plan:
    """Extend the GGUF file of an unscaled model with a method, and write it to ``output``."""
    file = GGUFFile.read(path)
    if file.scaled:
        raise ExportError(
            f"{path} already scales its rotary embedding; convert the unscaled model, or give a "
            f"model's folder, patched with compose=True, before the file"
        )
    families = reversed(ENGINES["llama.cpp"].items())
    known = {family.name: kind for kind, family in families if family.kinds}  # the first of each
    if file.architecture not in known:
        raise ExportError(
            f"the architecture {file.architecture!r} has not been tested in llama.cpp; tested: "
            f"{', '.join(reversed(known))}"
        )
    config = LlamaConfig(  # a stand-in with this rotary embedding
        hidden_size=file.dim,
        head_dim=file.dim,
        num_attention_heads=1,
        num_hidden_layers=1,
        max_position_embeddings=file.length if trained_length is None else trained_length,
        rope_parameters={"rope_type": "default", "rope_theta": file.base},
    )
    model = patch_without_weights(built_on_meta(config), method)
    text_config(model).model_type = known[file.architecture]
    return following(model, file, output)


def following(model: nn.Module, path: str | Path | GGUFFile, output: str | Path) -> Plan:
    """Write a model's patch, or the scaling in its configuration, into its GGUF file."""
    file = path if isinstance(path, GGUFFile) else GGUFFile.read(path)
    state = current_patch(model) or current_patch(read_saved(unwrap(model).config).model)
    if state is None:
        raise ExportError(
            "llama.cpp cannot run the patch of this model: there is none; patch it, or give the "
            "folder that a patched model saved"
        )
    family = ENGINES["llama.cpp"].get(text_config(state.decoder).model_type)
    architecture, dim = family.name if family else None, state.scaled[0].rope.dim
    if (file.dim, file.architecture) != (dim, architecture):
        raise ExportError(
            f"{file.path} holds a {file.architecture!r} with {file.dim // 2} rotary pairs, but the "
            f"model is a {architecture!r} with {dim // 2}; give the file of the same model"
        )
    try:
        made = planned(state, in_file=True)
    except Refusal as refusal:
        raise ExportError(f"llama.cpp cannot run {state.method.name}: {refusal}") from None
    file.write(output, made)
    return made


def _write_out(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(model: nn.Module, path: str | Path) -> None:
    """Write a small model as a GGUF file in float32, with an unscaled rotary embedding.

    The vocabulary is synthetic (``t3``, ``t4``, ...); prompts are lists of token IDs.

    Args:
        model: a model whose family in ``ENGINES`` has an architecture.
        path: the output file.
    """
    gguf, model = _gguf(), unwrap(model)
    config = text_config(model)
    family = ENGINES["llama.cpp"][config.model_type]
    writer = gguf.GGUFWriter(path, family.name)
    _write_values(writer, config)
    for key, value in family.keys.items():
        value = getattr(config, value) if isinstance(value, str) else value
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"{family.name}.{key}", value)
    _write_vocabulary(gguf, writer, config.vocab_size)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.detach().float().cpu()
        for part, piece in _parts(name, values, config, family):
            if part == "lm_head.weight" and config.tie_word_embeddings:
                continue
            written = names.get_name(part, (".weight", ".bias"))
            if written is None:
                raise ExportError(f"the gguf library has no name for {part} of {family.name}")
            writer.add_tensor(written, piece.contiguous().numpy())
    _write_out(writer)


def _write_values(writer: Any, config: Any) -> None:
    for name, method in _TABLES["values"].items():
        if getattr(config, name, None) is not None:
            getattr(writer, method)(getattr(config, name))
    width = getattr(config, "intermediate_size", 0)
    writer.add_feed_forward_length(width)
    experts = next((getattr(config, n) for n in _EXPERTS if getattr(config, n, None)), None)
    if experts is not None:
        writer.add_expert_count(experts)
        if getattr(config, "moe_intermediate_size", None) is None:
            writer.add_expert_feed_forward_length(width)
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    parameters, kinds = config.rope_parameters, getattr(config, "layer_types", None) or ()
    rotary = int(dim * parameters.get("partial_rotary_factor", 1.0))
    keys, values = dim, dim
    if getattr(config, "kv_lora_rank", None):  # all heads share one cached key
        keys, values, shared = config.kv_lora_rank + dim, config.kv_lora_rank, 1
    if "conv" in kinds:
        shared = [0 if kind == "conv" else shared for kind in kinds]
    if "linear_attention" in kinds:
        linear = [kind == "linear_attention" for kind in kinds]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", linear)
        width = config.linear_num_value_heads * config.linear_value_head_dim
        writer.add_ssm_inner_size(width)
        # Sections of the three position axes; text has the same position on each.
        axes = [(rotary // 2 + more) // 3 for more in (2, 1, 0)]
        writer.add_rope_dimension_sections([*parameters.get("mrope_section", axes), 0])
    if "llama_4_scaling_beta" in parameters:
        writer.add_attn_temperature_scale(parameters["llama_4_scaling_beta"])
    writer.add_head_count_kv(shared)
    writer.add_key_length(keys)
    writer.add_value_length(values)
    writer.add_rope_dimension_count(rotary)
    writer.add_rope_freq_base(parameters["rope_theta"])


def _write_vocabulary(gguf: Any, writer: Any, size: int) -> None:
    kinds = gguf.TokenType
    special = {"<unk>": kinds.UNKNOWN, "<s>": kinds.CONTROL, "</s>": kinds.CONTROL}
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, "<0x0A>", *(f"t{i}" for i in range(4, size))])
    writer.add_token_types([*special.values(), kinds.BYTE] + [kinds.NORMAL] * (size - 4))
    writer.add_token_scores([0.0] * size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _parts(
    name: str, values: torch.Tensor, config: Any, family: Family
) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert a transformers tensor to GGUF tensors, with names that the gguf library knows."""
    for part, known in _TABLES["names"].items():
        name = name.replace(part, known)
    if config.model_type == "gpt_oss" and ".experts." in name:  # split interleaved gates
        values = values.transpose(-1, -2) if values.ndim == 3 else values
        if ".gate_up_proj" in name:
            values = torch.cat((values[:, ::2], values[:, 1::2]), 1)
    if ".experts." in name and not name.endswith(".bias"):
        name += ".weight"
    if ".experts.gate_up_proj" in name:
        gate, up = values.chunk(2, 1)
        yield name.replace("gate_up_proj", "gate_proj"), gate
        yield name.replace("gate_up_proj", "up_proj"), up
    elif "kv_b_proj" in name:
        heads = values.unflatten(0, (config.num_attention_heads, -1))
        nope, value = heads.split((config.qk_nope_head_dim, config.v_head_dim), 1)
        yield name.replace("kv_b_proj", "k_b_proj"), nope.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), value
    elif "in_proj_qkvz" in name:
        heads = values.unflatten(0, (config.linear_num_key_heads, -1))
        key = config.linear_key_head_dim
        *rest, gate = heads.split((key, key, *[(heads.shape[1] - 2 * key) // 2] * 2), 1)
        yield name.replace("qkvz", "qkv"), torch.cat([part.flatten(0, 1) for part in rest])
        yield name.replace("qkvz", "z"), gate.flatten(0, 1)
    elif name.endswith(".A_log"):
        yield name, -values.exp()
    elif ".conv" in name and values.ndim == 3:
        yield name, values.squeeze(1)
    elif family.centered and name.endswith("norm.weight") and "linear_attn" not in name:
        yield name, values + 1
    else:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        rows = next((n for part, n in heads.items() if f".{part}." in name), None)
        if family.interleaved and rows:
            values = values.unflatten(0, (rows, 2, -1)).transpose(1, 2).flatten(0, 2)
        yield name, values
