"""llama.cpp: command-line flags, and metadata and a tensor in its files.

Everything here was read at commit 0c1e57098 and run in the llama.cpp of xllamacpp 2026.10.11549.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from rope_ext.apply import gguf_source
from rope_ext.apply.gguf_source import TABLE
from rope_ext.engines import families
from rope_ext.engines.base import (
    Engine,
    Export,
    Refusal,
    Scaling,
    config_of,
    family_of,
    model_name,
    precise_note,
    refuse_positions,
    refuse_unproven,
    register,
)
from rope_ext.methods import Method, YaRN, build_method
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import Patch
from rope_ext.saving.folder import Saved

READS_TABLE = tuple(
    dict.fromkeys(f.name for f in families.LLAMA_CPP.values() if "longrope" in f.kinds)
)
"""Architectures that look for it."""
_BETAS = ("beta_fast", "beta_slow")


@dataclass(frozen=True)
class Plan:
    """How to make llama.cpp compute a :class:`Scaling`.

    Args:
        keys: of the file, with Python values of the right type, by full name.
        flags: the equivalent command-line flags for the unpatched file; a list means that the flag
            is repeated. With a ``table`` they need the file that contains it.
        table: values of ``TABLE``.
        notes: limitations and instructions.
    """

    keys: Mapping[str, Any]
    flags: Mapping[str, Any]
    table: list[float] | None = None
    notes: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """The flags as command-line arguments."""
        pairs = [(f, v) for f, vs in self.flags.items() for v in _listed(vs)]
        return [word for flag, value in pairs for word in (flag, str(value))]

    @property
    def in_file(self) -> list[str]:
        """Flags that are still needed with the keys in the file."""
        kept = {f: v for f, v in self.flags.items() if f == "--ctx-size" or "-beta-" in f}
        return Plan({}, kept).words()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@dataclass
class _Draft:
    architecture: str
    keys: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, flag: str | None = None, given: Any = None) -> None:
        """A key of the file, and the flag for it; without one, the key is overridden."""
        name = f"{self.architecture}.{key}"
        self.keys[name] = value
        if flag is not None:
            self.flags[flag] = value if given is None else given
        else:
            kind = "int" if isinstance(value, int) else "float"
            self.overrides.append(f"{name}={kind}:{value!r}")

    def plan(self, table: list[float] | None = None, *notes: str) -> Plan:
        flags = dict(self.flags)
        if table is None and self.overrides:
            flags["--override-kv"] = self.overrides
        return Plan(self.keys, flags, table, notes)


def plan(scaling: Scaling, architecture: str, *, in_file: bool, scaled: bool = False) -> Plan:
    """Keys and flags, or a table if they are not enough.

    Args:
        scaling: what to compute.
        architecture: its name in llama.cpp.
        in_file: put as much as possible in the file.
        scaled: the unpatched file already has a scaling.

    Raises:
        Refusal: it is not possible.
    """
    draft = _Draft(architecture)
    draft.flags["--ctx-size"] = scaling.target
    # No flag: the unpatched file has it. A file that is rewritten may have another base.
    draft.keys[f"{architecture}.rope.freq_base"] = float(scaling.rope.base)
    # llama.cpp reads it for YaRN only; gguf_source reads it for all.
    draft.keys[f"{architecture}.rope.scaling.original_context_length"] = scaling.rope.length
    kind, multiplier = scaling.parameters["rope_type"], scaling.scaling
    yarn = kind == "yarn" and scaling.parameters.get("truncate", True)
    table_reader = architecture in READS_TABLE
    betas = {b: scaling.parameters[b] for b in _BETAS if yarn}
    betas = {name: beta for name, beta in betas.items() if beta != getattr(YaRN, name)}
    if not scaled and scaling.base is not None:
        draft.put("rope.freq_base", scaling.base, "--rope-freq-base")
    elif not scaled and scaling.factor is not None:
        draft.put("rope.scaling.type", "linear", "--rope-scaling")
        draft.put("rope.scaling.factor", float(scaling.factor), "--rope-scale")
    elif not scaled and yarn and not (in_file and betas and table_reader):
        return _yarn(draft, scaling, betas)
    elif table_reader:
        draft.put("context_length", scaling.target)
        if not math.isclose(multiplier, 1.0, rel_tol=1e-12):
            draft.put("rope.scaling.attn_factor", multiplier)
        return draft.plan(scaling.divisors)
    else:
        raise Refusal(
            f"it reads tables of frequencies for the architectures "
            f"{', '.join(map(repr, READS_TABLE))} only, and this is {architecture!r}"
        )
    # Beyond the trained length, which only YaRN raises, the server accepts no prompt.
    draft.put("context_length", scaling.target)
    if not math.isclose(multiplier, 1.0, rel_tol=1e-12):
        draft.put("rope.scaling.attn_factor", multiplier)
    return draft.plan()


def _yarn(draft: _Draft, scaling: Scaling, betas: Mapping[str, float]) -> Plan:
    factor, length = float(scaling.parameters["factor"]), scaling.rope.length
    draft.keys[f"{draft.architecture}.context_length"] = scaling.target
    draft.put("rope.scaling.type", "yarn", "--rope-scaling")
    draft.put("rope.scaling.factor", factor, "--rope-scale", _reaching(factor, scaling))
    draft.put("rope.scaling.original_context_length", length, "--yarn-orig-ctx")
    notes = ["llama.cpp applies the temperature 1 + 0.1 ln(s) itself"]
    for name, beta in betas.items():
        draft.flags[f"--yarn-{name.replace('_', '-')}"] = beta
    if betas:
        notes.append(
            f"{' and '.join(betas)} are flags only: llama.cpp reads their keys for two other "
            f"architectures only"
        )
    multiplier = scaling.scaling / yarn_factor(factor)
    if not math.isclose(multiplier, 1.0, rel_tol=1e-12):
        # --yarn-attn-factor has no effect; only the key is applied.
        draft.put("rope.scaling.attn_factor", multiplier)
    return draft.plan(None, *notes)


def _reaching(factor: float, scaling: Scaling) -> float:
    """The factor, or the next larger one whose float32 inverse does not lose the last token.

    llama.cpp computes the context as the length divided by the float32 of 1 / factor, rounded
    down: 447 tokens for 64 with factor 7.
    """
    tried, whole = torch.tensor(factor, dtype=torch.float32), scaling.rope.length * factor
    while int(scaling.rope.length / (1 / tried)) < math.floor(round(whole, 6)):
        tried = torch.nextafter(tried, torch.tensor(math.inf))
    return factor if tried == torch.tensor(factor) else float(f"{float(tried):.9g}")


@register
@dataclass(frozen=True)
class LlamaCpp(Engine):
    """Flags of ``llama-server``, or the command that writes a file for it."""

    name: ClassVar[str] = "llama.cpp"
    title: ClassVar[str] = "llama.cpp"

    def export(self, model: nn.Module, state: Patch) -> Export:
        made = planned(state, in_file=False)
        notes = ["as llama.cpp computes it at commit 0c1e57098", *precise_note(state), *made.notes]
        (file, long, named), before, files = gguf_names(model), [], {}
        notes += named
        if made.table is None:
            notes.append("to write the settings into the file instead, use rope-ext gguf")
        else:
            source, file = file, long
            before, files = gguf_command(state, source, file)
            notes.append(
                f"there is no flag for a table, so the first command writes {file} with the tensor "
                f"{TABLE}"
            )
            if "FOLDER" in before:
                notes.append("FOLDER: written by model.save_pretrained")
        command = shlex.join(["llama-server", "--model", file, *made.words()])
        if before:
            command = f"{shlex.join(before)} && {command}"
        return Export("llama.cpp", settings(made), command, files, tuple(notes))

    def export_saved(self, made: Export, saved: Saved, state: Patch) -> Export:
        return from_folder(made, saved, state, "llama-server --model MODEL-long.gguf")


def gguf_names(model: nn.Module) -> tuple[str, str, tuple[str, ...]]:
    """The unpatched GGUF file of a model, a name for the patched one, and a note on the first."""
    file = gguf_source.file_of(config_of(model))
    if file is not None:
        return file, f"{Path(file).stem}-long.gguf", ()
    note = f"MODEL.gguf: convert_hf_to_gguf.py applied to the unpatched {model_name(model)}"
    return "MODEL.gguf", "MODEL-long.gguf", (note,)


def from_folder(made: Export, saved: Saved, state: Patch, start: str) -> Export:
    """The export of a folder: its file, converted as it is, is given the patch.

    Args:
        made: of the same engine for the unpatched model.
        saved: the folder.
        state: its patch.
        start: the engine's command.
    """
    folder = saved.name or "FOLDER"
    before = ["rope-ext", "gguf", folder, "MODEL.gguf", "--output", "MODEL-long.gguf"]
    if made.engine == "llama.cpp":
        start = shlex.join([*shlex.split(start), *planned(state, in_file=True).in_file])
    note = f"MODEL.gguf is what convert_hf_to_gguf.py makes of {folder}"
    notes = (note, *(note for note in made.notes if "convert_hf_to_gguf" not in note))
    files = {name: text for name, text in made.files.items() if name == "Modelfile"}
    command = f"{shlex.join(before)} && {start}"
    return dataclasses.replace(made, command=command, files=files, notes=notes)


def planned(state: Patch, in_file: bool) -> Plan:
    """The :class:`Plan` for a patch."""
    if state.method.name == "self_extend":
        raise Refusal(
            "its --grp-attn-n and --grp-attn-w group tokens permanently once there are "
            "--grp-attn-w of them, so that neighbors lose their exact distances, which "
            "Self-Extend keeps for each query"
        )
    refuse_positions(state)
    family = family_of(state, "llama.cpp")
    refuse_unproven(state, family.sliding_base)
    if not state.native:
        raise Refusal("it has no setting for these frequencies")
    site, scaling = state.scaled[0], Scaling.from_patch(state)
    if not site.scaled and state.frequencies is not None:
        # Families that know one type only are saved with a table.
        own = state.frequencies.rope_parameters(site.rope)
        scaling = dataclasses.replace(scaling, parameters=own)
    return plan(scaling, family.name, in_file=in_file, scaled=site.scaled)


def settings(made: Plan) -> dict[str, Any]:
    """The :class:`Export` of a plan."""
    tensors = {} if made.table is None else {"tensors": {TABLE: made.table}}
    return {"flags": dict(made.flags), "gguf": dict(made.keys), **tensors}


def gguf_command(state: Patch, source: str, output: str) -> tuple[list[str], dict[str, str]]:
    """The command that writes a patched file, and the file of options it needs, if any."""
    method, site = state.record.method, state.scaled[0]
    defaults = {f.name: f.default for f in dataclasses.fields(method)}
    options = {
        name: _typed(value)
        for name, value in method.options().items()
        if name != "factor" and value != defaults[name]
    }
    again = build_method(method.name, factor=method.factor, **options)
    # Otherwise nothing but the whole patch describes it.
    if again != method or site.scaled or site.raised is not None:
        return ["rope-ext", "gguf", "FOLDER", source, "--output", output], {}
    words = ["rope-ext", "gguf", source, "--method", method.name, "--factor", repr(method.factor)]
    files = {}
    if any(isinstance(value, list) for value in options.values()):
        files[f"{method.name}.json"] = json.dumps(options) + "\n"
        words += ["--option", f"{method.name}={method.name}.json"]
    else:
        for name, value in options.items():
            words += ["--option", f"{method.name}.{name}={value}"]
    words += ["--trained-length", str(state.length), "--output", output]
    return words, files


def _typed(option: Any) -> Any:
    """An option of a method as it is typed."""
    if isinstance(option, Method):
        return option.name
    return list(option) if isinstance(option, tuple) else option
