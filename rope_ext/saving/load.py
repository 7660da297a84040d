"""Loads models and PEFT adapters together with the patch they were saved under.

The configuration of a model records its patch; that of an adapter is in a sidecar file next to it.
"""

import copy
import functools
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rope_ext.config import writing
from rope_ext.config.bounds import MOST_BYTES, culprit, require_bounds
from rope_ext.config.nested import configurations
from rope_ext.config.record import FIELD, SIDECAR, Record, record_within
from rope_ext.config.settings import edits
from rope_ext.errors import (
    CURE,
    AdapterError,
    LoadError,
    NotPatchedError,
    RecordError,
    brief,
    first_line,
    optional,
)
from rope_ext.methods.checked import not_none
from rope_ext.patching import Patch, current_patch, patch
from rope_ext.position import learned
from rope_ext.rotary.sites import (
    ROUNDING,
    RotarySite,
    find_sites,
    text_decoder,
    text_root,
    unwrap,
)
from rope_ext.saving import embedders, gguf_source, hub
from rope_ext.saving.drafts import write_whole

_CAUSAL = "AutoModelForCausalLM"
# Class of an adapter's base model, by the task in its PEFT config; the default is above.
_TASKS = {
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}
_LEARNED = rf"(^|\.)({'|'.join(learned.NAMES)})\."
"""Names of patch parameters, which transformers does not expect."""
Frequencies = Mapping[str, Mapping[str, Any]]
"""Of every rotary site, by path and layer type: ``inv_freq`` (radians per token) and
``attention_scaling``, as stored in sidecars."""
_Store = Iterable[tuple[str, torch.Tensor]]
"""Tensors of a folder by name."""
_SAVE_AGAIN = "save it again with PeftModel.save_pretrained"
_logger = logging.getLogger("rope_ext")


