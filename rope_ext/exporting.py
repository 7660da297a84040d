"""A patch as the settings of other engines.

What is said of them here was read in vLLM 0.33.0, SGLang 0.5.23, llama.cpp at commit 0c1e57098
(with its converter) and transformers 5.23.0; the tests hold their formulas.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rope_ext.discovery import text_config, unwrap
from rope_ext.errors import ExportError, NotPatchedError, nearest
from rope_ext.methods import PositionMethod, YaRN
from rope_ext.patching import Patch, current_patch

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""By ``model_type``, llama.cpp's name of it. All engines build these from the configuration's
``rope_parameters`` and nothing else, which was not checked for other families."""


class _Refusal(Exception):
    """Why an engine cannot run a patch."""


@dataclass(frozen=True)
class Export:
    """The settings with which an engine computes what a patch does; ``print`` it.

    Args:
        engine: its name.
        settings: the engine's own names and values; lengths are in tokens.
        command: ready to paste, with the model's name filled in where it is known.
        files: text by file name.
        notes: what to know about them.
    """

    engine: str
    settings: Mapping[str, Any]
    command: str
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.command, *(f"# {note}" for note in self.notes)]
        for name, text in self.files.items():
            lines += [f"# {name}:", text.rstrip("\n")]
        return "\n".join(lines)


def export(model: nn.Module, engine: str) -> Export:
    """The patch of ``model`` as settings of another engine.

    Args:
        model: patched by :func:`rope_ext.patch`.
        engine: ``"vllm"``, ``"sglang"``, ``"llama.cpp"`` or ``"transformers"``.

    Returns:
        Settings for the unpatched checkpoint (of ``"llama.cpp"`` with ``llama3``: for one that
        the patched model saved), under which the engine has the same frequencies and attention
        scaling.

    Raises:
        ExportError: there is no such engine, or it cannot run the patch.
        NotPatchedError: there is no patch.
    """
    if engine not in _ENGINES:
        known = ", ".join(map(repr, _ENGINES))
        raise ExportError(
            f"engine={engine!r} is not known; choose one of {known}{nearest(engine, _ENGINES)}"
        )
    state = current_patch(model)
    if state is None:
        raise NotPatchedError(
            "this model is not patched, so there is nothing to export; call "
            "rope_ext.patch(model, ...) first"
        )
    try:
        return _ENGINES[engine](model, state)
    except _Refusal as refusal:
        others = [name for name in _ENGINES if name != engine and _runs(model, state, name)]
        instead = f"{' and '.join(map(repr, others))} can" if others else "no other engine can"
        raise ExportError(
            f"{engine} cannot run {state.method.name}: {refusal}. Of this patch, {instead} be "
            f"given settings; every engine runs 'yarn', 'pi' and 'ntk' on "
            f"{', '.join(_ARCHITECTURES)}"
        ) from None


def _runs(model: nn.Module, state: Patch, engine: str) -> bool:
    try:
        _ENGINES[engine](model, state)
    except _Refusal:
        return False
    return True


def _transformers(model: nn.Module, state: Patch) -> Export:
    _refuse_positions(state, "transformers")
    if not state.native:
        raise _Refusal("it has no rope_type that builds these frequencies")
    config = unwrap(model).config
    text = config.get_text_config(decoder=True)
    notes = [note for note in state.notes if not note.startswith("saving: ")]
    return Export(
        "transformers",
        {
            "rope_parameters": text.rope_parameters,
            "max_position_embeddings": text.max_position_embeddings,
        },
        "hf upload USER/NAME config.json",
        {"config.json": config.to_json_string()},
        ("put it beside the weights; model.save_pretrained(FOLDER) writes both", *notes),
    )


def _vllm(model: nn.Module, state: Patch) -> Export:
    overrides = _overrides(state, "vLLM")
    settings = {"hf_overrides": overrides, "max_model_len": state.target_length}
    flags = ["--hf-overrides", json.dumps(overrides), "--max-model-len", str(state.target_length)]
    command = shlex.join(["vllm", "serve", _name(model), *flags])
    return Export("vllm", settings, command, notes=("as vLLM 0.33.0 computes it", *_angles(state)))


def _sglang(model: nn.Module, state: Patch) -> Export:
    overrides = _overrides(state, "SGLang")
    settings = {"json_model_override_args": overrides, "context_length": state.target_length}
    flags = ["--json-model-override-args", json.dumps(overrides)]
    flags += ["--context-length", str(state.target_length)]
    launch = ["python", "-m", "sglang.launch_server", "--model-path", _name(model)]
    notes = ("as SGLang 0.5.23 computes it", *_angles(state))
    return Export("sglang", settings, shlex.join([*launch, *flags]), notes=notes)


def _overrides(state: Patch, engine: str) -> dict[str, Any]:
    """Fields of the configuration, with the names that vLLM and SGLang add to transformers'."""
    _refuse_unproven(state, engine)
    if not state.native:
        raise _Refusal("it builds from transformers' types, and none has these frequencies")
    parameters = dict(text_config(state.config.decoder).rope_parameters)
    kind, factor = parameters["rope_type"], parameters.get("attention_factor")
    if kind == "yarn":
        # Both take attn_factor times 0.1 ln(s) + 1, but newer vLLM attention_factor itself.
        multiplier = factor / _temperature(parameters["factor"])
        if not math.isclose(multiplier, 1.0, rel_tol=1e-12):
            parameters["attn_factor"] = multiplier
    elif kind == "longrope":
        # Otherwise both take sqrt(1 + ln(s) / ln(length)), whatever attention_factor says.
        parameters |= {"short_mscale": factor, "long_mscale": factor}
    elif kind not in ("default", "linear", "llama3"):
        raise _Refusal(f"what it makes of rope_type {kind!r} was not checked")
    return {"rope_parameters": parameters, "max_position_embeddings": state.target_length}


