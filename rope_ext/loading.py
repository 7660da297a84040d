"""Brings back models and PEFT adapters with the patch under which they were saved."""

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
    AdapterError,
    LoadError,
    NotPatchedError,
    RecordError,
    RopeExtError,
    first_line,
)
from rope_ext.patching import Patch, current_patch, patch
from rope_ext.position import bias, inputs
from rope_ext.position.bias import learned
from rope_ext.record import FIELD, Record
from rope_ext.rotary.sites import RotarySite, find_sites, text_decoder
from rope_ext.saving import configuration
from rope_ext.saving.second_load import fresh

SIDECAR = "rope_ext.json"
"""File beside an adapter that holds the patch under which it was trained."""

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
# Of an adapter's base, by peft's name of its task; else the one above.
_TASKS = {
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}
_AS_THEY_ARE = (RopeExtError, MemoryError, torch.OutOfMemoryError)
"""Errors that say nothing about a folder. All others do: damaged files make transformers and peft
raise whatever their code runs into, from AttributeError to ZeroDivisionError."""
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_IGNORED = "_keys_to_ignore_on_load_unexpected"
_SAME_FREQUENCY = 1e-5  # powers in float32, here and on the device of training
_logger = logging.getLogger("rope_ext")


@dataclass(frozen=True)
class Sidecar:
    """What lies beside an adapter.

    Args:
        record: the patch under which the adapter was trained.
        before, after: frequencies (radians per token) and scaling of every rotary site without
            and with the patch, by its path and layer type.
    """

    record: Record
    before: Mapping[str, tuple[list[float], float]]
    after: Mapping[str, tuple[list[float], float]]

    @classmethod
    def from_patch(cls, state: Patch) -> Sidecar:
        return cls(state.record, _unpatched(state.sites), _patched(state))

    @classmethod
    def read(cls, path: str) -> Sidecar:
        """Raises RecordError: it cannot be read."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, RecursionError, ValueError) as error:
            raise RecordError(
                f"{path} is not JSON ({error}); write it again with rope_ext.save_sidecar, the "
                f"patched model in hand"
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
                f"{path} does not say which frequencies the adapter was trained with ({error!r}); "
                f"write it again with rope_ext.save_sidecar, the patched model in hand"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        parts = {"before": self.before, "after": self.after}
        return self.record.to_json() | {
            name: {k: {"inv_freq": v[0], "attention_scaling": v[1]} for k, v in part.items()}
            for name, part in parts.items()
        }

    def is_of(self, model: nn.Module) -> bool:
        """Whether ``model`` without any patch has the frequencies of the adapter's base."""
        return _same(_unpatched(_sites(model)), self.before)

    def fault(self, model: nn.Module) -> str | None:
        """What is wrong with ``model`` for the adapter, in words; None if nothing is."""
        state = current_patch(model)
        if state is None and self.record.plain and _same(_unpatched(_sites(model)), self.after):
            return None  # saved under this patch, which is in its configuration
        if not self.is_of(model):
            return "has other rotary frequencies by itself than the one it was trained on"
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
            return "gets other frequencies by the same call in this version of rope_ext"
        return None


