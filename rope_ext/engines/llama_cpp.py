"""Exports patches to llama.cpp and Ollama: flags, and GGUF metadata with a frequency tensor.

Follows the source at commit 0c1e57098, tested with llama.cpp in xllamacpp 2026.10.11549; details of
each family follow its ``conversion/*.py`` and ``src/models/*.cpp``. Writing files needs ``gguf``.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch import nn
from transformers import LlamaConfig
from typing_extensions import Self

from rope_ext.command.arguments import command_words
from rope_ext.config.record import record_within
from rope_ext.engines import base
from rope_ext.engines.base import ENGINES, Export, Refusal
from rope_ext.errors import ExportError, LoadError, RopeExtError, optional
from rope_ext.methods import Method, YaRN, build_method
from rope_ext.methods.checked import not_none
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import Patch, current_patch
from rope_ext.quoting import shell_join
from rope_ext.rotary.sites import softmax_scales, text_config, unwrap
from rope_ext.saving import gguf_source
from rope_ext.saving.checkpoints import load_config
from rope_ext.saving.drafts import draft_of, may_replace
from rope_ext.saving.folder import Saved, built_on_meta, patch_without_weights, read_saved
from rope_ext.saving.gguf_source import LONG, SHORT, TABLE

_MARK = "rope_ext.gguf"
"""Key that marks files written by this module, which may be overwritten."""
_TABLED = (family.name for family in ENGINES["llama.cpp"].values() if "longrope" in family.kinds)
READS_TABLE = tuple(dict.fromkeys(_TABLED))
"""Architectures that read this tensor."""


@dataclass(frozen=True)
class Plan:
    """Settings with which llama.cpp computes a patch."""

    keys: Mapping[str, Any]  # GGUF metadata, by full name
    flags: Mapping[str, Any]
    """Equivalent flags for the unpatched file; a list repeats the flag. With a ``table``, they need
    the file that contains it."""
    table: list[float] | None = None  # values of `TABLE`
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The flags as command-line arguments."""
        values = {f: v if isinstance(v, list) else [v] for f, v in self.flags.items()}
        return [word for flag, each in values.items() for one in each for word in (flag, str(one))]

    @property
    def in_file(self) -> list[str]:
        """Those that are needed in addition to the keys in the file."""
        kept = {f: v for f, v in self.flags.items() if f == "--ctx-size" or "-beta-" in f}
        return Plan({}, kept).words

    @property
    def settings(self) -> dict[str, Any]:
        tensors = {} if self.table is None else {"tensors": {TABLE: self.table}}
        return {"flags": dict(self.flags), "gguf": dict(self.keys), **tensors}


@dataclass
class _Draft:
    """A plan that is being made."""

    family: base.Family
    keys: dict[str, Any]
    flags: dict[str, Any]
    multiplier: float  # of cosine and sine, as far as llama.cpp does not apply it itself
    overrides: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    table: list[float] | None = None

    def put(self, key: str, value: Any, flag: str | None = None, given: Any = None) -> None:
        """Add a key to the file, and its flag; without a flag, override the key."""
        name = f"{self.family.name}.{key}"
        self.keys[name] = value
        if flag is not None and not self.family.by_file:
            self.flags[flag] = value if given is None else given
        else:
            self.overrides.append(f"{name}={type(value).__name__}:{value}")

    def plan(self) -> Plan:
        if self.table is None and self.overrides:
            self.flags["--override-kv"] = self.overrides
        return Plan(keys=self.keys, flags=self.flags, table=self.table, notes=self.notes)


def planned(state: Patch, in_file: bool) -> Plan:
    """Return keys and flags with which llama.cpp computes a patch, and a table if needed.

    ``in_file``: store as much as possible in the file.
    """
    family = _family(state)
    scaling = base.Scaling.from_patch(state)
    length = scaling.rope.length
    kind, parameters = _rope_type(state, scaling)
    keys: dict[str, Any] = {  # No flag, since the unpatched file has it; other files may not.
        f"{family.name}.rope.freq_base": float(scaling.rope.base),
        # llama.cpp reads it only for YaRN, gguf_source for all types.
        f"{family.name}.rope.scaling.original_context_length": length,
    }
    flags: dict[str, Any] = {"--ctx-size": scaling.target}
    draft = _Draft(family=family, keys=keys, flags=flags, multiplier=scaling.scaling)
    yarn = kind == "yarn" and parameters.get("truncate", True)
    betas = _unusual_betas(parameters) if yarn else {}
    reads = family.name in READS_TABLE
    if kind == "default":
        draft.put("rope.freq_base", float(parameters["rope_theta"]), "--rope-freq-base")
    elif kind == "linear":
        draft.put("rope.scaling.type", "linear", "--rope-scaling")
        draft.put("rope.scaling.factor", float(parameters["factor"]), "--rope-scale")
    elif yarn and not (in_file and betas and reads):
        _put_yarn(draft, factor=float(parameters["factor"]), length=length, betas=betas)
    elif reads:
        draft.table = scaling.divisors
    else:
        raise Refusal(
            f"it reads tables of frequencies for the architectures "
            f"{', '.join(map(repr, READS_TABLE))} only, and this is {family.name!r}"
        )
    _put_latent_scale(draft, state=state, scaling=scaling, yarn=yarn)
    if family.name == "mistral3" and "--yarn-orig-ctx" not in flags:  # it scales queries
        draft.put("rope.scaling.original_context_length", length)
    if "--yarn-orig-ctx" in flags:
        keys[f"{family.name}.context_length"] = scaling.target
    else:  # the server refuses prompts beyond the trained length, which only YaRN raises
        draft.put("context_length", scaling.target)
    if not math.isclose(draft.multiplier, 1.0, rel_tol=1e-12):
        # --yarn-attn-factor has no effect; only the key does.
        draft.put("rope.scaling.attn_factor", draft.multiplier)
    return draft.plan()


