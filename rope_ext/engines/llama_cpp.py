"""Exports patches to llama.cpp and Ollama: flags, and GGUF metadata with a frequency tensor.

Follows the source at commit 0c1e57098, tested with llama.cpp in xllamacpp 2026.10.11549.
"""

import dataclasses
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rope_ext.apply import gguf_source
from rope_ext.apply.gguf_source import TABLE
from rope_ext.command.arguments import command_words
from rope_ext.engines import base
from rope_ext.engines.base import ENGINES, Export, Refusal
from rope_ext.methods import Method, YaRN, build_method
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import Patch
from rope_ext.rotary.sites import text_config
from rope_ext.saving.folder import Saved

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


def planned(state: Patch, in_file: bool) -> Plan:
    """Return keys and flags with which llama.cpp computes a patch, and a table if needed.

    ``in_file``: store as much as possible in the file.
    """
    if state.method.name == "self_extend":
        raise Refusal(
            "its --grp-attn-n and --grp-attn-w group tokens permanently once there are "
            "--grp-attn-w of them, so that neighbors lose their exact distances, which "
            "Self-Extend keeps for each query"
        )
    family = base.family_of(state, "llama.cpp")
    if not family.kinds:
        raise Refusal(family.reason)
    base.refuse_unproven(state, family.sliding_base)
    architecture = family.name
    site, scaling = state.scaled[0], base.Scaling.from_patch(state)
    parameters = scaling.parameters
    if not site.scaled and state.frequencies is not None:
        # Families that support only one type are exported with a table.
        parameters = state.frequencies.rope_parameters(site.rope)

    multiplier, length = scaling.scaling, scaling.rope.length
    keys: dict[str, Any] = {  # No flag, since the unpatched file has it; other files may not.
        f"{architecture}.rope.freq_base": float(scaling.rope.base),
        # llama.cpp reads it only for YaRN, gguf_source for all types.
        f"{architecture}.rope.scaling.original_context_length": length,
    }
    flags: dict[str, Any] = {"--ctx-size": scaling.target}
    overrides, notes, table = [], [], None

    def put(key: str, value: Any, flag: str | None = None, given: Any = None) -> None:
        """Add a key to the file, and its flag; without a flag, override the key."""
        name = f"{architecture}.{key}"
        keys[name] = value
        if flag is not None and not family.by_file:
            flags[flag] = value if given is None else given
        else:
            overrides.append(f"{name}={type(value).__name__}:{value}")

    yarn = parameters["rope_type"] == "yarn" and parameters.get("truncate", True)
    betas = {name: parameters[name] for name in ("beta_fast", "beta_slow") if yarn}
    betas = {name: beta for name, beta in betas.items() if beta != getattr(YaRN, name)}
    reads = architecture in READS_TABLE
    if not site.scaled and scaling.base is not None:
        put("rope.freq_base", scaling.base, "--rope-freq-base")
    elif not site.scaled and scaling.factor is not None:
        put("rope.scaling.type", "linear", "--rope-scaling")
        put("rope.scaling.factor", float(scaling.factor), "--rope-scale")
    elif not site.scaled and yarn and not (in_file and betas and reads):
        factor = float(parameters["factor"])
        put("rope.scaling.type", "yarn", "--rope-scaling")
        put("rope.scaling.factor", factor, "--rope-scale", _reaching(factor, length))
        put("rope.scaling.original_context_length", length, "--yarn-orig-ctx")
        flags |= {f"--yarn-{name.replace('_', '-')}": beta for name, beta in betas.items()}
        multiplier /= yarn_factor(factor)
        notes = ["llama.cpp applies the temperature 1 + 0.1 ln(s) itself"]
        if betas:
            notes.append(
                f"{' and '.join(betas)} are flags only: llama.cpp reads their keys for two other "
                f"architectures only"
            )
    elif reads:
        table = scaling.divisors
    else:
        raise Refusal(
            f"it reads tables of frequencies for the architectures "
            f"{', '.join(map(repr, READS_TABLE))} only, and this is {architecture!r}"
        )
    grown = yarn_factor(keys.get(f"{architecture}.rope.scaling.factor", 1.0))
    there = scaling.scaling * (1.0 if yarn else grown)
    if family.mla and grown > 1 and not math.isclose(there, 1.0):
        # deepseek2.cpp multiplies logits by the square of this times 1 + L (grown - 1), where L is
        # 10 times the key. With L, the factor of cosine and sine is the key attn_factor itself.
        put("rope.scaling.yarn_log_multiplier", 0.1 * (1 / there - 1) / (grown - 1))
        multiplier = scaling.scaling
    if family.name == "mistral3" and "--yarn-orig-ctx" not in flags:  # it scales queries
        put("rope.scaling.original_context_length", length)
    if "--yarn-orig-ctx" in flags:
        keys[f"{architecture}.context_length"] = scaling.target
    else:  # the server refuses prompts beyond the trained length, which only YaRN raises
        put("context_length", scaling.target)
    if not math.isclose(multiplier, 1.0, rel_tol=1e-12):
        # --yarn-attn-factor has no effect; only the key does.
        put("rope.scaling.attn_factor", multiplier)
    if table is None and overrides:
        flags["--override-kv"] = overrides
    return Plan(keys, flags, table, tuple(notes))


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
    made = planned(state, in_file=saved is not None)
    source, output, before, named = _writing(state, saved)
    notes = ["as llama.cpp computes it at commit 0c1e57098", *base.precise_note(state), *made.notes]
    if text_config(state.decoder).model_type in base.DRAFTS:
        notes.append("the MTP head of --spec-type draft-mtp is given the same settings")
    notes += named
    if saved is None and made.table is None:
        command = shlex.join(["llama-server", "--model", source, *made.words])
        notes.append("to write the settings into the file instead, use rope-ext gguf")
        return Export("llama.cpp", made.settings, command, notes=tuple(notes))
    if saved is None:
        notes.append(
            f"there is no flag for a table, so the first command writes {output} with the tensor "
            f"{TABLE}"
        )
        notes += ["FOLDER: written by model.save_pretrained"] * (" FOLDER " in before)
    command = shlex.join(["llama-server", "--model", output, *made.in_file])
    command = f"{before} && {command}"
    return Export("llama.cpp", made.settings, command, notes=tuple(notes))