def save_sidecar(model: nn.Module, directory: str | PathLike[str]) -> Path:
    """Write the patch of ``model`` as ``rope_ext.json`` into ``directory``.

    PEFT saves an adapter without it, and on a base without the patch an adapter says nonsense.
    Call it wherever the adapter is saved, in the first process only; :func:`load_adapter` and
    :func:`from_pretrained` read it.

    Args:
        model: patched; a ``PeftModel`` as well.
        directory: folder of the adapter, made if it is not there.

    Returns:
        The path of the file.

    Raises:
        NotPatchedError: there is no patch.
        AdapterError: the folder cannot be written to.
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
            f"cannot write {path} ({error.strerror}); give a folder that can be written to"
        ) from error
    return path


def load_adapter(model: nn.Module, directory: str | PathLike[str], **kwargs: Any) -> Any:
    """Put a PEFT adapter on ``model``, which must carry the patch it was trained under.

    Args:
        model: a loaded model with the patch that ``rope_ext.json`` tells.
        directory: folder or Hub id of the adapter.
        **kwargs: of ``PeftModel.from_pretrained``, such as ``is_trainable=True``.

    Returns:
        The ``PeftModel``.

    Raises:
        AdapterError: the model is not patched, patched otherwise or another one, there is no
            ``rope_ext.json``, its other files cannot be read, or peft is not installed. The model
            is then as before.
        LoadError: there is no such folder.
        RecordError: ``rope_ext.json`` cannot be read.
    """
    peft = _peft()
    directory = require_place(directory)
    sidecar = read_sidecar(directory, **kwargs)
    if sidecar is None:
        raise AdapterError(_without_sidecar(directory, kwargs))
    if isinstance(model, peft.PeftModel):
        raise AdapterError(
            "the model carries an adapter already; pass the model that rope_ext.patch was given, "
            "or add this one with peft's own model.load_adapter"
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
            f"the adapter in {directory} cannot be put on this model ({_reason(error)}); save it "
            f"again with PeftModel.save_pretrained"
        ) from error


def from_pretrained(
    path: str | PathLike[str],
    *,
    base: str | PathLike[str] | None = None,
    is_trainable: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a model, or an adapter on its base, with the patch under which it was saved.

    Args:
        path: folder or Hub id of a model that was saved under any patch, or of a PEFT adapter
            with ``rope_ext.json`` beside it, such as a trainer's checkpoint.
        base: of an adapter, if not the model that its ``adapter_config.json`` names.
        is_trainable: whether the adapter can be trained on.
        **kwargs: of ``from_pretrained`` of the class that was saved: ``dtype``, ``device_map``,
            ...; changes of the configuration as a ``config``.

    Returns:
        The model in evaluation mode, whose logits are those of the one that was saved. Patches
        that the configuration describes in full come back as plain transformers loads them.

    Raises:
        AdapterError: the adapter has no ``rope_ext.json``, its base is not known or another one,
            or peft is not installed.
        LoadError: there is no such folder, or no model in it that can be loaded.
        RecordError: what was saved of the patch cannot be read or followed.
    """
    path = require_place(path)
    of_hub = {name: kwargs[name] for name in _OF_HUB if name in kwargs}
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
        here = _patch(model, record).record
        _restore_learned(model, path, {**of_hub, "variant": kwargs.get("variant")})
        if not record.same(here):
            raise RecordError(
                f"{path} was saved under {record.call()} with {record.outcome()}, but the same "
                f"call now gives {here.outcome()}; load the original model and call "
                f"rope_ext.patch with these options"
            )
    return loaded


