"""Load models and PEFT adapters together with the patch they were saved under."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,  # pyright: ignore[reportPrivateImportUsage] - documented, not in __all__
)

from rope_ext.errors import (
    CURE,
    AdapterError,
    LoadError,
    NotPatchedError,
    RecordError,
    RopeExtError,
    first_line,
    nowhere,
)
from rope_ext.patching import Patch, current_patch, patch
from rope_ext.position import bias, head_positions, head_scales, inputs
from rope_ext.position.bias import learned
from rope_ext.rotary.sites import RotarySite, find_sites, text_decoder
from rope_ext.saving import configuration, gguf_source
from rope_ext.saving.record import FIELD, Record

SIDECAR = "rope_ext.json"
"""File next to an adapter that records the patch it was trained under."""

_OF_HUB = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
_CAUSAL = "AutoModelForCausalLM"
# Class of an adapter's base model, by the task in its PEFT config; otherwise the one above.
_TASKS = {
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}
_AS_THEY_ARE = (RopeExtError, MemoryError, torch.OutOfMemoryError)
"""Errors that do not mean a damaged folder. All others do: on damaged files, transformers and peft
raise whatever their code runs into, from AttributeError to ZeroDivisionError."""
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
UNEXPECTED = rf"(^|\.)({bias.NAME}|{inputs.NAME}|{head_positions.NAME}|{head_scales.NAME})\."
"""Names of a patch's parameters, which transformers does not expect."""
_IGNORED = "_keys_to_ignore_on_load_unexpected"
_SAME_FREQUENCY = 1e-5  # float32 pow may differ between this device and the training device
_logger = logging.getLogger("rope_ext")


@dataclass(frozen=True)
class Sidecar:
    """The content of the file next to an adapter.

    Args:
        record: the patch under which the adapter was trained.
        before, after: frequencies (radians per token) and scaling of every rotary site without
            and with the patch, keyed by path and layer type.
    """

    record: Record
    before: Mapping[str, tuple[list[float], float]]
    after: Mapping[str, tuple[list[float], float]]

    @classmethod
    def from_patch(cls, state: Patch) -> Sidecar:
        return cls(state.record, _unpatched(state.sites), _patched(state))

    @classmethod
    def read(cls, path: str) -> Sidecar:
        """Read a sidecar file; raises RecordError if it cannot be read."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, RecursionError, ValueError) as error:
            raise RecordError(
                f"{path} is not JSON ({error}); write it again from the patched model with "
                f"rope_ext.save_sidecar"
            ) from error
        record = Record.from_json(data, path)
        try:
            parts = (
                {k: _read_values(v["inv_freq"], v["attention_scaling"]) for k, v in part}
                for part in (data["before"].items(), data["after"].items())
            )
            return cls(record, *parts)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecordError(
                f"{path} does not contain the frequencies the adapter was trained with "
                f"({error!r}); write it again from the patched model with rope_ext.save_sidecar"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """JSON-serializable values."""
        parts = {"before": self.before, "after": self.after}
        return self.record.to_json() | {
            name: {k: {"inv_freq": v[0], "attention_scaling": v[1]} for k, v in part.items()}
            for name, part in parts.items()
        }

    def is_of(self, model: nn.Module) -> bool:
        """Whether the unpatched ``model`` has the same frequencies as the adapter's base."""
        return _same(_unpatched(_sites(model)), self.before)

    def fault(self, model: nn.Module) -> str | None:
        """Why the adapter does not fit ``model``, as text; None if it fits."""
        state = current_patch(model)
        if state is None and self.record.plain and _same(_unpatched(_sites(model)), self.after):
            return None  # saved under this patch, which is in its configuration
        if not self.is_of(model):
            return "has different rotary frequencies than the base model it was trained on"
        if state is None:
            return "is not patched"
        if state.length != self.record.trained_length:
            return (
                f"has a trained length of {state.length} tokens instead of "
                f"{self.record.trained_length}"
            )
        if not self.record.same(state.record):
            return f"is patched by {state.record.call()}"
        if not _same(_patched(state), self.after):
            return "gets different frequencies from the same call in this version of rope_ext"
        return None