def from_pretrained(
    path: str | PathLike[str],
    *,
    base: str | PathLike[str] | None = None,
    is_trainable: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a model, or an adapter with its base model, and apply the patch it was saved under.

    Args:
        path: directory or Hub ID of a model saved under any patch, or of a PEFT adapter with a
            ``rope_ext.json``, such as a Trainer checkpoint; or a GGUF file of an unpatched model.
        base: base model of the adapter; default: the one named in ``adapter_config.json``.
        is_trainable: whether to continue training the adapter.
        **kwargs: arguments of ``from_pretrained`` of the saved class: ``dtype``, ``device_map``,
            ...; pass changes to the configuration as ``config``.

    Returns the model in evaluation mode, with the same logits as the saved one. Patches that the
    configuration describes in full are loaded by plain transformers. A directory that
    sentence-transformers saved under another patch is loaded as its SentenceTransformer or
    CrossEncoder; ``kwargs`` are its ``device``, and those of the transformers model in it.

    Raises:
        AdapterError: the adapter has no ``rope_ext.json``, its base model is unknown or does not
            fit, or peft is not installed.
        LoadError, RecordError: the model or its patch cannot be read.
    """
    return from_folder(path, base, is_trainable, wrapped=True, kwargs=kwargs)


def from_folder(
    path: str | PathLike[str],
    base: str | PathLike[str] | None,
    is_trainable: bool,
    wrapped: bool,
    kwargs: dict[str, Any],
) -> Any:
    """Load as :func:`from_pretrained`; without ``wrapped`` always a transformers model."""
    folder, gguf = gguf_source.split(path) if "gguf_file" not in kwargs else (path, {})
    path = hub.require_place(folder)
    kwargs = {**kwargs, **gguf}
    where = hub.of_hub(kwargs)
    adapter = None
    if kwargs.get("gguf_file") is None:
        adapter = hub.find(path, "adapter_config.json", connection_errors=False, **where)
    if adapter is not None:
        optional("peft", needs="an adapter needs", extra="peft", kind=AdapterError)
        model = _base_of(path, adapter, base, kwargs=kwargs)
        return load_adapter(model, path, is_trainable=is_trainable, **where)
    if base is not None or is_trainable:
        raise AdapterError(f"{path} does not contain an adapter; leave base= and is_trainable= out")
    loaded, record, config = _load(path, kwargs, wrapped=wrapped)
    if record is not None:
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with loading info
        stored = _stored(path, kwargs.get("variant"), where)
        _patch(model, record, path, stores=[stored], cure="save the complete model again")
        state = not_none(current_patch(model))
        if not record.same(state.record):
            raise RecordError(
                f"{path} was saved under {record.call()} with {record.outcome()}; the same call "
                f"now gives {state.record.outcome()}: load the original model and patch it again"
            )
        refuse_other_fields(config, model, path)
        length = embedders.saved_length(path) if model is not unwrap(model) else None
        if length is not None:
            model.max_seq_length = length  # a smaller one than the patch gives was asked for
    return loaded


def _base_of(
    path: str, adapter: str, base: str | PathLike[str] | None, kwargs: dict[str, Any]
) -> Any:
    """Load the base model that ``adapter_config.json`` names, with the adapter's patch."""
    if kwargs.pop("output_loading_info", False):
        raise AdapterError(f"{path} is an adapter; leave output_loading_info= out")
    sidecar = require_sidecar(path, kwargs)
    where = hub.of_hub(kwargs)
    saved = read_adapter(adapter)
    for name in ("revision", "subfolder"):  # these locate the adapter
        kwargs.pop(name, None)
    if base is None:
        base = saved.get("base_model_name_or_path")
        kwargs |= {"revision": saved["revision"]} if saved.get("revision") else {}
    if not base:
        raise AdapterError(f"the adapter in {path} does not name its base model; pass base=")
    folder, gguf = gguf_source.split(base)
    try:
        cls = saved.get("base_model_class") or _TASKS.get(str(saved.get("task_type")), _CAUSAL)
        model, record, _ = _load(folder := hub.require_place(folder), {**kwargs, **gguf}, cls)
    except LoadError as error:
        raise AdapterError(
            f"the base model {str(base)!r} of the adapter in {path} cannot be loaded: {error}; "
            f"or pass base="
        ) from error
    if sidecar.is_of(model):
        stores = [tensors_of_adapter(path, where)]
        if record is not None and record.same(sidecar.record):
            own = _stored(folder, kwargs.get("variant"), hub.of_hub(kwargs))
            stores.append(own)  # disable_adapter() gives the base's own
        cure = "nor does its base; pass base= as it was in training, or train it by modules_to_save"
        _patch(model, sidecar.record, path, stores=stores, cure=cure)
    return model


def _load(
    path: str, kwargs: dict[str, Any], class_name: str | None = None, wrapped: bool = False
) -> tuple[Any, Record | None, Any]:
    """Load the unpatched model, as the saved class by default, and read its recorded patch.

    With ``wrapped``, that class may be one of sentence-transformers.

    Returns the model, the record and the configuration as saved.
    """
    config = copy.deepcopy(kwargs.get("config"))
    given = isinstance(config, PreTrainedConfig)
    if not given:
        config = _config(config or path, path, kwargs)
    where = f"config.json of {path}"
    found = record_within(config, where)
    record = None if found is None or found.plain else found  # a plain one is already in force
    as_saved = config
    if record is not None:
        config = record.restored(config)  # before rotary modules are built from it
    gguf_file = kwargs.get("gguf_file")
    if record is not None or gguf_file is not None:
        kwargs = {**kwargs, "config": config}
        if not given:
            _move_fields(kwargs, config)
    elif kwargs.get("config") is not None and found is None:
        _refuse_unrecorded(path, kwargs)
    if gguf_file is not None:
        gguf_source.require_readable(path, gguf_file, **hub.of_hub(kwargs))
    expecting = nullcontext() if record is None else _expecting_learned()
    with _missing_record(where), hub.loading("weights", path), expecting:
        if wrapped and record is not None and embedders.saved_by_them(path):
            loaded = embedders.load_with(config, path, kwargs)
        else:
            loaded = _class(config, class_name).from_pretrained(path, **kwargs)
    if gguf_file is not None:
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with loading info
        gguf_source.adopt(model, gguf_source.joined(path, gguf_file))
    return loaded, record, as_saved


@contextmanager
def _missing_record(where: str) -> Iterator[None]:
    """Say so where transformers refuses what only a patched model's configuration has."""
    try:
        yield
    except LoadError as error:
        if CURE not in str(error.__cause__):
            raise
        raise RecordError(
            f"{where} belongs to a patched model, but its record is missing or does not restore "
            f"the original configuration; load the original model and patch it again"
        ) from error


def _move_fields(kwargs: dict[str, Any], config: PreTrainedConfig) -> None:
    """Move the arguments that are fields of the configuration into it, as transformers would.

    It does so only for a configuration that it loads itself.
    """
    for name in kwargs.keys() - {"dtype", "torch_dtype", "quantization_config"}:
        # An argument that is no field, or a nested configuration, stays an argument.
        if not isinstance(getattr(config, name, config), PreTrainedConfig):
            setattr(config, name, kwargs.pop(name))


def _refuse_unrecorded(path: str, kwargs: Mapping[str, Any]) -> None:
    """Raise RecordError if the model in ``path`` has a record, and the given config= has none."""
    saved = PreTrainedConfig.get_config_dict(path, **hub.of_hub(kwargs))[0]
    parts = (part for part in (saved, *saved.values()) if isinstance(part, dict))
    if any(FIELD in part for part in parts):
        raise RecordError(
            f"{path} was saved under a patch that config= does not record; leave config= out, "
            f"or modify the configuration that AutoConfig loads from {path}"
        )


def _config(place: str, path: str, kwargs: Mapping[str, Any]) -> Any:
    """Load the configuration in ``place`` for the model in ``path``."""
    options = hub.of_hub(kwargs, "code_revision", "trust_remote_code")
    # Its rope_type may be one that plain transformers must refuse.
    with (
        writing.quieted(logging.getLogger("transformers")),
        hub.loading("configuration", path),
    ):
        if kwargs.get("gguf_file") is not None:
            return gguf_source.load_config(path, kwargs["gguf_file"], **options)
        return read_config(place, **options)


def _require_size(file: str) -> None:
    """Raise LoadError for a file that is larger than any with settings: it is read as a whole."""
    if os.path.getsize(file) > MOST_BYTES:
        raise LoadError(f"{file} has more than {MOST_BYTES >> 20} MB; give the folder of a model")


def _read_json(file: str) -> Any:
    _require_size(file)
    return json.loads(Path(file).read_text(encoding="utf-8"))


def read_config(place: str | PathLike[str], **options: Any) -> Any:
    """Return ``AutoConfig.from_pretrained(place)``, after a check of the sizes in its JSON.

    Raises:
        LoadError: a size is larger than in any model.
        RecordError: what a patch wrote was partly changed by hand.
    """
    saved = checked_json(place, **options)
    config = _converted(place, saved, options)
    told = "; ".join(edits(config, saved))
    if told:
        raise RecordError(
            f"config.json of {place} was changed after a patch wrote it: {told}. Undo the change, "
            f"or load the original model and patch it with other options"
        )
    return config


def checked_json(place: str | PathLike[str], **options: Any) -> dict[str, Any]:
    """Return the JSON of a configuration; raises LoadError if a size is larger than in any model.

    ``options`` are those of ``AutoConfig.from_pretrained``.
    """
    file = os.path.join(place, "config.json")
    if os.path.isfile(file):
        _require_size(file)
    saved = PreTrainedConfig.get_config_dict(place, **hub.of_hub(options))[0]
    require_bounds(saved, f"the configuration of {place}")
    return saved


def _converted(place: str | PathLike[str], saved: Mapping[str, Any], options: Any) -> Any:
    """Return transformers' configuration; its errors often do not name the field."""
    try:
        return AutoConfig.from_pretrained(place, **options)
    except Exception as error:
        kind = saved.get("model_type")
        if kind is not None and not isinstance(kind, str):
            raise LoadError(
                f"the configuration of {place} has model_type={brief(kind)}, which is not a name; "
                f"correct it, or download it again"
            ) from error
        if kind is None or kind not in CONFIG_MAPPING:
            raise
        with writing.quieted(logging.getLogger("transformers")):
            fault = culprit(saved, CONFIG_MAPPING[kind].from_dict)
        if fault is None:
            raise
        raise LoadError(
            f"the configuration of {place} has {fault}, which transformers cannot read "
            f"({type(error).__name__}: {first_line(error)}); correct it, or download it again"
        ) from error


def refuse_other_fields(config: Any, model: nn.Module, place: str) -> None:
    """Raise RecordError if ``config.json`` has other values than its recorded patch writes.

    ``config`` was loaded from ``place``, and ``model`` is patched as recorded in it. Lengths are
    not compared: training on longer texts raises them.
    """
    whole: Any = unwrap(model)
    for saved, written in zip(configurations(config), configurations(whole.config), strict=False):
        if getattr(written, FIELD, None) is None:
            continue
        one = getattr(saved, "rope_parameters", None)
        other = getattr(written, "rope_parameters", None)
        if not _agree(one, other):
            raise RecordError(
                f"config.json of {place} was changed after a patch wrote it: rope_parameters is "
                f"{one!r}, but its patch, recorded in {FIELD!r}, gives {other!r}. Undo the change, "
                f"or load the original model and patch it with other options"
            )


def _agree(one: Any, other: Any) -> bool:
    """Whether values of a configuration are equal, up to the rounding of another device."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_agree(one[name], other[name]) for name in one.keys() & other.keys())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_agree, one, other))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=ROUNDING)
    return one == other


def _class(config: PreTrainedConfig, name: str | None) -> Any:
    """Return the saved class, or the one with this name; if unknown, a causal LM."""
    names = [name] if name else config.architectures or [_CAUSAL]
    if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) for one in names):
        raise ValueError(f"architectures={names!r} is not a list of names")
    cls: Any = getattr(transformers, names[0], None)
    known = name in _TASKS.values()
    if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
        known = name is not None or cls.config_class is type(config)
    return cls if known else getattr(transformers, _CAUSAL)  # for example, remote code


def _patch(model: Any, record: Record, path: str, stores: Iterable[_Store], cure: str) -> None:
    """Patch as recorded; ``stores`` have what the patch learned."""
    with writing.quieted(_logger):  # hides advice already followed
        patch(model, record.method, **record.arguments)
    with hub.loading("weights", path):
        missing = copy_learned(unwrap(model), *stores)
    if missing:
        raise LoadError(
            f"{path} does not contain {', '.join(sorted(missing))}, learned by its patch, in its "
            f"shape and in safetensors; {cure}"
        )


def _expecting_learned() -> AbstractContextManager[None]:
    """Keep transformers from reporting a patch's parameters as unexpected keys, in all threads."""
    before = PreTrainedModel._keys_to_ignore_on_load_unexpected
    return writing.replaced(
        key=_LEARNED,
        get=lambda: PreTrainedModel._keys_to_ignore_on_load_unexpected,
        put=functools.partial(setattr, PreTrainedModel, "_keys_to_ignore_on_load_unexpected"),
        new=[*(before or ()), _LEARNED],
    )


@torch.no_grad()
def copy_learned(model: nn.Module, *stores: _Store) -> set[str]:
    """Copy a patch's learned parameters, and return the names of those that are not in ``stores``.

    The last of several stores counts. Raises ValueError for tensors that training cannot have
    written, before any is copied.
    """
    # Names within the decoder: their prefix depends on the saved class, and transformers renames it
    # for some families.
    wanted = learned.learned(text_root(model))
    found: dict[str, torch.Tensor] = {}
    for store in stores if wanted else ():
        found |= _found_in(store, wanted)
    for name, value in found.items():
        wanted[name].copy_(value)
    for module in model.modules():
        if isinstance(module, learned.Learning):
            module.clamp()  # older versions stored values outside of their bounds
    return wanted.keys() - found.keys()


def _found_in(store: _Store, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors in ``store`` of the ``wanted`` names and shapes."""
    found: dict[str, torch.Tensor] = {}
    keys: dict[str, str] = {}
    for key, value in store:
        for name in (name for name in wanted if f".{key}".endswith(f".{name}")):
            if value.shape != wanted[name].shape:
                continue
            if name in found:
                raise ValueError(f"{keys[name]} and {key} both hold {name}; remove one of them")
            if value.is_floating_point() != wanted[name].is_floating_point():
                raise ValueError(f"{key} is {value.dtype}, and not {wanted[name].dtype}")
            value = value.to(wanted[name].dtype)  # may overflow, and 8 bits have no isfinite
            if not value.isfinite().all():
                raise ValueError(f"{key} has values that are NaN or infinite")
            found[name] = value
            keys[name] = key
    return found


def tensors_of_adapter(path: str, where: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Load the tensors of an adapter by name, as soon as the first is asked for."""
    from peft.utils import load_peft_weights

    yield from load_peft_weights(path, device="cpu", **where).items()


def _stored(
    path: str, variant: str | None, where: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Load the tensors in a folder that may be learned parameters of a patch, by name."""
    before_ending = "" if variant is None else f".{variant}"
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    single, index = (re.sub(r"(\.\w+)$", rf"{before_ending}\1", name) for name in names)
    # A model saved in one file has no index; with an index, the single file does not exist.
    files = {single}
    index = hub.find(path, index, **where)
    if index is not None:
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        files |= {file for key, file in shards.items() if "rope_ext_" in key}
    for file in filter(None, (hub.find(path, name, **where) for name in sorted(files))):
        with safe_open(file, "pt") as weights:
            names = [key for key in weights.keys() if "rope_ext_" in key]  # noqa: SIM118
            yield from ((key, weights.get_tensor(key)) for key in names)


@dataclass(frozen=True)
class Sidecar:
    """The content of the sidecar file next to an adapter."""

    record: Record  # the patch that the adapter was trained under
    before: Frequencies  # frequencies before and after patching
    after: Frequencies

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
            return f"was trained on {state.length} tokens, not {self.record.trained_length}"
        if not self.record.same(state.record):
            return f"is patched by {self.record.difference(state.record)}"
        if not same(saved_frequencies(state.sites, state), self.after):
            return "gets different frequencies from the same call in this version of rope_ext"
        return None


def sidecar_of(model: nn.Module) -> Sidecar:
    """What a sidecar says of ``model``; raises NotPatchedError if it is not patched."""
    state = current_patch(model)
    if state is None:
        raise NotPatchedError(
            f"this model is not patched; call rope_ext.patch(model, ...) before training. An "
            f"adapter of an unpatched model needs no {SIDECAR}"
        )
    return Sidecar(state.record, _unpatched(model), saved_frequencies(state.sites, state))


def save_sidecar(model: nn.Module, directory: str | PathLike[str]) -> Path:
    """Write the patch of ``model`` to ``rope_ext.json`` in ``directory``.

    An adapter on an unpatched base model generates garbage. ``PeftModel.save_pretrained`` and
    trainers write this file themselves if peft was imported before the model was patched; otherwise
    call this wherever you save the adapter, in the main process only. :func:`load_adapter` and
    :func:`from_pretrained` read the file. Returns its path.

    Raises NotPatchedError if the model is not patched, and AdapterError if the directory is not
    writable; a file that is there stays as it was.
    """
    sidecar = sidecar_of(model)
    parts = {"before": sidecar.before, "after": sidecar.after}
    path = Path(directory) / SIDECAR
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(sidecar.record.to_json() | parts, indent=1) + "\n")
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
    with hub.loading("record", path=path, kind=RecordError, advice=again):
        data = _read_json(path)
        record = Record.from_json(data, path)
        parts = (data["before"], data["after"])
        # NaN is not even equal to itself.
        if not all(same(part, part) for part in parts):
            raise ValueError("frequencies that are not numbers")
        return Sidecar(record, *parts)


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


def read_adapter(path: str) -> dict[str, Any]:
    """Read ``adapter_config.json``, and the class of the base, which PEFT sets without a task."""
    with hub.loading("configuration", path=path, kind=AdapterError, advice=_SAVE_AGAIN):
        saved = _read_json(path)
        saved |= saved.get("auto_mapping") or {}
        names = ("base_model_name_or_path", "revision", "base_model_class", "task_type")
        for name in map(saved.get, names):
            if not isinstance(name, (str, type(None))):
                raise ValueError(f"{name!r} is not a name")
        ranks = [saved.get("r"), *(saved.get("rank_pattern") or {}).values()]
        require_bounds({"r": ranks}, path)
        return saved


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
    peft = optional("peft", needs="an adapter needs", extra="peft", kind=AdapterError)
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
    with (
        hub.loading("adapter", path=directory, kind=AdapterError, advice=_SAVE_AGAIN),
        _untouched_on_error(model),
    ):
        file = hub.find(str(directory), "adapter_config.json", **hub.of_hub(kwargs))
        if file is not None:
            read_adapter(file)  # checks sizes, which PEFT builds before it reads the weights
        # PEFT accepts an adapter without them; their initial values would then be used.
        if wanted := learned.learned(text_root(model)):
            _found_in(tensors_of_adapter(str(directory), hub.of_hub(kwargs)), wanted)
        return peft.PeftModel.from_pretrained(model, directory, **kwargs)


@contextmanager
def _untouched_on_error(model: nn.Module) -> Iterator[None]:
    """Undo the changes of a partially loaded adapter if loading fails."""
    # PEFT replaces layers in the dict of their parent, so this dict has to be a copy.
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


def saved_frequencies(
    sites: Sequence[RotarySite], state: Patch | None = None, start: bool = False
) -> Frequencies:
    """Return the frequencies of rotary sites, as loaded or under a patch, as they are saved.

    If they depend on the length, those at the target length, or at the ``start`` those at the
    trained length, which a new module has.
    """
    found = {}
    for site in sites:
        inv_freq = site.loaded
        scaling = site.scaling
        if state is not None:
            inv_freq, scaling = state.frequencies_of(site, site.rope.length if start else None)
        name = site.name if site.layer_type is None else f"{site.name}:{site.layer_type}"
        found[name] = {"inv_freq": inv_freq.tolist(), "attention_scaling": scaling}
    return found


def _unpatched(model: nn.Module) -> Frequencies:
    state = current_patch(model)
    return saved_frequencies(find_sites(text_decoder(model)) if state is None else state.sites)


def same(one: Frequencies, other: Frequencies) -> bool:
    """Whether both are equal up to device rounding."""
    first, second = (
        {name: [*site["inv_freq"], site["attention_scaling"]] for name, site in part.items()}
        for part in (one, other)
    )
    return first.keys() == second.keys() and all(
        len(numbers) == len(second[name]) and numpy.allclose(numbers, second[name], ROUNDING, 1e-25)
        for name, numbers in first.items()
    )