def _base_of(
    path: str, adapter: str, base: str | PathLike[str] | None, kwargs: dict[str, Any]
) -> Any:
    """The base model of the adapter in ``path``, with the patch that lies beside it.

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
    try:
        model, _ = _load(require_place(base), kwargs, _class_name(named))
    except LoadError as error:
        raise AdapterError(
            f"the base model {str(base)!r} of the adapter in {path} cannot be loaded: {error}; "
            f"or pass base= such a one"
        ) from error
    if sidecar.is_of(model):
        _patch(model, sidecar.record)
    return model


def read_sidecar(directory: str, **kwargs: Any) -> Sidecar | None:
    """The sidecar in a folder or Hub repository; None if there is none.

    Raises:
        LoadError: there is no such folder.
        RecordError: it cannot be read.
    """
    of_hub = {name: kwargs[name] for name in _OF_HUB if name in kwargs}
    path = _find(require_place(directory), SIDECAR, **of_hub)
    return None if path is None else Sidecar.read(path)


def require_place(path: str | PathLike[str]) -> str:
    """``path`` as a string, which is a folder or may be a Hub id.

    Raises:
        LoadError: it is neither.
    """
    if not isinstance(path, (str, PathLike)):
        raise LoadError(f"{path!r} is no folder; give the path of one, or an id of the Hub")
    name = fresh(str(path))  # what was saved decides here, not the model that names it
    fault = fault_of_place(name)
    if fault is not None:
        raise LoadError(
            f"there is no folder {name!r} to load from ({fault}); give a folder that "
            f"save_pretrained wrote, or an id of the Hugging Face Hub"
        )
    return name


def fault_of_place(name: str) -> str | None:
    """Why ``name`` is no folder and cannot be a Hub id, in words; None if it is or can be."""
    if os.path.isdir(name):
        return None
    if os.path.exists(name):
        return "it is a file, not a folder"
    try:
        validate_repo_id(name)
    except HFValidationError:
        return "there is no such folder, and no model of the Hub is named so"
    return None


@contextmanager
def _loading(what: str, path: str) -> Iterator[None]:
    """Raises LoadError for what transformers raises."""
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
        nowhere = "" if Path(path).is_dir() else ", and there is no folder of that name"
        reason = _index_fault(path) or _reason(error)
        raise LoadError(
            f"cannot load the {what} of {path!r} ({reason}){nowhere}; give a folder that "
            f"save_pretrained wrote, or an id of the Hugging Face Hub"
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
    """Takes back what an adapter, put on only in part, has changed in ``model``."""
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
    """Raise AdapterError unless an adapter's weights are there and whole."""
    found = [_find(directory, name, **of_hub) for name in _WEIGHTS]
    cure = "save it again with PeftModel.save_pretrained"
    if not any(found):
        raise AdapterError(f"the adapter in {directory} has no {_WEIGHTS[0]}; {cure}")
    if found[0] is not None:
        try:
            with safe_open(found[0], "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{found[0]} is not whole ({first_line(error)}); {cure}") from error


def _adapter_config(path: str) -> dict[str, Any]:
    """``adapter_config.json``, the parts that are read here being of their kinds.

    Raises:
        AdapterError: it cannot be read.
    """
    try:
        named = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(named, dict):
            raise ValueError("it holds no object")
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
    """A file of a folder or Hub repository; None if it has none of that name.

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
    """The class of an adapter's base, by ``adapter_config.json``."""
    mapping = adapter.get("auto_mapping") or {}  # there if no task was named
    return mapping.get("base_model_class") or _TASKS.get(str(adapter.get("task_type")), _CAUSAL)


def _load(
    path: str, kwargs: dict[str, Any], class_name: str | None = None
) -> tuple[Any, Record | None]:
    """The unpatched model, and the patch it was saved under if its configuration tells one.

    ``class_name`` is that of its class in transformers; None: of the one that was saved.
    """
    config = copy.deepcopy(kwargs.get("config"))
    given = isinstance(config, PreTrainedConfig)
    if not given:
        names = (*_OF_HUB, "code_revision", "trust_remote_code")
        options = {name: kwargs[name] for name in names if name in kwargs}
        # It may hold a rope_type that is there to be refused by plain transformers.
        with (
            configuration.quieted(logging.getLogger("transformers"), logging.ERROR),
            _loading("configuration", path),
        ):
            config = AutoConfig.from_pretrained(config or path, **options)
    text = config.get_text_config(decoder=True)
    where = f"config.json of {path}"
    record = None
    if getattr(text, FIELD, None) is not None:
        record = Record.from_json(getattr(text, FIELD), where)
    if record is not None and not record.plain:  # else it is in force
        record.restore(config)  # before the rotary modules are built from it
        kwargs = {**kwargs, "config": config}
        changes = [] if given else [name for name in kwargs if _is_field(config, name)]
        for name in changes:
            setattr(config, name, kwargs.pop(name))
    else:
        if record is None and kwargs.get("config") is not None:
            _require_no_record(path, kwargs)
        record = None
    cls: Any = getattr(transformers, class_name or _architecture(config, path), None)
    of_task = class_name in (_CAUSAL, *_TASKS.values())
    is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
    if not of_task and not (is_model and (class_name or cls.config_class is type(config))):
        cls = getattr(transformers, _CAUSAL)  # such as where the modeling code is on the Hub
    try:
        with _loading("weights", path), _expecting_learned(cls, record):
            return cls.from_pretrained(path, **kwargs), record
    except LoadError as error:
        if configuration.CURE not in str(error.__cause__):
            raise
        raise RecordError(
            f"{where} is that of a patched model, but it has no record of the patch, or one that "
            f"does not lead back to before it; load the model that it was made from, and patch that"
        ) from error


