"""Loads configurations, tokenizers and weights, cheapest first, so that errors appear early."""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from rope_ext.config.nested import text_of
from rope_ext.config.record import Record, record_within
from rope_ext.config.settings import all_settings, contradictions
from rope_ext.config.settings import trained_length as trained_length_of
from rope_ext.errors import MeasureError, OptionError, first_line, nearest
from rope_ext.patching import unpatch
from rope_ext.saving import draft_configs, embedders, gguf_source, hub
from rope_ext.saving.load import (
    checked_json,
    copy_learned,
    from_folder,
    read_config,
    tensors_of_adapter,
)

_WRITING = (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)
"""transformers' families that have a head which writes text."""
_LABELLING = (
    MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)
"""transformers' classes with a head which gives labels or scores of texts."""
Purpose = Literal["text", "embeddings", "labels"]
"""What a checkpoint gives for a text: more text; its embedding, or states of its tokens; labels or
scores, as classifiers, rerankers and reward models do."""
_ADAPTER = "set --adapter to a folder written by PeftModel.save_pretrained"
_WEIGHTS = ("*.safetensors", "*.bin")
_logger: Any = logging.getLogger("rope_ext")  # transformers adds warning_once to all loggers


def load_config(model: str) -> Any:
    if os.path.exists(f"{model}/adapter_config.json"):  # transformers would load its base
        raise MeasureError(
            f"{model} is an adapter; set --model to its base model, and in eval and compare "
            f"--adapter {model}, or merge it with recipes/merge.py of the repository"
        )
    return _load("configuration", _read_config, model)


def _read_config(model: str, gguf_file: str | None = None) -> Any:
    if gguf_file is not None:
        return gguf_source.load_config(model, gguf_file)
    saved = checked_json(model)
    entry = draft_configs.entry_of(saved)
    if entry is not None:
        return draft_configs.read_entry(saved, entry, model)
    config = read_config(model)
    told = "; ".join(contradictions(config, saved))
    if told:
        _logger.warning_once(f"rope_ext: {model}: {told}")
    return config


def load_tokenizer(model: str) -> Any:
    def load(*place: Any, **options: Any) -> tuple[Any, bool]:
        tokenizer = AutoTokenizer.from_pretrained(*place, **options)
        used = tokenizer("a", verbose=False)["input_ids"]  # it may also fail in use
        return tokenizer, bool(used)

    tokenizer, used = _load("tokenizer", load, model)
    if not used:  # transformers builds one without files
        raise MeasureError(
            f"the tokenizer of {model!r} has an empty vocabulary; save its files next to the model "
            f"with tokenizer.save_pretrained"
        )
    return tokenizer


def causal_class(config: Any) -> Any:
    """Return the auto class that loads a model which continues text, or None if there is none.

    Models for images and text read prompts without images, too; encoder-decoders and speech models
    have other heads.
    """
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    if getattr(config, "is_encoder_decoder", False):  # in both mappings, too
        return None
    for cls in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in cls._model_mapping:
            return cls
    return None


def loader(model: str, config: Any, cls: Any = AutoModelForCausalLM) -> Callable[..., Any]:
    """Choose the function that loads a model: ours for a saved patch or a GGUF file."""
    ours = saved_under(config) is not None or gguf_source.is_file_name(model)
    return _from_folder if ours else cls.from_pretrained


def _from_folder(path: str, **kwargs: Any) -> Any:
    return from_folder(path, base=None, is_trainable=False, wrapped=False, kwargs=kwargs)


def load_model(
    model: str,
    dtype: str = "auto",
    device: str = "auto",
    attn: str | None = None,
    adapter: str | None = None,
    as_saved: bool = False,
    cls: Any = None,
) -> Any:
    """Load a model from a folder, Hub ID or GGUF file, in evaluation mode.

    With ``dtype="auto"``, it is float32 on a CPU, and the checkpoint's dtype elsewhere. The patch
    recorded in the configuration is removed, unless ``as_saved``. ``cls`` is by default the class
    that continues text, see :func:`causal_class`.
    """
    device = resolve_device(device)
    require_attention(attn)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "auto"
    options = {} if attn is None else {"attn_implementation": attn}
    config = load_config(model)
    if adapter is not None:  # before weights are loaded
        with hub.loading("adapter", path=adapter, kind=MeasureError, advice=_ADAPTER):
            from peft import PeftConfig, PeftModel

            PeftConfig.from_pretrained(adapter)
    load = loader(model, config, cls or causal_class(config) or AutoModelForCausalLM)
    loaded = _load("weights", load, model, dtype=dtype, **options)
    if saved_under(config) is not None and not as_saved:
        unpatch(loaded)
    if adapter is not None:
        with hub.loading("adapter", path=adapter, kind=MeasureError, advice=_ADAPTER):
            loaded = PeftModel.from_pretrained(loaded, adapter)
    return loaded.to(device).eval()


def load_embedder(
    model: str, dtype: str = "auto", device: str = "auto", attn: str | None = None
) -> Any:
    """Load the model without a head that ``AutoModel`` builds, otherwise as :func:`load_model`."""
    return load_model(model, dtype, device, attn=attn, cls=AutoModel).base_model


def load_learned(model: Any, adapter: str) -> None:
    """Load the learned parameters of a patch that were saved with an adapter.

    PEFT skips them if the adapter is loaded before the model is patched. Parameters that are
    missing in the adapter, or have another shape, are unchanged.
    """
    with hub.loading("adapter", path=adapter, kind=MeasureError, advice=_ADAPTER):
        copy_learned(model, tensors_of_adapter(adapter, {}))


