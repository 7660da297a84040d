"""Makes PEFT save the patch beside an adapter, and trainers compare models and reload checkpoints.

The first patch after ``import peft``, ``import trl``, ``import sentence_transformers`` or ``from
transformers import Trainer`` wraps ``PeftModel.save_pretrained``, ``Trainer.train`` and the
function by which trainers of sentence-transformers load a checkpoint; the first patch wraps
``PreTrainedModel.save_pretrained``, which saves what was patched in parts of a model. For models
without a patch they do what they did.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from torch import nn

from rope_ext import patching
from rope_ext.config.record import SIDECAR
from rope_ext.errors import AdapterError, RopeExtError, first_line
from rope_ext.rotary.sites import unwrap
from rope_ext.saving.folder import read_saved
from rope_ext.saving.load import (
    Sidecar,
    from_pretrained,
    read_sidecar,
    save_sidecar,
    sidecar_of,
)

_WRAPPED = (
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("peft", "PeftModel", "save_pretrained"),
    ("transformers.trainer", "Trainer", "train"),
    ("sentence_transformers.base.trainer", "BaseTrainer", "_load_from_checkpoint"),
)
_LAZY = "trl"
_SECONDS = 10  # for an answer of a server, which TRL has reached before
_logger = logging.getLogger("rope_ext")
_DEFAULT = "default"  # PEFT's name of an adapter that is saved without a folder of its own


def wrap_trainers() -> None:
    """Wrap what is imported so far, once."""
    functions: dict[str, Callable[..., Any]] = {
        "PreTrainedModel": _save_whole,
        "PeftModel": _save,
        "Trainer": _train,
        "BaseTrainer": _reload,
    }
    for module, class_name, name in _WRAPPED:
        # Not imported here, which takes seconds: who trains has imported it, or TRL, which imports
        # its trainers when one is first named, maybe after the patch.
        if _LAZY in sys.modules:
            with suppress(ImportError):
                import_module(module)
        owner = getattr(sys.modules.get(module), class_name, None)
        original = getattr(owner, name, None)
        if original is None or getattr(original, "__module__", None) == __name__:
            continue
        setattr(owner, name, _as_method(original, functions[class_name]))


def _as_method(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(original, self, *args, **kwargs)

    method.__module__ = __name__  # says that it is wrapped already
    return method


def _save_whole(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a model with what was patched in parts of it."""
    with patching.saving_parts(model):
        return original(model, *args, **kwargs)


def _save(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Save an adapter, then the patch of its base, in place of the patch of an earlier one."""
    result = original(model, *args, **kwargs)
    whole = patching.whole_patch(model) is not None
    if patching.is_patched(model) and not whole:
        _logger.warning(
            "rope_ext: the adapter is saved without the patch of a part of its base: patch the "
            "part again after loading"
        )
    given = inspect.signature(original).bind(model, *args, **kwargs)
    # Arguments may be passed by position, and differ between versions of PEFT.
    given.apply_defaults()
    if given.arguments.get("is_main_process", True):
        names = given.arguments.get("selected_adapters") or list(model.peft_config)
        for name in names:
            folder = Path(given.arguments["save_directory"])
            folder = folder if name == _DEFAULT else folder / name
            if whole:
                save_sidecar(model, folder)
            else:
                _remove_sidecar(folder)
    return result


def _remove_sidecar(folder: Path) -> None:
    """Remove the patch of an adapter whose weights have just been replaced."""
    path = folder / SIDECAR
    with suppress(RopeExtError):  # not ours
        if path.is_file() and read_sidecar(str(folder)) is not None:
            path.unlink()
            _logger.warning("rope_ext: %s was of an earlier adapter, and is removed", path)


def _train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Compare the models that a trainer uses beside the one that it trains, then train."""
    if patching.whole_patch(trainer.model) is not None:
        trained = sidecar_of(trainer.model)
        _check_reference(trained, getattr(trainer, "ref_model", None))
        if getattr(trainer.args, "use_vllm", False):
            _check_rollouts(trained, _rollout_folder(trainer))
    return original(trainer, *args, **kwargs)


def _reload(original: Callable[..., Any], trainer: Any, checkpoint: Any) -> None:
    """Load a checkpoint into the model that a trainer of sentence-transformers trains.

    The original loads the folder as a new model of that package, to resume or to end with the best
    one. It cannot load a folder whose patch only rope_ext reloads.
    """
    model = getattr(trainer.model, "_orig_mod", trainer.model)
    state = patching.whole_patch(model)
    # A checkpoint of an adapter has no configuration of the model.
    if state is None or state.record.plain or not (Path(checkpoint) / "config.json").is_file():
        original(trainer, checkpoint)
        return
    options: dict[str, Any] = {"device": "cpu"}
    if getattr(model, "trust_remote_code", False):
        options["trust_remote_code"] = True
    saved = from_pretrained(checkpoint, **options)
    model.load_state_dict(saved.state_dict())


def _check_reference(trained: Sidecar, reference: Any) -> None:
    fault = trained.fault(reference) if isinstance(reference, nn.Module) else None
    if fault is not None:
        raise AdapterError(
            f"the model is trained under {trained.record.call()}, and its reference model {fault}; "
            f"pass ref_model=copy.deepcopy(model) if the trainer takes it, train with "
            f"peft_config=, or give the trainer a folder that model.save_pretrained wrote"
        )


def _rollout_folder(trainer: Any) -> str:
    """Return the folder from which vLLM generates: what a server names, or what TRL gives to vLLM.

    A server with a folder that cannot be read here is trusted, with a warning.
    """
    folder = unwrap(trainer.model).name_or_path
    owner = getattr(trainer, "vllm_generation", trainer)  # not in online DPO
    client = getattr(owner, "vllm_client", None)  # None in all but the main process
    if client is None:
        return folder
    served = _served_folder(client.base_url)
    if served is not None:
        with suppress(RopeExtError):
            read_saved(served)
            return served
    _logger.warning(
        "rope_ext: whether the vLLM server at %s has the patch of the model cannot be known: it "
        "serves %r, which cannot be read here; start it with a copy of %r",
        client.base_url,
        served,
        folder,
    )
    return folder


def _served_folder(address: str) -> str | None:
    """Return the folder that an OpenAI-compatible server loaded; None if it does not say so."""
    try:
        with urlopen(f"{address}/v1/models", timeout=_SECONDS) as answer:
            root = json.load(answer)["data"][0]["root"]
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return None
    return root if isinstance(root, str) and root else None


def _check_rollouts(trained: Sidecar, folder: str) -> None:
    """Compare with the folder from which vLLM generates."""
    try:
        fault = trained.fault(read_saved(folder).model)
    except RopeExtError as error:
        fault = f"cannot be read ({first_line(error)})"
    if fault is not None:
        raise AdapterError(
            f"the model is trained under {trained.record.call()}, and vLLM generates with "
            f"{folder!r}, which {fault}; call model.save_pretrained(FOLDER) once, train "
            f"rope_ext.from_pretrained(FOLDER), and start a server with FOLDER, so that both have "
            f"one patch"
        )


patching.after_patch.append(wrap_trainers)