def _architecture(config: PreTrainedConfig, path: str) -> str:
    """The class that was saved; empty if the configuration does not name one.

    Raises:
        LoadError: what it names is no class.
    """
    names = config.architectures or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise LoadError(
            f"config.json of {path} has architectures={names!r}; it must be a list of names of "
            f'classes, such as ["LlamaForCausalLM"]'
        )
    return names[0] if names else ""


def _restore_learned(model: nn.Module, path: str, options: dict[str, Any]) -> None:
    """Give what an encoding has learned its values, which transformers' loading leaves out.

    Raises:
        LoadError: the folder does not have them.
    """
    wanted = learned(model)
    if not wanted:
        return
    variant = options.pop("variant")
    files = {_variant(name, variant) for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME)}
    with _loading("weights", path):
        for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
            index = _find(path, _variant(name, variant), **options)
            if index is not None:
                shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
                files |= {shards[key] for key in wanted if key in shards}
        for found in (_find(path, name, **options) for name in sorted(files)):
            for key, value in () if found is None else _stored(found, wanted):
                with torch.no_grad():
                    wanted.pop(key).copy_(value)
    for module in model.modules():
        if isinstance(module, bias.Learning):
            module.clamp()  # older versions stored values outside of their bounds
    if wanted:
        raise LoadError(
            f"{path} has no {', '.join(sorted(wanted))}, which its encoding has learned; save the "
            f"model again, all of it"
        )


def _stored(file: str, names: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the tensors in a file of weights that are named so."""
    if file.endswith(".safetensors"):
        with safe_open(file, "pt") as weights:
            yield from ((key, weights.get_tensor(key)) for key in set(names) & set(weights.keys()))
    else:
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        yield from ((key, weights[key]) for key in set(names) & set(weights))


def _variant(name: str, variant: str | None) -> str:
    """The name of a file of weights, as transformers makes it for a ``variant``."""
    stem, dot, rest = name.partition(".")
    return name if variant is None else f"{stem}{dot}{variant}.{rest}"


@contextmanager
def _expecting_learned(cls: type, record: Record | None) -> Iterator[None]:
    """Keeps transformers from reporting what an encoding has learned as unexpected."""
    if record is None or record.encoding is None or not hasattr(cls, _IGNORED):
        yield
        return
    before = getattr(cls, _IGNORED)
    setattr(cls, _IGNORED, [*(before or ()), rf"(^|\.)({bias.NAME}|{inputs.NAME})\."])
    try:
        yield
    finally:
        setattr(cls, _IGNORED, before)


def _require_no_record(path: str, kwargs: dict[str, Any]) -> None:
    """Raise RecordError where a configuration of the user's would hide a record."""
    options = {name: kwargs[name] for name in _OF_HUB if name in kwargs}
    config, _ = PreTrainedConfig.get_config_dict(path, **options)
    texts = [config, *(part for part in config.values() if isinstance(part, dict))]
    if any(FIELD in part for part in texts):
        raise RecordError(
            f"{path} was saved under a patch, which its own config.json records and config= does "
            f"not; leave config= out, or change the configuration that AutoConfig reads from {path}"
        )


def _is_field(config: PreTrainedConfig, name: str) -> bool:
    """Whether transformers takes an option of loading for a change of the configuration."""
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
        f"{fault}; call {call} on the base model that its adapter_config.json names, or let "
        f"rope_ext.from_pretrained({directory!r}) do all of it"
    )


def _without_sidecar(path: str, kwargs: Mapping[str, Any]) -> str:
    directory = str(Path(path, kwargs.get("subfolder", "")))
    return (
        f"the adapter in {directory} has no {SIDECAR}, so it is not known under which patch it "
        f"was trained; load it with peft.PeftModel.from_pretrained if it was none, or patch the "
        f"base as in training and call rope_ext.save_sidecar(model, {directory!r}) once"
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
        raise ValueError("frequencies that are no numbers")
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
