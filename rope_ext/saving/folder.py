"""Reads how a saved or merged model is extended, without loading its weights."""

import copy
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from rope_ext.config.bounds import culprit
from rope_ext.config.nested import text_of
from rope_ext.config.record import record_within
from rope_ext.config.settings import SCALING_FIELDS, RopeSettings, all_settings, method_of
from rope_ext.config.writing import quieted
from rope_ext.errors import MeasureError, RopeExtError, UnsupportedModelError, first_line
from rope_ext.methods import FrequencyMethod, Method
from rope_ext.methods.checked import not_none
from rope_ext.patching import current_patch, note_patch, note_target, patch
from rope_ext.rotary.sites import RotarySite, find_sites, is_local, text_decoder
from rope_ext.saving.checkpoints import before_patch, is_embedder, load_config
from rope_ext.saving.load import (
    read_adapter,
    read_sidecar,
    refuse_other_fields,
    same,
    saved_frequencies,
)

Given = PreTrainedConfig | str | Path


@dataclass(frozen=True)
class Saved:
    """A model without weights, patched as recorded in its folder or configuration."""

    model: nn.Module  # on the meta device; patched if its extension is known
    config: Any  # the configuration as saved
    name: str  # folder or Hub ID, "" if unknown
    # source of the extension: "record" of a patch, "rope_parameters" or "adapter" (its sidecar);
    # None: there is none, or it cannot be read
    source: Literal["record", "rope_parameters", "adapter"] | None


def read_saved(given: Given) -> Saved:
    """Build the model of a folder, Hub ID or configuration on the meta device, patched as saved."""
    sidecar = None
    if isinstance(given, PreTrainedConfig):
        config = given
        name = given.name_or_path or ""
    else:
        name = place = str(given)
        path = Path(name) / "adapter_config.json"
        if path.is_file():
            sidecar = read_sidecar(name)
            place = read_adapter(str(path)).get("base_model_name_or_path", "")
        if path.is_file() and not place:
            raise MeasureError(f"{path} does not name its base model; pass the base model instead")
        # The folder of an adapter has no configuration of a model; its base has.
        config = load_config(place)
    record = sidecar.record if sidecar else record_within(config)
    if record is not None:
        built = copy.deepcopy(config) if sidecar else record.restored(config)
        model = patch_without_weights(built_on_meta(built), record.method, record.arguments)
        if sidecar is None:
            refuse_other_fields(config, model, name)
        return Saved(
            model=model, config=config, name=name, source="adapter" if sidecar else "record"
        )
    model = built_on_meta(config)
    extended = _from_parameters(config, find_sites(text_decoder(model)))
    return Saved(
        model=extended or model, config=config, name=name, source=extended and "rope_parameters"
    )


def built_on_meta(config: PreTrainedConfig) -> nn.Module:
    """Build a configuration's language model, without weights; multimodal, if it has images.

    Of embedders, encoders and encoder-decoders, it is the class that was saved.
    """
    classes: list[Any] = [AutoModelForCausalLM, AutoModelForMultimodalLM]
    if text_of(config) is not config:  # its causal class may be text-only
        classes.reverse()
    if is_embedder(config):  # saved without a head, or an encoder
        classes = []
    auto: Any = next((cls for cls in classes if type(config) in cls._model_mapping), None)

    def build(built: PreTrainedConfig) -> nn.Module:
        with torch.device("meta"):
            if auto is not None:
                return auto.from_config(built)
            saved = _saved_class(built)
            return AutoModel.from_config(built) if saved is None else saved._from_config(built)

    try:
        return build(config)
    except Exception as error:
        fault = None
        # It may not even be converted to a dict.
        with suppress(Exception), quieted(logging.getLogger("transformers")):
            values = config.to_dict()
            fault = culprit(values, lambda others: build(type(config).from_dict(others)))
        reason = f"{type(error).__name__}: {first_line(error)}"
        if fault is not None:
            raise UnsupportedModelError(
                f"no model can be built from {type(config).__name__} with {fault} "
                f"({reason}); correct this field"
            ) from error
        raise UnsupportedModelError(
            f"no model can be built from {type(config).__name__} ({reason}); pass the loaded model"
        ) from error


def _saved_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that a configuration names, if it has that configuration."""
    names = config.architectures
    name = names[0] if isinstance(names, (list, tuple)) and names else ""
    cls: Any = getattr(transformers, str(name), None)
    known = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
    return cls if known and cls.config_class is type(config) else None


def model_of(given: nn.Module | Given) -> nn.Module:
    """Return the model itself, or build it without weights and without its saved patch."""
    if isinstance(given, nn.Module):
        return given
    config = given if isinstance(given, PreTrainedConfig) else load_config(str(given))
    return built_on_meta(before_patch(config))


def patch_without_weights(
    model: nn.Module, method: Method, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """Patch a model on the meta device; only record what a family may refuse, with weights."""
    arguments = dict(arguments or {})
    beside = (arguments.get("bias"), arguments.get("layers"), method.chosen_temperature)
    known = method.kind == "frequency" and not any(value is not None for value in beside)
    return (patch if known else note_patch)(model, method, **arguments)


def configured(text: Any) -> tuple[FrequencyMethod, int] | None:
    """Return the one method that ``rope_parameters`` describe, if any, and the original length."""
    found = [_method(settings) for settings in _scaled(text)]
    return found[0] if found and all(one == found[0] for one in found) else None


def _method(settings: RopeSettings) -> tuple[FrequencyMethod, int] | None:
    """Return the method of one rotary embedding, and its original length."""
    factor = settings.factor
    length = settings.length
    # The dynamic type has no maximum length.
    if factor is None or length is None or settings.rope_type == "dynamic":
        return None
    with suppress(RopeExtError, KeyError, TypeError):
        method = method_of(settings.parameters, factor)
        return None if method is None else (method, length)
    return None


def _scaled(text: Any) -> list[RopeSettings]:
    return [one for one in all_settings(text).values() if one.rope_type != "default"]


def _from_parameters(config: Any, sites: list[RotarySite]) -> nn.Module | None:
    """Build the unscaled model, patched with the method in ``rope_parameters``; None if unclear."""
    restored = copy.deepcopy(config)
    text = text_of(restored)
    found = configured(text)
    if found is None:
        return None
    method, length = found
    scaled = _scaled(text)
    target = not_none(scaled[0].target)
    raises = any(settings.parameters.get("mscale_all_dim") for settings in scaled)
    names = [name for name, one in all_settings(text).items() if one.rope_type != "default"]
    sliding = "scale" if any(name is not None and is_local(name) for name in names) else "auto"
    for settings in scaled:
        part = cast("dict[str, Any]", settings.parameters)
        if raises:  # a factor of 1 scales nothing, and the other fields have no method
            part["factor"] = 1.0
            continue
        for field in (*SCALING_FIELDS, "original_max_position_embeddings"):
            part.pop(field, None)
        part["rope_type"] = "default"
    text.max_position_embeddings = length
    try:
        model = built_on_meta(restored)
        if raises:
            patch(model, method.name, factor=method.factor, compose="raise")
        else:
            patch(model, method, sliding_layers=sliding)
    except (RopeExtError, RuntimeError, TypeError, KeyError):
        return None
    # What transformers builds from the configuration decides whether this method is right.
    state = not_none(current_patch(model))
    if not same(saved_frequencies(state.sites, state, start=True), saved_frequencies(sites)):
        return None
    note_target(model, target)  # Llama 3's factor does not determine it
    return model