def _family(state: Patch) -> base.Family:
    """Return the row of a model's family; raises Refusal if llama.cpp cannot run the patch."""
    if state.method.name == "self_extend":
        raise Refusal(
            "its --grp-attn-n groups tokens permanently once there are --grp-attn-w of them, and "
            "neighbors lose their exact distances, which Self-Extend keeps for each query"
        )
    family = base.family_of(state, "llama.cpp")
    if not family.kinds:
        raise Refusal(family.reason)
    base.refuse_unproven(state, family.sliding_base)
    return family


def _rope_type(state: Patch, scaling: base.Scaling) -> tuple[str, Mapping[str, Any]]:
    """Return the ``rope_type`` of a patch and its parameters; ``"longrope"`` stands for a table."""
    site = state.scaled[0]
    # Not those of the configuration: transformers may build the same from a table only.
    parameters = not_none(state.frequencies).rope_parameters(site.rope)
    if site.scaled:
        return "longrope", parameters
    divisors = scaling.divisors
    even = max(divisors) <= min(divisors) * (1 + 1e-6)
    if parameters["rope_type"] == "longrope" and even:  # few architectures read tables
        return "linear", {"factor": divisors[0]}
    return parameters["rope_type"], parameters


def _unusual_betas(parameters: Mapping[str, Any]) -> dict[str, float]:
    """Return the ends of YaRN's ramp that are not the defaults."""
    betas = {name: parameters[name] for name in ("beta_fast", "beta_slow")}
    return {name: beta for name, beta in betas.items() if beta != getattr(YaRN, name)}


def _put_yarn(draft: _Draft, factor: float, length: int, betas: Mapping[str, float]) -> None:
    draft.put("rope.scaling.type", "yarn", "--rope-scaling")
    draft.put("rope.scaling.factor", factor, "--rope-scale", given=_reaching(factor, length))
    draft.put("rope.scaling.original_context_length", length, "--yarn-orig-ctx")
    draft.flags |= {f"--yarn-{name.replace('_', '-')}": beta for name, beta in betas.items()}
    draft.multiplier /= yarn_factor(factor)
    draft.notes = ("llama.cpp applies the temperature 1 + 0.1 ln(s) itself",)
    if betas:
        draft.notes += (
            f"{' and '.join(betas)} are flags only: llama.cpp reads their keys for two other "
            f"architectures only",
        )


def _put_latent_scale(draft: _Draft, state: Patch, scaling: base.Scaling, yarn: bool) -> None:
    """Add the key of DeepSeek's second temperature, in the softmax scale of latent attention."""
    family = draft.family
    grown = yarn_factor(draft.keys.get(f"{family.name}.rope.scaling.factor", 1.0))
    there = scaling.scaling * (1.0 if yarn else grown)
    softmax = _softmax_factor(state)
    differs = family.mla and not math.isclose(there, softmax)
    if grown <= 1 or not (differs or _has_multiplier(state)):
        return
    # deepseek2.cpp multiplies logits by the square of `there` times 1 + L (grown - 1), where L
    # is 10 times the key. Other architectures read only whether it is zero. With another L,
    # the factor of cosine and sine is the key attn_factor itself.
    share = 0.0
    if differs:
        share = (softmax / there - 1) / (grown - 1)
        draft.multiplier = scaling.scaling
    draft.put("rope.scaling.yarn_log_multiplier", 0.1 * share)


def _has_multiplier(state: Patch) -> bool:
    """Whether llama.cpp's converter writes yarn_log_multiplier for the model's configuration."""
    return any(site.settings.parameters.get("mscale_all_dim") for site in state.scaled)