def _llama_cpp(model: nn.Module, state: Patch) -> Export:
    _refuse_unproven(state, "llama.cpp")
    if not state.native or state.scaled[0].scaled:
        raise _Refusal("it has no setting for these frequencies")
    parameters = text_config(state.config.decoder).rope_parameters
    kind, length, target = parameters["rope_type"], state.length, state.target_length
    architecture = _ARCHITECTURES[text_config(state.config.decoder).model_type]
    keys: dict[str, Any] = {"context_length": target}
    flags: dict[str, Any] = {"--ctx-size": target}
    notes = ["as llama.cpp computes it at commit 0c1e57098", *_angles(state)]
    tensors = {}
    if kind == "default":
        keys["rope.freq_base"] = flags["--rope-freq-base"] = parameters["rope_theta"]
    elif kind in ("linear", "yarn"):
        flags |= {"--rope-scaling": kind, "--rope-scale": parameters["factor"]}
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": parameters["factor"]}
    elif kind == "llama3" and architecture == "llama":
        inv_freq, _ = state.frequencies_of(state.scaled[0])
        tensors = {"rope_freqs.weight": (state.scaled[0].rope.inv_freq / inv_freq).tolist()}
        notes.append(
            "convert the folder that model.save_pretrained wrote: the converter writes the tensor "
            "rope_freqs.weight, and there is no flag for it"
        )
    elif kind == "llama3":
        raise _Refusal("its converter writes rope_freqs.weight for the architecture 'llama' only")
    else:
        raise _Refusal(
            "it reads a table of frequencies from a tensor, which its converter writes for llama3 "
            "alone"
        )
    if kind == "yarn":
        if not parameters.get("truncate", True):
            raise _Refusal("it always rounds the ends of the ramp (truncate=True)")
        keys["rope.scaling.original_context_length"] = flags["--yarn-orig-ctx"] = length
        for name in ("beta_fast", "beta_slow"):
            if parameters[name] != getattr(YaRN, name):
                flags[f"--yarn-{name.replace('_', '-')}"] = parameters[name]
                keys[f"rope.scaling.yarn_{name}"] = parameters[name]
        notes.append("llama.cpp multiplies 1 + 0.1 ln(s) in by itself")
        multiplier = parameters["attention_factor"] / _temperature(parameters["factor"])
        if not math.isclose(multiplier, 1.0, rel_tol=1e-12):
            # --yarn-attn-factor has no effect there: the key alone is multiplied in.
            keys["rope.scaling.attn_factor"] = multiplier
            key = f"{architecture}.rope.scaling.attn_factor"
            flags["--override-kv"] = f"{key}=float:{multiplier!r}"
    settings = {
        "flags": flags,
        "gguf": {f"{architecture}.{name}": value for name, value in keys.items()},
    }
    words = [word for flag, value in flags.items() for word in (flag, str(value))]
    command = shlex.join(["llama-server", "--model", "MODEL.gguf", *words])
    if tensors:
        settings["tensors"] = tensors
        command = f"python convert_hf_to_gguf.py FOLDER --outfile MODEL.gguf && {command}"
    return Export("llama.cpp", settings, command, notes=tuple(notes))


_ENGINES: Mapping[str, Callable[[nn.Module, Patch], Export]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
    "transformers": _transformers,
}


def _refuse_unproven(state: Patch, engine: str) -> None:
    """Raise unless ``state`` is one fixed set of frequencies, and the family was checked."""
    _refuse_positions(state, engine)
    if state.method.adapts:
        raise _Refusal(
            "it has one set of frequencies for all sequences, and this method chooses them for "
            "each; patch with length=TOKENS to fix them"
        )
    kind = text_config(state.config.decoder).model_type
    if kind not in _ARCHITECTURES or len(state.sites) > 1:
        raise _Refusal(
            f"whether it builds {kind!r} from these settings was not checked; checked were "
            f"{', '.join(_ARCHITECTURES)}"
        )


def _refuse_positions(state: Patch, engine: str) -> None:
    start = getattr(state.method, "start_tokens", 0)
    if start:
        raise _Refusal(
            f"it rotates every token by the same frequencies, and start_tokens={start} keeps the "
            f"trained ones for the first tokens; patch with start_tokens=0 to export"
        )
    if not isinstance(state.method, PositionMethod):
        return
    if state.method.name == "self_extend" and engine == "llama.cpp":
        raise _Refusal(
            "its --grp-attn-n and --grp-attn-w put tokens into groups for good once "
            "--grp-attn-w of them are there, so that neighbours lose their own distances, which "
            "Self-Extend keeps for each query"
        )
    raise _Refusal("it has no setting that changes the positions of queries and keys")


def _angles(state: Patch) -> tuple[str, ...]:
    return ("it computes angles in float32, the patch here in float64",) if state.precise else ()


def _temperature(factor: float) -> float:
    """YaRN's number on cosine and sine (arXiv 2309.00071, eq. 22)."""
    return 0.1 * math.log(factor) + 1.0


def _name(model: nn.Module) -> str:
    return getattr(unwrap(model).config, "_name_or_path", "") or "MODEL"
