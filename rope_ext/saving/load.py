"""Loads models and PEFT adapters together with the patch they were saved under."""

import copy
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rope_ext.apply import configuration, gguf_source
from rope_ext.config.record import FIELD, Record
from rope_ext.errors import CURE, AdapterError, LoadError, RecordError
from rope_ext.methods.checked import not_none
from rope_ext.patching import current_patch, patch
from rope_ext.position import learned
from rope_ext.rotary.sites import text_decoder
from rope_ext.saving import hub
from rope_ext.saving.adapters import load_adapter, read_base, require_peft, require_sidecar

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
_IGNORED = "_keys_to_ignore_on_load_unexpected"
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
    configuration describes in full are loaded by plain transformers.

    Raises:
        AdapterError: the adapter has no ``rope_ext.json``, its base model is unknown or does not
            fit, or peft is not installed.
        LoadError, RecordError: the model or its patch cannot be read.
    """
    folder, gguf = gguf_source.split(path) if "gguf_file" not in kwargs else (path, {})
    path, kwargs = hub.require_place(folder), {**kwargs, **gguf}
    where, adapter = hub.of_hub(kwargs), None
    if kwargs.get("gguf_file") is None:
        adapter = hub.find(path, "adapter_config.json", connection_errors=False, **where)
    if adapter is not None:
        require_peft()
        model = _base_of(path, adapter, base, kwargs)
        return load_adapter(model, path, is_trainable=is_trainable, **where)
    if base is not None or is_trainable:
        raise AdapterError(f"{path} does not contain an adapter; leave base= and is_trainable= out")
    loaded, record = _load(path, kwargs)
    if record is not None:
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with loading info
        _patch(model, record)
        _load_learned(model, path, kwargs.get("variant"), where)
        state = not_none(current_patch(model))
        if not record.same(state.record):
            raise RecordError(
                f"{path} was saved under {record.call()} with {record.outcome()}; the same call "
                f"now gives {state.record.outcome()}: load the original model and patch it again"
            )
    return loaded


def _base_of(
    path: str, adapter: str, base: str | PathLike[str] | None, kwargs: dict[str, Any]
) -> Any:
    """Load the base model that ``adapter_config.json`` names, with the adapter's patch."""
    if kwargs.pop("output_loading_info", False):
        raise AdapterError(f"{path} is an adapter; leave output_loading_info= out")
    sidecar = require_sidecar(path, kwargs)
    cls, task, named, revision = read_base(adapter)
    for name in ("revision", "subfolder"):  # these locate the adapter
        kwargs.pop(name, None)
    if base is None:
        base = named
        if revision:
            kwargs["revision"] = revision
    if not base:
        raise AdapterError(f"the adapter in {path} does not name its base model; pass base=")
    folder, gguf = gguf_source.split(base)
    try:
        cls = cls or _TASKS.get(str(task), _CAUSAL)
        model, _ = _load(hub.require_place(folder), {**kwargs, **gguf}, cls)
    except LoadError as error:
        raise AdapterError(
            f"the base model {str(base)!r} of the adapter in {path} cannot be loaded: {error}; "
            f"or pass base="
        ) from error
    if sidecar.is_of(model):
        _patch(model, sidecar.record)
    return model


def _load(
    path: str, kwargs: dict[str, Any], class_name: str | None = None
) -> tuple[Any, Record | None]:
    """Load the unpatched model, as the saved class by default, and read its recorded patch."""
    config, gguf_file = copy.deepcopy(kwargs.get("config")), kwargs.get("gguf_file")
    given = isinstance(config, PreTrainedConfig)
    if not given:
        options = hub.of_hub(kwargs, "code_revision", "trust_remote_code")
        # Its rope_type may be one that plain transformers must refuse.
        with (
            configuration.quieted(logging.getLogger("transformers"), logging.ERROR),
            hub.loading("configuration", path),
        ):
            if gguf_file is None:
                config = AutoConfig.from_pretrained(config or path, **options)
            else:
                config = gguf_source.load_config(path, gguf_file, **options)
    found = getattr(config.get_text_config(decoder=True), FIELD, None)
    where = f"config.json of {path}"
    record = None if found is None else Record.from_json(found, where)
    if record is not None and record.plain:
        record = None  # already in force
    if record is not None:
        config = record.restored(config)  # before rotary modules are built from it
    if record is not None or gguf_file is not None:
        kwargs = {**kwargs, "config": config}
        changes = [] if given else [name for name in kwargs if _is_field(config, name)]
        for name in changes:
            setattr(config, name, kwargs.pop(name))
    elif kwargs.get("config") is not None and found is None:
        _require_no_record(path, kwargs)
    try:
        with hub.loading("weights", path), _expecting_learned(record):
            loaded = _class(config, path, class_name).from_pretrained(path, **kwargs)
    except LoadError as error:
        if CURE not in str(error.__cause__):
            raise
        raise RecordError(
            f"{where} belongs to a patched model, but its record is missing or does not restore "
            f"the original configuration; load the original model and patch it again"
        ) from error
    if gguf_file is not None:
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with loading info
        gguf_source.adopt(model, gguf_source.joined(path, gguf_file))
    return loaded, record