def _softmax_factor(state: Patch) -> float:
    """Return the number whose square multiplies the softmax scale in latent attention layers."""
    if not _has_multiplier(state):
        return 1.0
    plain = softmax_scales(state.decoder, mscale_all_dim=0) or {}
    found = (cast("float", module.scaling) / scale for module, scale in plain.items())
    return math.sqrt(next(found, 1.0))


def _reaching(factor: float, length: int) -> float:
    """Return the factor, or the next larger one whose float32 inverse does not lose the last token.

    llama.cpp computes the context as the length divided by the float32 of 1 / factor, rounded
    down: 447 tokens for 64 with factor 7.
    """
    given = tried = torch.tensor(factor, dtype=torch.float32)
    while int(length / (1 / tried)) < math.floor(round(length * factor, 6)):
        tried = torch.nextafter(tried, torch.tensor(math.inf))
    return factor if tried == given else float(f"{float(tried):.9g}")


def llama_cpp(state: Patch, saved: Saved | None) -> Export:
    """Return flags of ``llama-server``, or the command that writes a file for it."""
    plan = planned(state, in_file=saved is not None)
    source, output, before, named = _writing(state, saved)
    notes = ["as llama.cpp computes it at commit 0c1e57098", *base.precise_note(state), *plan.notes]
    if text_config(state.decoder).model_type in base.DRAFTS:
        notes.append("the MTP head of --spec-type draft-mtp is given the same settings")
    notes += named
    command = f"{before} && {shell_join(['llama-server', '--model', output, *plan.in_file])}"
    if saved is None and plan.table is None:
        command = shell_join(["llama-server", "--model", source, *plan.words])
        notes.append("to write the settings into the file instead, use rope-ext gguf")
    elif saved is None:
        notes.append(
            f"there is no flag for a table, so the first command writes {output} with the tensor "
            f"{TABLE}"
        )
        if " FOLDER " in before:
            notes.append("FOLDER: written by model.save_pretrained")
    return Export("llama.cpp", plan.settings, command, notes=tuple(notes))


def ollama(state: Patch, saved: Saved | None) -> Export:
    """Return a Modelfile, and the command that writes its GGUF file."""
    plan = planned(state, in_file=True)
    if any("-beta-" in flag for flag in plan.flags):
        raise Refusal(
            "beta_fast and beta_slow are flags of llama.cpp without keys in the file, and it "
            "accepts no flags"
        )
    _, output, before, named = _writing(state, saved, absolute=True)  # it runs elsewhere
    file = f"FROM ./{output}\nPARAMETER num_ctx {state.target_length}\n"
    note = "tested with the llama.cpp that Ollama runs, not with Ollama itself"
    notes = (*named, "run it where the Modelfile is", note, *base.precise_note(state))
    command = f"{before} && ollama create NAME --file Modelfile"
    return Export(
        engine="ollama",
        settings=plan.settings,
        command=command,
        files={"Modelfile": file},
        notes=notes,
    )


def _is_saved_patch(folder: str) -> bool:
    """Whether a folder was written by a patched model."""
    with suppress(RopeExtError):
        return (
            Path(folder, "config.json").is_file() and record_within(load_config(folder)) is not None
        )
    return False


def already_scaled(config: Any) -> str | None:
    """Return why a patch of a model from a GGUF file is not all that llama.cpp would apply."""
    file = gguf_source.file_of(config)
    found = gguf_source.read_scaling(file) if file is not None and Path(file).is_file() else None
    if found is None:
        return None
    return (
        f"{file} scales its rotary embedding already ({found.text}); give the file of the unscaled "
        f"model"
    )


def _writing(
    state: Patch, saved: Saved | None, absolute: bool = False
) -> tuple[str, str, str, tuple[str, ...]]:
    """Return the unpatched and patched GGUF file, the command that writes it, and a note."""
    if (reason := already_scaled(state.model.config)) is not None:
        raise Refusal(reason)

    def printed(path: str) -> str:
        return str(Path(path).absolute()) if absolute and Path(path).exists() else path

    source = "MODEL.gguf"
    output = "MODEL-long.gguf"
    file = gguf_source.file_of(state.model.config)
    name = state.model.config.name_or_path
    if _is_saved_patch(name):
        name = ""  # the unpatched one is elsewhere
    notes = (f"{source}: convert_hf_to_gguf.py applied to the unpatched {name or 'MODEL'}",)
    if saved is not None:  # the patch is written after conversion
        notes = (f"{source} is what convert_hf_to_gguf.py makes of {base.folder_of(saved)}",)
    elif file is not None:
        stem = Path(file).stem
        # A Modelfile has no way to quote a line break.
        source = printed(file)
        output = f"{stem if stem.isprintable() else 'MODEL'}-long.gguf"
        notes = ()
    method = state.record.method
    site = state.scaled[0]
    changed = {name: value for name, value in method.changed().items() if name != "factor"}
    options = {k: x.name if isinstance(x, Method) else x for k, x in changed.items()}
    again = build_method(method.name, factor=method.factor, **options)
    # Otherwise only the saved patch describes it.
    if saved is None and again == method and not site.scaled and site.raised is None:
        given = [f"{method.name}.{name}={value}" for name, value in options.items()]
        patch_options = {"method": method.name, "factor": repr(method.factor), "option": given}
        words = command_words(
            "gguf", source, **patch_options, trained_length=state.length, output=output
        )
    else:
        words = ["rope-ext", "gguf", printed(base.folder_of(saved)), source, "--output", output]
    return source, output, shell_join(words), notes


