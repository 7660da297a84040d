"""Reads and writes the sidecar file next to a PEFT adapter, which records the adapter's patch."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext.config.record import SIDECAR, Record
from rope_ext.errors import AdapterError, NotPatchedError, RecordError, optional
from rope_ext.methods.checked import not_none
from rope_ext.patching import Patch, current_patch
from rope_ext.rotary.sites import RotarySite, find_sites, text_decoder
from rope_ext.saving import hub
from rope_ext.saving.drafts import write_whole

Frequencies = Mapping[str, list[float]]
"""Frequencies (radians per token), then scaling, of every rotary site, by path and layer type."""
_SAVE_AGAIN = "save it again with PeftModel.save_pretrained"
_SAME = 1e-5  # float32 pow may differ between devices


@dataclass(frozen=True)
class Sidecar:
    """The content of the sidecar file next to an adapter."""

    record: Record  # the patch that the adapter was trained under
    before: Frequencies  # frequencies before and after patching
    after: Frequencies

    def to_json(self) -> dict[str, Any]:
        parts = {"before": self.before, "after": self.after}
        return self.record.to_json() | {
            name: {k: {"inv_freq": v[:-1], "attention_scaling": v[-1]} for k, v in part.items()}
            for name, part in parts.items()
        }

    def is_of(self, model: nn.Module) -> bool:
        """Whether the unpatched ``model`` has the same frequencies as the adapter's base."""
        return same(_unpatched(model), self.before)

    def fault(self, model: nn.Module) -> str | None:
        """Return why the adapter does not match ``model``; None if it does."""
        state = current_patch(model)
        if state is None and self.record.plain and same(_unpatched(model), self.after):
            return None  # its configuration has this patch
        if not self.is_of(model):
            return "has different rotary frequencies than the base model it was trained on"
        if state is None:
            return "is not patched"
        if state.length != self.record.trained_length:
            return (
                f"has a trained length of {state.length}, not {self.record.trained_length} tokens"
            )
        if not self.record.same(state.record):
            return f"is patched by {state.record.call()}"
        if not same(frequencies_of(state.sites, state), self.after):
            return "gets different frequencies from the same call in this version of rope_ext"
        return None


def save_sidecar(model: nn.Module, directory: str | PathLike[str]) -> Path:
    """Write the patch of ``model`` to ``rope_ext.json`` in ``directory``.

    PEFT does not save the patch, and an adapter on an unpatched base model generates garbage.
    Call this wherever you save the adapter, in the main process only; :func:`load_adapter` and
    :func:`from_pretrained` read the file. Returns its path.

    Raises NotPatchedError if the model is not patched, and AdapterError if the directory is not
    writable; a file that is there stays as it was.
    """
    state = current_patch(model)
    if state is None:
        raise NotPatchedError(
            f"this model is not patched; call rope_ext.patch(model, ...) before training. An "
            f"adapter of an unpatched model needs no {SIDECAR}"
        )
    path = Path(directory) / SIDECAR
    sidecar = Sidecar(state.record, _unpatched(model), frequencies_of(state.sites, state))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(sidecar.to_json(), indent=1) + "\n")
    except OSError as error:
        raise AdapterError(
            f"cannot write {path} ({error.strerror}); choose a writable directory"
        ) from error
    return path


def read_sidecar(directory: str, **kwargs: Any) -> Sidecar | None:
    """Read the sidecar of a directory or Hub repository; None if there is none."""
    with hub.loading("adapter", directory):
        path = hub.find(hub.require_place(directory), SIDECAR, **hub.of_hub(kwargs))
    if path is None:
        return None
    again = "write it again from the patched model with rope_ext.save_sidecar"
    with hub.loading("record", path, RecordError, again):
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        record = Record.from_json(data, path)
        return Sidecar(record, _from_json(data["before"]), _from_json(data["after"]))


def require_sidecar(directory: str, kwargs: Mapping[str, Any]) -> Sidecar:
    """Read a sidecar; raises AdapterError if there is none."""
    sidecar = read_sidecar(directory, **kwargs)
    if sidecar is None:
        directory = str(Path(directory, kwargs.get("subfolder", "")))
        raise AdapterError(
            f"the adapter in {directory} has no {SIDECAR}; if it was trained without a patch, load "
            f"it with peft.PeftModel.from_pretrained; otherwise patch the base as in training and "
            f"call rope_ext.save_sidecar(model, {directory!r}) once"
        )
    return sidecar