def ollama(state: Patch, saved: Saved | None) -> Export:
    """Return a Modelfile, and the command that writes its GGUF file."""
    made = planned(state, in_file=True)
    if any("-beta-" in flag for flag in made.flags):
        raise Refusal(
            "beta_fast and beta_slow are flags of llama.cpp without keys in the file, and it "
            "accepts no flags"
        )
    _, output, before, named = _writing(state, saved)
    file = f"FROM ./{output}\nPARAMETER num_ctx {state.target_length}\n"
    note = "tested with the llama.cpp that Ollama runs, not with Ollama itself"
    notes = (*named, note, *base.precise_note(state))
    command = f"{before} && ollama create NAME --file Modelfile"
    return Export("ollama", made.settings, command, {"Modelfile": file}, notes)


def _writing(state: Patch, saved: Saved | None) -> tuple[str, str, str, tuple[str, ...]]:
    """Return the unpatched and patched GGUF file, the command that writes it, and a note."""
    source, output = "MODEL.gguf", "MODEL-long.gguf"
    notes = (f"{source}: convert_hf_to_gguf.py applied to the unpatched {base.model_name(state)}",)
    file = gguf_source.file_of(state.model.config)
    if saved is not None:  # the patch is written after conversion
        notes = (f"{source} is what convert_hf_to_gguf.py makes of {base.folder_of(saved)}",)
    elif file is not None:
        source, output, notes = file, f"{Path(file).stem}-long.gguf", ()
    method, site = state.record.method, state.scaled[0]
    defaults = {f.name: f.default for f in dataclasses.fields(method)}
    options = {
        name: value.name if isinstance(value, Method) else value
        for name, value in method.options().items()
        if name != "factor" and value != defaults[name]
    }
    again = build_method(method.name, factor=method.factor, **options)
    # Otherwise only the saved patch describes it.
    if saved is None and again == method and not site.scaled and site.raised is None:
        given = [f"{method.name}.{name}={value}" for name, value in options.items()]
        patch = {"method": method.name, "factor": repr(method.factor), "option": given}
        words = command_words("gguf", source, **patch, trained_length=state.length, output=output)
    else:
        words = ["rope-ext", "gguf", base.folder_of(saved), source, "--output", output]
    return source, output, shlex.join(words), notes