def resolve_device(device: str) -> str:
    """Resolve ``device``: ``auto`` is the accelerator, or the CPU if there is none."""
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else str(accelerator)
    try:
        found = torch.empty(0, device=device).device
        if found.type == "meta":
            raise RuntimeError("it stores no data")
        return str(found)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        raise MeasureError(
            f"device {device!r} cannot be used here ({first_line(error)}); set --device to auto, "
            f"cpu, cuda, cuda:1 or mps"
        ) from None


def require_attention(name: str | None) -> None:
    """Check that ``name`` is an attention implementation of transformers or a kernel on the Hub."""
    ours = ("rope_ext", "rope_ext_probe")  # set by patches, not by users
    known = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}.difference(ours))
    if name is not None and name not in known and "/" not in name:
        raise OptionError(
            f"unknown attention implementation {name!r}{nearest(name, known)}; set --attn to one "
            f"of {', '.join(x for x in known if 'paged' not in x)}, or to a kernel on the Hub"
        )


def require_causal(model: str, config: Any) -> None:
    """Raise OptionError for a checkpoint that does not continue text, before its weights load."""
    require_measurable(model, config)
    saved = (config.architectures or [config.model_type])[0]
    if is_embedder(config):  # transformers would draw the weights of a language head
        raise OptionError(
            f"{model} ({saved}) does not predict text; measure it as an embedder: rope-ext eval "
            f"{model} --tasks embedding"
        )
    if causal_class(config) is None:
        raise OptionError(
            f"{model} ({saved}) does not continue a prompt, as causal language models do; nothing "
            f"here measures encoder-decoders and speech models"
        )


def require_measurable(model: str, config: Any) -> Purpose:
    """Return what a checkpoint is for; raises OptionError for labels, which nothing measures.

    Other tasks would load it without its head, or with a language head of random weights.
    """
    found = purpose(config, model)
    if found == "labels":
        saved = (config.architectures or [config.model_type])[0]
        raise OptionError(
            f"{model} ({saved}) gives labels or scores of texts, as classifiers, rerankers and "
            f"reward models do, and nothing here measures those; score your own texts with and "
            f"without the patch"
        )
    return found


def require_tokens(model: Any, largest: int, named: str) -> None:
    """Raise MeasureError if a model has no embedding of a token; ``named`` has the tokenizer."""
    known = len(model.get_input_embeddings().weight)
    if largest >= known:
        raise MeasureError(
            f"the tokenizer of {named} has token {largest}, and the model only {known} tokens; "
            f"give the folder that both were saved in"
        )


def identity(name: str, config: Any) -> dict[str, Any]:
    """Identify a checkpoint: by its commit, or by its configuration and weight files' times."""
    commit = getattr(config, "_commit_hash", None)
    if commit is not None:
        return {"name": name, "commit": commit}
    files = sorted(path for pattern in _WEIGHTS for path in Path(name).glob(pattern))
    files += [Path(name)] if os.path.isfile(name) else []
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    settings = "" if config is None else config.to_json_string()
    digest = hashlib.sha256((settings + repr(stats)).encode()).hexdigest()
    return {"name": name, "sha256": digest[:16]}


def trained_length(config: Any) -> int:
    """Return the trained length in tokens, as ``patch`` reads it."""
    length = trained_length_of(text_of(config))
    if length is None:
        raise MeasureError(
            "the model's configuration has no max_position_embeddings; set --trained-length TOKENS"
        )
    return length


def purpose(config: Any, place: str | os.PathLike[str] | nn.Module = "") -> Purpose:
    """Return what a checkpoint is for.

    Its configuration says so, or files of sentence-transformers in ``place``, if it is their
    folder, Hub ID or loaded model: embedders and rerankers that began as language models, such as
    E5-Mistral, may be saved as those.
    """
    kind = embedders.kind_of(place)
    saved = (config.architectures or [None])[0]
    if kind == "CrossEncoder" or any(saved in names.values() for names in _LABELLING):
        return "labels"
    return "embeddings" if kind is not None or is_embedder(config) else "text"


def is_embedder(config: Any) -> bool:
    """Whether a checkpoint does not write text.

    By transformers' tables it was saved without a head that does, or its configuration says that it
    reads later tokens, too.
    """
    if getattr(text_of(config), "is_causal", None) is False:
        return True
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return False
    bare = set[str]()
    for names in MODEL_MAPPING_NAMES.values():
        bare.update([names] if isinstance(names, str) else names)
    writes = any(config.model_type in names for names in _WRITING)
    saved = (config.architectures or [None])[0]
    return not writes or saved in bare


def saved_under(config: Any) -> Record | None:
    """Read the patch that a checkpoint was saved with, if plain transformers cannot load it."""
    record = record_within(config)
    return None if record is None or record.plain else record


def before_patch(config: Any) -> Any:
    """Return the configuration of the unpatched checkpoint; ``config`` itself if none was saved."""
    record = saved_under(config)
    return config if record is None else record.restored(config)


def is_dynamic(config: Any) -> bool:
    """Whether the unpatched checkpoint has frequencies that depend on the length."""
    text = text_of(before_patch(config))
    return any(settings.is_dynamic for settings in all_settings(text).values())


def _load(what: str, load: Callable[..., Any], model: str, **options: Any) -> Any:
    folder, gguf = gguf_source.split(model)
    with hub.loading(what, model, MeasureError):
        if gguf:
            gguf_source.require_readable(str(folder), gguf["gguf_file"])
        return load(hub.require_place(folder), **gguf, **options)