def save_sidecar(model: nn.Module, directory: str | PathLike[str]) -> Path:
    """Write the patch of ``model`` to ``rope_ext.json`` in ``directory``.

    PEFT does not save the patch, and an adapter on an unpatched base model generates garbage.
    Call this wherever you save the adapter, in the main process only; :func:`load_adapter` and
    :func:`from_pretrained` read the file.

    Args:
        model: a patched model or ``PeftModel``.
        directory: the adapter's directory; created if needed.

    Returns:
        The path of the file.

    Raises:
        NotPatchedError: the model is not patched.
        AdapterError: the directory is not writable.
    """
    state = current_patch(model)
    if state is None:
        raise NotPatchedError(
            f"this model is not patched, so there is no patch to write into {directory}; call "
            f"rope_ext.patch(model, ...) before training. An adapter of an unpatched model needs "
            f"no {SIDECAR}"
        )
    path = Path(directory) / SIDECAR
    text = json.dumps(Sidecar.from_patch(state).to_json(), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AdapterError(
            f"cannot write {path} ({error.strerror}); choose a writable directory"
        ) from error
    return path


def load_adapter(model: nn.Module, directory: str | PathLike[str], **kwargs: Any) -> Any:
    """Load a PEFT adapter onto ``model``, which must have the patch it was trained under.

    Args:
        model: a loaded model with the patch recorded in ``rope_ext.json``.
        directory: directory or Hub ID of the adapter.
        **kwargs: arguments of ``PeftModel.from_pretrained``, such as ``is_trainable=True``.

    Returns:
        The ``PeftModel``.

    Raises:
        AdapterError: the model is not patched, has another patch or is a different model; there
            is no ``rope_ext.json``; other files cannot be read; or peft is not installed. The
            model is left unchanged.
        LoadError: the directory does not exist.
        RecordError: ``rope_ext.json`` cannot be read.
    """
    peft = _peft()
    directory = require_place(directory)
    sidecar = read_sidecar(directory, **kwargs)
    if sidecar is None:
        raise AdapterError(_without_sidecar(directory, kwargs))
    if isinstance(model, peft.PeftModel):
        raise AdapterError(
            "the model already has an adapter; pass the model you gave to rope_ext.patch, or add "
            "this adapter with PEFT's model.load_adapter"
        )
    _require(sidecar, model, directory)
    of_hub = {name: kwargs[name] for name in _OF_HUB if name in kwargs}
    _require_weights(directory, of_hub)
    try:
        with _untouched_on_error(model):
            return peft.PeftModel.from_pretrained(model, directory, **kwargs)
    except _AS_THEY_ARE:
        raise
    except Exception as error:
        raise AdapterError(
            f"the adapter in {directory} cannot be loaded onto this model ({_reason(error)}); save "
            f"it again with PeftModel.save_pretrained"
        ) from error


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
        base: base model of the adapter, if not the one named in ``adapter_config.json``.
        is_trainable: whether to continue training the adapter.
        **kwargs: arguments of ``from_pretrained`` of the saved class: ``dtype``, ``device_map``,
            ...; pass changes to the configuration as ``config``.

    Returns:
        The model in evaluation mode, with the same logits as the saved one. Patches that the
        configuration describes in full are loaded by plain transformers.

    Raises:
        AdapterError: the adapter has no ``rope_ext.json``, its base model is unknown or does not
            fit, or peft is not installed.
        LoadError: the directory does not exist or contains no loadable model.
        RecordError: the saved patch cannot be read or applied.
    """
    folder, gguf = gguf_source.split(path) if "gguf_file" not in kwargs else (path, {})
    path, kwargs = require_place(folder), {**kwargs, **gguf}
    of_hub = {name: kwargs[name] for name in _OF_HUB if name in kwargs}
    adapter = None
    if kwargs.get("gguf_file") is None:
        adapter = _find(path, "adapter_config.json", connection_errors=False, **of_hub)
    if adapter is not None:
        _peft()
        model = _base_of(path, adapter, base, kwargs)
        return load_adapter(model, path, is_trainable=is_trainable, **of_hub)
    if base is not None or is_trainable:
        raise AdapterError(
            f"{path} does not contain an adapter (no adapter_config.json), so base= and "
            f"is_trainable= have no effect; leave them out"
        )
    loaded, record = _load(path, kwargs)
    if record is not None:
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with loading info
        _repatch(model, record, path, {**of_hub, "variant": kwargs.get("variant")})
    return loaded


def _repatch(model: Any, record: Record, path: str, options: dict[str, Any]) -> None:
    here = _patch(model, record).record
    _restore_learned(model, path, options)
    if not record.same(here):
        raise RecordError(
            f"{path} was saved under {record.call()} with {record.outcome()}, but the same "
            f"call now gives {here.outcome()}; load the original model and call "
            f"rope_ext.patch with these options"
        )


def _base_of(
    path: str, adapter: str, base: str | PathLike[str] | None, kwargs: dict[str, Any]
) -> Any:
    """The base model of the adapter in ``path``, with the patch recorded next to it.

    ``adapter`` is the path of its ``adapter_config.json``.
    """
    if kwargs.pop("output_loading_info", False):
        raise AdapterError(
            f"{path} is an adapter, and output_loading_info= applies to whole models only; leave "
            f"it out"
        )
    sidecar = read_sidecar(path, **kwargs)
    if sidecar is None:
        raise AdapterError(_without_sidecar(path, kwargs))
    named = _adapter_config(adapter)
    for name in ("revision", "subfolder"):  # of the adapter
        kwargs.pop(name, None)
    if base is None:
        base = named.get("base_model_name_or_path")
        if named.get("revision"):
            kwargs["revision"] = named["revision"]
    if not base:
        raise AdapterError(f"the adapter in {path} does not name its base model; pass base=")
    folder, gguf = gguf_source.split(base)
    try:
        model, _ = _load(require_place(folder), {**kwargs, **gguf}, _class_name(named))
    except LoadError as error:
        raise AdapterError(
            f"the base model {str(base)!r} of the adapter in {path} cannot be loaded: {error}; "
            f"or pass another one as base="
        ) from error
    if sidecar.is_of(model):
        _patch(model, sidecar.record)
    return model


def read_sidecar(directory: str, **kwargs: Any) -> Sidecar | None:
    """The sidecar of a directory or Hub repository; None if there is none.

    Raises:
        LoadError: the directory does not exist.
        RecordError: the sidecar cannot be read.
    """
    of_hub = {name: kwargs[name] for name in _OF_HUB if name in kwargs}
    path = _find(require_place(directory), SIDECAR, **of_hub)
    return None if path is None else Sidecar.read(path)


def require_place(path: str | PathLike[str]) -> str:
    """Return ``path`` as a string if it is a directory or may be a Hub ID.

    Raises:
        LoadError: it is neither.
    """
    if not isinstance(path, (str, PathLike)):
        raise LoadError(f"{path!r} is not a path; pass a directory, or a Hub ID")
    name = str(path)
    fault = fault_of_place(name)
    if fault is not None:
        raise LoadError(
            f"there is no folder {name!r} to load from ({fault}); give a folder that "
            f"save_pretrained wrote, or a Hub ID"
        )
    return name


def fault_of_place(name: str) -> str | None:
    """Why ``name`` is neither a directory nor a possible Hub ID, as text; None if it is one."""
    if os.path.isdir(name):
        return None
    if os.path.exists(name):
        return "it is a file, not a folder"
    try:
        validate_repo_id(name)
    except HFValidationError:
        return "the directory does not exist, and it is not a valid Hub ID"
    return None


@contextmanager
def _loading(what: str, path: str) -> Iterator[None]:
    """Turn errors raised by transformers into a LoadError."""
    try:
        yield
    except _AS_THEY_ARE:
        raise
    except ImportError as error:  # such as the kernels of an attention implementation
        raise LoadError(
            f"cannot load the {what} of {path!r}, which needs a package that is not installed "
            f"({_reason(error)}); install it, or if it is for attention only, pass "
            f"attn_implementation='sdpa'"
        ) from error
    except Exception as error:
        reason = _index_fault(path) or _reason(error)
        raise LoadError(
            f"cannot load the {what} of {path!r} ({reason}){nowhere(path)}; give a folder that "
            f"save_pretrained wrote, or a Hub ID"
        ) from error


def _index_fault(path: str) -> str | None:
    """What is wrong with the index of sharded weights in a folder; None: nothing, or no index."""
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        file = Path(path, name)
        if not file.is_file():
            continue
        try:
            index = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, RecursionError, ValueError) as error:
            return f"{name} is not JSON: {first_line(error)}"
        shards = index.get("weight_map") if isinstance(index, dict) else None
        named = isinstance(shards, dict) and all(isinstance(f, str) for f in shards.values())
        if not named or not shards:
            return f"{name} has weight_map={shards!r}; it must map weights to files of this folder"
        if not isinstance(index.get("metadata"), dict):
            return f"{name} has metadata={index.get('metadata')!r}; it must be an object"
    return None


def _reason(error: Exception) -> str:
    """The first line of an error, with its class where that line alone may not say much."""
    if isinstance(error, (ImportError, OSError, RuntimeError, ValueError)):
        return first_line(error)
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def _untouched_on_error(model: nn.Module) -> Iterator[None]:
    """Undo the changes of a partially loaded adapter if loading fails."""
    modules = [(m, dict(m._modules), dict(m.__dict__)) for m in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, children, attributes in modules:
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]
            module._modules.clear()
            module._modules.update(children)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        raise


def _require_weights(directory: str, of_hub: Mapping[str, Any]) -> None:
    """Raise AdapterError unless the adapter's weights exist and are complete."""
    found = [_find(directory, name, **of_hub) for name in _WEIGHTS]
    cure = "save it again with PeftModel.save_pretrained"
    if not any(found):
        raise AdapterError(f"the adapter in {directory} has no {_WEIGHTS[0]}; {cure}")
    if found[0] is not None:
        try:
            with safe_open(found[0], "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{found[0]} is damaged ({first_line(error)}); {cure}") from error


def _adapter_config(path: str) -> dict[str, Any]:
    """Read ``adapter_config.json`` and check the types of the fields used here.

    Raises:
        AdapterError: it cannot be read.
    """
    try:
        named = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(named, dict):
            raise ValueError("it is not a JSON object")
        mapping = named.get("auto_mapping") or {}
        if not isinstance(mapping, dict):
            raise ValueError(f"auto_mapping={mapping!r}")
        of_base = {"auto_mapping.base_model_class": mapping.get("base_model_class")}
        for name in ("base_model_name_or_path", "revision", "task_type"):
            of_base[name] = named.get(name)
        for name, value in of_base.items():
            if not isinstance(value, (str, type(None))):
                raise ValueError(f"{name}={value!r}")
    except (OSError, RecursionError, ValueError) as error:
        raise AdapterError(
            f"{path} cannot be read ({first_line(error)}); save the adapter again with "
            f"PeftModel.save_pretrained"
        ) from error
    return named


def _find(path: str, name: str, connection_errors: bool = True, **of_hub: Any) -> str | None:
    """Path of a file in a directory or Hub repository; None if there is no such file.

    The ``find_adapter_config_file`` of transformers 5.17 ignores ``subfolder`` in a folder.
    """
    return cached_file(
        path,
        name,
        **of_hub,
        _raise_exceptions_for_gated_repo=connection_errors,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=connection_errors,
    )


def _class_name(adapter: Mapping[str, Any]) -> str:
    """Class of an adapter's base model, from ``adapter_config.json``."""
    mapping = adapter.get("auto_mapping") or {}  # there if no task was named
    return mapping.get("base_model_class") or _TASKS.get(str(adapter.get("task_type")), _CAUSAL)


def _load(
    path: str, kwargs: dict[str, Any], class_name: str | None = None
) -> tuple[Any, Record | None]:
    """The unpatched model, and the patch recorded in its configuration, if any.

    ``class_name`` names a class of transformers; None uses the class that was saved.
    """
    config, gguf_file = copy.deepcopy(kwargs.get("config")), kwargs.get("gguf_file")
    given = isinstance(config, PreTrainedConfig)
    if not given:
        names = (*_OF_HUB, "code_revision", "trust_remote_code")
        options = {name: kwargs[name] for name in names if name in kwargs}
        # Its rope_type may be one that plain transformers must refuse.
        with (
            configuration.quieted(logging.getLogger("transformers"), logging.ERROR),
            _loading("configuration", path),
        ):
            if gguf_file is None:
                config = AutoConfig.from_pretrained(config or path, **options)
            else:
                config = gguf_source.load_config(path, gguf_file, **options)
    text = config.get_text_config(decoder=True)
    where = f"config.json of {path}"
    record = None
    if getattr(text, FIELD, None) is not None:
        record = Record.from_json(getattr(text, FIELD), where)
    if record is not None and record.plain:
        record = None  # it is in force
    if record is not None:
        record.restore(config)  # before the rotary modules are built from it
    if record is not None or gguf_file is not None:
        kwargs = {**kwargs, "config": config}
        changes = [] if given else [name for name in kwargs if _is_field(config, name)]
        for name in changes:
            setattr(config, name, kwargs.pop(name))
    elif kwargs.get("config") is not None and getattr(text, FIELD, None) is None:
        _require_no_record(path, kwargs)
    cls: Any = getattr(transformers, class_name or _architecture(config, path), None)
    of_task = class_name in (_CAUSAL, *_TASKS.values())
    is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
    if not of_task and not (is_model and (class_name or cls.config_class is type(config))):
        cls = getattr(transformers, _CAUSAL)  # such as where the modeling code is on the Hub
    try:
        with _loading("weights", path), _expecting_learned(cls, record):
            loaded = cls.from_pretrained(path, **kwargs)
    except LoadError as error:
        if CURE not in str(error.__cause__):
            raise
        raise RecordError(
            f"{where} belongs to a patched model, but its record of the patch is missing or does "
            f"not restore the original configuration; load the original model and patch it again"
        ) from error
    if gguf_file is not None:
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        gguf_source.adopt(model, gguf_source.joined(path, gguf_file))
    elif record is None and kwargs.get("config") is None:
        _restore_older(loaded, path, kwargs)
    return loaded, record


def _restore_older(loaded: Any, path: str, kwargs: Mapping[str, Any]) -> None:
    """Keep the fields for older readers, so that saving the model again writes them again."""
    saved = _config_json(path, kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # with loading info
    configuration.restore_older(saved, model.config)


def _config_json(path: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The saved configuration as it is written."""
    options = {name: kwargs[name] for name in _OF_HUB if name in kwargs}
    return PreTrainedConfig.get_config_dict(path, **options)[0]


def _architecture(config: PreTrainedConfig, path: str) -> str:
    """Name of the saved class; empty if the configuration does not name one.

    Raises:
        LoadError: ``architectures`` is malformed.
    """
    names = config.architectures or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise LoadError(
            f"config.json of {path} has architectures={names!r}; it must be a list of class "
            f'names, such as ["LlamaForCausalLM"]'
        )
    return names[0] if names else ""


def _restore_learned(model: nn.Module, path: str, options: dict[str, Any]) -> None:
    """Load a patch's learned parameters, which transformers ignores.

    Raises:
        LoadError: the directory does not contain them.
    """
    wanted = learned(model)
    if not wanted:
        return
    variant = options.pop("variant")
    prefix = f"{getattr(model, 'base_model_prefix', '')}."  # of other classes of the same model
    names = {x: n for n in wanted for x in (n.removeprefix(prefix), f"{prefix}{n}")}
    names |= {name: name for name in wanted}
    files = {_variant(name, variant) for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME)}
    with _loading("weights", path):
        for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
            index = _find(path, _variant(name, variant), **options)
            if index is not None:
                shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
                files |= {shards[key] for key in names if key in shards}
        for found in (_find(path, name, **options) for name in sorted(files)):
            for key, value in () if found is None else _stored(found, names):
                with torch.no_grad():
                    wanted.pop(names[key]).copy_(value)
    for module in model.modules():
        if isinstance(module, bias.Learning):
            module.clamp()  # older versions stored values outside of their bounds
    if wanted:
        raise LoadError(
            f"{path} does not contain {', '.join(sorted(wanted))}, the learned parameters of its "
            f"patch; save the complete model again"
        )


def _stored(file: str, names: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors with the given names in a file of weights."""
    if file.endswith(".safetensors"):
        with safe_open(file, "pt") as weights:
            yield from ((key, weights.get_tensor(key)) for key in set(names) & set(weights.keys()))
    else:
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        yield from ((key, weights[key]) for key in set(names) & set(weights))


def _variant(name: str, variant: str | None) -> str:
    """File name of weights for a ``variant``, as transformers builds it."""
    stem, dot, rest = name.partition(".")
    return name if variant is None else f"{stem}{dot}{variant}.{rest}"


@contextmanager
def _expecting_learned(cls: type, record: Record | None) -> Iterator[None]:
    """Keep transformers from reporting a patch's parameters as unexpected keys."""
    if record is None or not record.has_parameters or not hasattr(cls, _IGNORED):
        yield
        return
    before = getattr(cls, _IGNORED)
    setattr(cls, _IGNORED, [*(before or ()), UNEXPECTED])
    try:
        yield
    finally:
        setattr(cls, _IGNORED, before)


def _require_no_record(path: str, kwargs: dict[str, Any]) -> None:
    """Raise RecordError if a configuration passed by the user would hide a record."""
    config = _config_json(path, kwargs)
    texts = [config, *(part for part in config.values() if isinstance(part, dict))]
    if any(FIELD in part for part in texts):
        raise RecordError(
            f"{path} was saved under a patch that its config.json records and config= does not; "
            f"leave config= out, or modify the configuration that AutoConfig loads from {path}"
        )


def _is_field(config: PreTrainedConfig, name: str) -> bool:
    """Whether transformers treats a loading argument as a change to the configuration."""
    if name in ("dtype", "torch_dtype", "quantization_config"):
        return False
    return hasattr(config, name) and not isinstance(getattr(config, name), PreTrainedConfig)


def _patch(model: Any, record: Record) -> Patch:
    with configuration.quieted(_logger, logging.ERROR):  # the user calls the function it asks for
        patch(model, record.method, **record.arguments)
    state = current_patch(model)
    assert state is not None
    return state


def _require(sidecar: Sidecar, model: nn.Module, directory: str) -> None:
    fault = sidecar.fault(model)
    if fault is None:
        return
    call = sidecar.record.call(*([] if current_patch(model) is None else ["replace=True"]))
    raise AdapterError(
        f"the adapter in {directory} was trained under {sidecar.record.call()}, and this model "
        f"{fault}; call {call} on the base model named in its adapter_config.json, or load both "
        f"with rope_ext.from_pretrained({directory!r})"
    )


def _without_sidecar(path: str, kwargs: Mapping[str, Any]) -> str:
    directory = str(Path(path, kwargs.get("subfolder", "")))
    return (
        f"the adapter in {directory} has no {SIDECAR}, so the patch it was trained under is "
        f"unknown; if there was none, load it with peft.PeftModel.from_pretrained; otherwise patch "
        f"the base as in training and call rope_ext.save_sidecar(model, {directory!r}) once"
    )


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise AdapterError(
            'an adapter needs peft, which is not installed; install it with: pip install "peft"'
        ) from None
    return peft


def _key(site: RotarySite) -> str:
    return site.name if site.layer_type is None else f"{site.name}:{site.layer_type}"


def _values(inv_freq: torch.Tensor, scaling: float) -> tuple[list[float], float]:
    return inv_freq.tolist(), float(scaling)


def _read_values(inv_freq: Any, scaling: Any) -> tuple[list[float], float]:
    values = [*inv_freq, scaling]
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in values):
        raise ValueError("frequencies that are not numbers")
    return [float(x) for x in inv_freq], float(scaling)


def _sites(model: nn.Module) -> list[RotarySite]:
    state = current_patch(model)
    return find_sites(text_decoder(model)) if state is None else state.sites


def _patched(state: Patch) -> dict[str, tuple[list[float], float]]:
    return {_key(site): _values(*state.frequencies_of(site)) for site in state.sites}


def _unpatched(sites: list[RotarySite]) -> dict[str, tuple[list[float], float]]:
    return {_key(site): _values(site.loaded, site.scaling) for site in sites}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    for key, (inv_freq, scaling) in one.items():
        pair = [
            torch.tensor([*values, by], device="cpu")
            for values, by in ((inv_freq, scaling), other[key])
        ]
        same = pair[0].shape == pair[1].shape
        if not same or not torch.allclose(*pair, rtol=_SAME_FREQUENCY, atol=1e-25):
            return False
    return True