def _class(config: PreTrainedConfig, path: str, name: str | None) -> Any:
    """Return the saved class, or the one with this name; if unknown, a causal LM."""
    if name in (_CAUSAL, *_TASKS.values()):
        return getattr(transformers, name)
    names = [name] if name else config.architectures or [""]
    if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) for one in names):
        raise LoadError(
            f"config.json of {path} has architectures={names!r}; it must be a list of names"
        )
    cls: Any = getattr(transformers, names[0], None)
    is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
    if is_model and (name or cls.config_class is type(config)):
        return cls
    return getattr(transformers, _CAUSAL)  # for example, remote code


def _require_no_record(path: str, kwargs: dict[str, Any]) -> None:
    config = PreTrainedConfig.get_config_dict(path, **hub.of_hub(kwargs))[0]
    if any(FIELD in part for part in (config, *config.values()) if isinstance(part, dict)):
        raise RecordError(
            f"{path} was saved under a patch that config= does not record; leave config= out, or "
            f"modify the configuration that AutoConfig loads from {path}"
        )


def _is_field(config: PreTrainedConfig, name: str) -> bool:
    """Whether transformers would treat a loading argument as a change to the configuration."""
    if name in ("dtype", "torch_dtype", "quantization_config"):
        return False
    return hasattr(config, name) and not isinstance(getattr(config, name), PreTrainedConfig)


def _patch(model: Any, record: Record) -> None:
    with configuration.quieted(_logger, logging.ERROR):  # hides advice already followed
        patch(model, record.method, **record.arguments)


@contextmanager
def _expecting_learned(record: Record | None) -> Iterator[None]:
    """Keep transformers from reporting a patch's parameters as unexpected keys."""
    before = getattr(PreTrainedModel, _IGNORED)
    if record is not None:
        setattr(PreTrainedModel, _IGNORED, [*(before or ()), _LEARNED])
    try:
        yield
    finally:
        setattr(PreTrainedModel, _IGNORED, before)


def _load_learned(
    model: nn.Module, path: str, variant: str | None, where: Mapping[str, Any]
) -> None:
    """Load a patch's learned parameters, which transformers ignores."""
    # Names within the decoder: their prefix depends on the saved class, and transformers renames it
    # for some families.
    wanted = learned.learned(text_decoder(model))
    if not wanted:
        return
    missing = set(wanted)
    with hub.loading("weights", path), torch.no_grad():
        for key, value in _stored(path, variant, where):
            for name in (name for name in wanted if f".{key}".endswith(f".{name}")):
                wanted[name].copy_(value)
                missing.discard(name)
    for module in model.modules():
        if isinstance(module, learned.Learning):
            module.clamp()  # older versions stored values outside of their bounds
    if missing:
        raise LoadError(
            f"{path} does not contain {', '.join(sorted(missing))}, learned by its patch, in "
            f"safetensors; save the complete model again"
        )


def _stored(
    path: str, variant: str | None, where: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Load the tensors in a folder that may be learned parameters of a patch, by name."""
    before_ending = "" if variant is None else f".{variant}"
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    single, index = (re.sub(r"(\.\w+)$", rf"{before_ending}\1", name) for name in names)
    files, index = {single}, hub.find(path, index, **where)
    if index is not None:
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        files |= {file for key, file in shards.items() if "rope_ext_" in key}
    for file in filter(None, (hub.find(path, name, **where) for name in sorted(files))):
        with safe_open(file, "pt") as weights:
            names = [key for key in weights.keys() if "rope_ext_" in key]  # noqa: SIM118
            yield from ((key, weights.get_tensor(key)) for key in names)
