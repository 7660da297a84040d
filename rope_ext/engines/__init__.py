"""Exports patches to other engines; each engine has a function that returns its settings."""

import dataclasses
import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from rope_ext.config.nested import text_of
from rope_ext.config.settings import all_settings
from rope_ext.engine_names import check_name
from rope_ext.engines import base, configs, llama_cpp
from rope_ext.engines.base import Export, Refusal
from rope_ext.errors import ExportError, NotPatchedError
from rope_ext.patching import Patch, current_patch
from rope_ext.quoting import command_line
from rope_ext.rotary.sites import unwrap
from rope_ext.saving import draft_configs
from rope_ext.saving.folder import Saved, read_saved

_ENGINES: dict[str, Callable[..., Export]] = {
    "vllm": configs.vllm,
    "sglang": configs.sglang,
    "llama.cpp": llama_cpp.llama_cpp,
    "ollama": llama_cpp.ollama,
    "transformers": configs.transformers,
    "mlx": configs.mlx,
}
"""By engine, a function of a patch and the folder that already contains it, if any; otherwise the
engine loads the unpatched model."""


_BOTH_WAYS = ("vllm", "transformers")
"""Engines that were tested with models that read in both directions."""


def check_engine(name: str, **options: Any) -> None:
    """Raise ExportError unless there is an engine of this name that has these options."""
    check_name(name)
    known = [*inspect.signature(_ENGINES[name]).parameters][2:]
    for option in options.keys() - known:
        valid = f"its options are {', '.join(known)}" if known else "it has none"
        raise ExportError(f"{name} has no option {option!r}; {valid}")


def export(model: nn.Module | PreTrainedConfig | str | Path, engine: str, **options: Any) -> Export:
    """Export the patch of ``model`` as settings for another engine.

    Args:
        model: patched by :func:`rope_ext.patch`; or a saved or merged model: its folder, Hub ID or
            configuration, or the loaded model. No weights are read from folders and Hub IDs.
        engine: ``"vllm"``, ``"sglang"``, ``"llama.cpp"``, ``"ollama"``, ``"mlx"`` or
            ``"transformers"``.
        **options: engine options. For ``"transformers"``, ``legacy=True`` adds the field names of
            older readers. For ``"vllm"`` and ``"sglang"``, ``plugin=False`` refuses position
            methods, which vLLM 0.30 to 0.32 and SGLang 0.5.23 serve only with rope_ext installed;
            in SGLang, this was not run.

    Returns:
        Settings with which the engine computes the same frequencies and attention scaling from the
        unpatched checkpoint (``"mlx"`` and ``"transformers"``: from the folder saved by the patched
        model). For a saved model: settings for its folder, often none.

    Raises ExportError if the engine cannot run the patch, NotPatchedError if there is none, and
    MeasureError if the folder has no configuration.
    """
    check_engine(engine, **options)
    if isinstance(model, nn.Module) and (state := current_patch(model)) is not None:
        return _export(engine, state, None, **options)
    saved = read_saved(unwrap(model).config if isinstance(model, nn.Module) else model)
    state = current_patch(saved.model)
    return _unread(engine, saved) if state is None else _export(engine, state, saved, **options)


def _export(engine: str, state: Patch, saved: Saved | None, **options: Any) -> Export:
    notes: tuple[str, ...] = ()
    if saved is not None and saved.source == "adapter":
        merge = command_line(["python", "recipes/merge.py", saved.name, "--output", "MERGED"])
        saved = None
        notes = (f"for the base model; merge the adapter: {merge}",)
    try:
        export = _exported(engine, state, saved, **options)
    except Refusal as refusal:
        others = [repr(e) for e in _ENGINES if e != engine and _runs(e, state, saved)]
        raise ExportError(
            f"{engine} cannot run {state.method.name}: {refusal}; "
            f"{' and '.join(others) or 'no supported engine'} can run this patch"
        ) from None
    return dataclasses.replace(export, notes=(*export.notes, *notes))


def _runs(engine: str, state: Patch, saved: Saved | None = None, **options: Any) -> bool:
    with suppress(Refusal):
        _exported(engine, state, saved, **options)
        return True
    return False


def _exported(engine: str, state: Patch, saved: Saved | None, **options: Any) -> Export:
    if engine not in _BOTH_WAYS and base.reads_both_ways(state):
        raise Refusal("it has not been tested with models that read in both directions")
    if engine != "transformers" and draft_configs.around(state.model.config) is not None:
        raise Refusal("it serves this draft beside its target, by the config.json of the folder")
    return _ENGINES[engine](state, saved, **options)


_BY_ITSELF: dict[str, dict[str, Any]] = {
    "vllm": {"plugin": False},
    "sglang": {"plugin": False},
}
"""Options of engines with which they need nothing from this package."""


def _runs_by_itself(engine: str, state: Patch, saved: Saved | None = None) -> bool:
    return _runs(engine, state, saved, **_BY_ITSELF.get(engine, {}))


def _unread(engine: str, saved: Saved) -> Export:
    """Return the error for an unpatched model; its RoPE scaling may have no equivalent method."""
    settings = all_settings(text_of(saved.config))
    kinds = {one.rope_type for one in settings.values()} - {"default"}
    if not kinds:
        raise NotPatchedError(
            "this model is not patched, and its configuration does not scale it, so there is "
            "nothing to export; call rope_ext.patch(model, ...) first, or pass --method"
        )
    if engine == "transformers":
        return configs.as_it_is(saved)
    said = " and ".join(map(repr, sorted(kinds)))
    raise ExportError(
        f"{engine} cannot run what this configuration says, rope_type {said}; 'transformers' can "
        f"run this folder"
    )


def serving_commands(saved: Saved) -> tuple[str, ...]:
    """Return commands that serve a saved, extended folder, for vLLM or the first engine."""
    state = current_patch(saved.model)
    for engine in _ENGINES:
        if state and engine != "transformers" and _runs_by_itself(engine, state, saved):
            return (_export(engine, state, saved).command,)
    return ()


def engines_for(model: nn.Module) -> tuple[str, ...]:
    """Return the engines that run a patched model without this package."""
    state = current_patch(model)
    return () if state is None else tuple(n for n in _ENGINES if _runs_by_itself(n, state))


def engines_with_plugin(model: nn.Module, saved: Saved | None = None) -> tuple[str, ...]:
    """Return the engines that run a patched model only with this package installed beside them."""
    state = current_patch(model)
    if state is None:
        return ()
    able = [name for name in _BY_ITSELF if _runs(name, state, saved)]
    return tuple(name for name in able if not _runs_by_itself(name, state, saved))