def gguf_library() -> Any:
    """Import ``gguf``; raises ExportError if it is not installed."""
    return optional("gguf", needs="GGUF files need", extra="rope-ext[eval]", kind=ExportError)


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file and its unscaled rotary embedding."""

    path: Path
    architecture: str  # architecture name in llama.cpp
    base: float
    width: int  # of hidden states
    dim: int  # rotary columns of a head
    length: int  # trained length, tokens
    scaled: bool  # whether the file already scales it
    reader: Any  # a reader of the `gguf` library

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file's header, without the weights."""
        gguf_library()  # without the library, nothing is wrong with the file
        try:
            reader, keys, tables = gguf_source.read(path)
        except LoadError as error:
            raise ExportError(
                f"{error}; give a GGUF file as written by convert_hf_to_gguf.py"
            ) from error
        architecture = keys.get("general.architecture", "")
        own = {k.removeprefix(f"{architecture}."): value for k, value in keys.items()}
        length = own.get("context_length")
        heads = own.get("attention.head_count")
        width = own.get("embedding_length", 0)
        dim = own.get("rope.dimension_count") or own.get("attention.key_length")
        if dim is None and isinstance(heads, int) and heads:
            dim = width // heads
        if not (length and dim):
            raise ExportError(f"{path} is not a language model: head or context keys are missing")
        base = own.get("rope.freq_base", 10000.0)
        scaled = gguf_source.scales(keys, tables)
        return cls(
            path=Path(path),
            architecture=architecture,
            base=base,
            width=width,
            dim=dim,
            length=length,
            scaled=scaled,
            reader=reader,
        )

    def write(self, output: str | Path, plan: Plan) -> None:
        """Write a copy with new keys for the rotary embedding, and optionally a frequency table."""
        output = Path(output)
        gguf = gguf_library()
        if output.exists() and output.samefile(self.path):
            raise ExportError(f"{output} is the input file; give --output another name")
        if not may_replace(output, _MARK):
            raise ExportError(f"{output} exists and would be lost; give --output another name")
        prefix = f"{self.architecture}.rope.scaling."
        own = ("general.architecture", _MARK, *plan.keys)  # set by the writer
        try:
            with draft_of(output.resolve()) as draft:  # of a link that the user named, the target
                writer = gguf.GGUFWriter(draft, self.architecture)
                writer.data_alignment = int(self.reader.alignment)
                writer.add_bool(_MARK, True)
                for name, field in self.reader.fields.items():
                    if not (name in own or name.startswith(("GGUF.", prefix))):
                        part = field.types[-1] if len(field.types) > 1 else None
                        writer.add_key_value(name, field.contents(), field.types[0], part)
                for name, value in plan.keys.items():
                    kind = gguf.GGUFValueType.get_type(value)
                    whole = gguf.GGUFValueType.UINT32 if isinstance(value, int) else kind
                    writer.add_key_value(name, value, whole)
                for tensor in self.reader.tensors:
                    if tensor.name not in (TABLE, LONG, SHORT):
                        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
                if plan.table is not None:
                    writer.add_tensor(TABLE, numpy.array(plan.table, dtype=numpy.float32))
                write_out(writer)
        except OSError as error:
            raise ExportError(f"cannot write {output} ({error.strerror or error})") from error


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
        hidden_size=file.width,
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
    config = text_config(state.decoder)
    dim = state.scaled[0].rope.dim
    family = ENGINES["llama.cpp"].get(config.model_type)
    width = config.hidden_size
    architecture = family.name if family else None
    if (file.width, file.dim, file.architecture) != (width, dim, architecture):
        raise ExportError(
            f"{file.path} holds a {file.architecture!r} of width {file.width} with {file.dim // 2} "
            f"rotary pairs, but the model is a {architecture!r} of width {width} with {dim // 2}; "
            f"give the file of the same model"
        )
    try:
        plan = planned(state, in_file=True)
    except Refusal as refusal:
        raise ExportError(f"llama.cpp cannot run {state.method.name}: {refusal}") from None
    file.write(output, plan)
    return plan


def write_out(writer: Any) -> None:
    """Write everything added to a ``gguf.GGUFWriter`` to its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