def read_base(path: str) -> tuple[str | None, str | None, str | None, str | None]:
    """Read class, task, name and revision of an adapter's base from ``adapter_config.json``."""
    with hub.loading("configuration", path, AdapterError, _SAVE_AGAIN):
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        cls = (saved.get("auto_mapping") or {}).get("base_model_class")  # set without a task
        names = ("task_type", "base_model_name_or_path", "revision")
        found = (cls, *(saved.get(name) for name in names))
        wrong = [name for name in found if not isinstance(name, (str, type(None)))]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not a name")
        return found


def load_adapter(model: nn.Module, directory: str | PathLike[str], **kwargs: Any) -> Any:
    """Load a PEFT adapter onto ``model``, which must have the patch it was trained under.

    Args:
        model: a loaded model with the patch recorded in ``rope_ext.json``.
        directory: directory or Hub ID of the adapter.
        **kwargs: arguments of ``PeftModel.from_pretrained``, such as ``is_trainable=True``.

    Returns the ``PeftModel``. Raises AdapterError if the model or its patch does not match,
    LoadError or RecordError if the adapter or its ``rope_ext.json`` cannot be read. The model is
    left unchanged then.
    """
    peft = require_peft()
    directory = hub.require_place(directory)
    sidecar = require_sidecar(directory, kwargs)
    if isinstance(model, peft.PeftModel):
        raise AdapterError(
            "the model already has an adapter; add this one with PEFT's model.load_adapter"
        )
    fault = sidecar.fault(model)
    if fault is not None:
        call = sidecar.record.call(*([] if current_patch(model) is None else ["replace=True"]))
        raise AdapterError(
            f"the adapter in {directory} was trained under {sidecar.record.call()}, and this model "
            f"{fault}; call {call} on its base model, or rope_ext.from_pretrained({directory!r})"
        )
    with hub.loading("adapter", directory, AdapterError, _SAVE_AGAIN), _untouched_on_error(model):
        return peft.PeftModel.from_pretrained(model, directory, **kwargs)


@contextmanager
def _untouched_on_error(model: nn.Module) -> Iterator[None]:
    """Undo the changes of a partially loaded adapter if loading fails."""
    before = [(m, {**vars(m), "_modules": dict(m._modules)}) for m in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        raise


def require_peft() -> Any:
    return optional("peft", "an adapter needs", "peft", AdapterError)


def frequencies_of(
    sites: Sequence[RotarySite], state: Patch | None = None, start: bool = False
) -> Frequencies:
    """Return the frequencies of rotary sites, as loaded or under a patch.

    If they depend on the length, those at the target length, or at the ``start`` those at the
    trained length, which a new module has.
    """
    found = {}
    for site in sites:
        inv_freq, scaling = site.loaded, site.scaling
        if state is not None:
            inv_freq, scaling = state.frequencies_of(site)
            if start and state.method.is_dynamic:
                inv_freq = not_none(state.frequencies).frequencies(site.rope, site.rope.length)
        name = site.name if site.layer_type is None else f"{site.name}:{site.layer_type}"
        found[name] = [*inv_freq.tolist(), scaling]
    return found


def _unpatched(model: nn.Module) -> Frequencies:
    state = current_patch(model)
    return frequencies_of(find_sites(text_decoder(model)) if state is None else state.sites)


def _from_json(part: Any) -> Frequencies:
    read = {k: [*v["inv_freq"], v["attention_scaling"]] for k, v in part.items()}
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for v in read.values() for x in v):
        raise ValueError("frequencies that are not numbers")
    return read


def same(one: Frequencies, other: Frequencies) -> bool:
    """Whether both are equal up to device rounding."""
    if {k: len(v) for k, v in one.items()} != {k: len(v) for k, v in other.items()}:
        return False
    pairs = [(a, b) for k in one for a, b in zip(one[k], other[k], strict=True)]
    return all(abs(a - b) <= _SAME * abs(b) + 1e-25 for a, b in pairs)
