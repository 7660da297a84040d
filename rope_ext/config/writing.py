"""Reads a model's configuration, and updates it for the patch.

If plain transformers can rebuild a patch, its fields are found by trial: a candidate is accepted
only if transformers builds the patched frequencies from a saved and reloaded copy of it.
"""

import copy
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_ext.config.nested import configurations
from rope_ext.config.record import EXPERTS, FIELD, FIELDS, HEAD, OLDER, Record, record_of
from rope_ext.config.settings import SCALING_FIELDS
from rope_ext.errors import CURE, RecordError
from rope_ext.methods import FrequencyMethod, longrope_table
from rope_ext.methods.kinds import MSCALES
from rope_ext.methods.temperature import yarn_factor
from rope_ext.rotary.sites import ROUNDING, PatchTarget, RotarySite, rebuilt, text_config
from rope_ext.rotary.swapping import Changes, set_attribute

Entries = dict[RotarySite, dict[str, Any]]
"""An entry of ``rope_parameters`` for each scaled site."""
Built = dict[RotarySite, tuple[torch.Tensor, float]]
"""What transformers builds for each site: inverse frequencies, and the scale of cosine and sine."""

STOP = "rope_ext: extended by rope_parameters, which this program does not read"
"""Written instead of the base, for readers that cannot compute the patch."""

_THETA, _SCALING = OLDER
_ALL = ("default", "linear", "yarn", "llama3", "longrope")
READ: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmoe"), _ALL),
    **dict.fromkeys(("granite", "granitemoe", "smollm3", "seed_oss", "dots1"), _ALL),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), ("default", "linear", "llama3")),
    **dict.fromkeys(("mixtral", "qwen2_moe", "starcoder2", "cohere", "gemma"), ("default",)),
    **dict.fromkeys(("ernie4_5", "hunyuan_v1_dense", "phi3", "nemotron"), ("default",)),
}
"""For each family, the values of ``rope_type`` that mlx-lm 0.32.2 builds from the older fields."""

UNSAVED = "no rope_type can express it: load it with rope_ext.from_pretrained (plain {})"
REFUSED = "transformers raises an error"
UNPATCHED = "transformers loads it unpatched"
LENGTH_STAYS = (
    "max_position_embeddings stays the trained length, up to which other engines run it unextended"
)


_held: dict[Any, tuple[int, Any]] = {}  # of each replacement: blocks inside, and the value before
_holding = threading.Lock()  # innermost: no other lock of rope_ext is taken under it


@contextmanager
def replaced(
    key: Any, get: Callable[[], Any], put: Callable[[Any], Any], new: Any
) -> Iterator[None]:
    """Replace a value that all threads share until the last of the overlapping blocks ends.

    ``key`` names the value; all its blocks must have the same ``new`` one.
    """
    with _holding:
        count, before = _held.get(key) or (0, get())
        if count == 0:
            put(new)
        _held[key] = (count + 1, before)
    try:
        yield
    finally:
        with _holding:
            count, before = _held.pop(key)
            if count > 1:
                _held[key] = (count - 1, before)
            else:
                put(before)


def quieted(logger: logging.Logger) -> AbstractContextManager[None]:
    """Raise the level of ``logger`` to CRITICAL inside a ``with`` block, for all threads."""
    return replaced(logger, get=lambda: logger.level, put=logger.setLevel, new=logging.CRITICAL)


def _names_another(record: logging.LogRecord) -> bool:
    """Whether a message of transformers is about something else than what saved patches have."""
    return not any(ours in record.getMessage() for ours in (CURE, *MSCALES))


# A saved patch has this rope_type on purpose, so that transformers refuses to build a model, or
# fields that other engines read.
logging.getLogger("transformers.modeling_rope_utils").addFilter(_names_another)


def correct(decoder: nn.Module, sites: list[RotarySite]) -> None:
    """Return a model's own configuration to what was loaded, where it was changed since."""
    config = text_config(decoder)
    for site in sites:
        if site.changed and site.rope_type == "default":
            part = part_of(config.rope_parameters, site)
            part.clear()
            part.update(copy.deepcopy(dict(site.settings.parameters)))
            config.max_position_embeddings = site.settings.target


def write(place: PatchTarget, values: Mapping[str, Any], record: Record, changes: Changes) -> None:
    """Write a patch into the configurations of the text model, which are the model's own.

    The fields in ``OLDER`` only affect saved files: ``rope_scaling`` is a property of the class, so
    only ``to_dict`` sees a value on the instance. They are not written for classes that read their
    base from ``rope_theta``.
    """
    outermost: Any = place.model.config
    texts = [text_config(place.decoder)]
    if not any(texts[0] is part for part in configurations(outermost)):
        texts.append(text_config(place.model))  # the decoder has a copy, which is not saved
    for config in texts:
        vars(config).pop(FIELD, None)  # the checkpoint was saved with another patch
        for name in FIELDS:  # in order: the original length before the maximum
            if name in values:
                setattr(config, name, copy.deepcopy(values[name]))
    if EXPERTS in values:
        setattr(outermost, EXPERTS, values[EXPERTS])
        if not _reads_experts(place.model):  # models built from it look it up, and fail
            set_attribute(
                outermost, name="_experts_implementation_internal", value=CURE, changes=changes
            )
    for config in texts:
        fields = getattr(type(config), "__dataclass_fields__", {})
        ours = type(config).__module__.startswith("transformers.") and OLDER[0] not in fields
        if ours and hasattr(config, "rope_parameters"):
            for name in OLDER:
                vars(config).pop(name, None)
            vars(config).update(copy.deepcopy(_older_fields(place, record)))
            setattr(PreTrainedConfig, "max_position_embeddings", _Unknown())  # noqa: B010


def _reads_experts(model: nn.Module) -> bool:
    """Whether a module looks up its experts implementation in the model's configuration."""
    return any(
        hasattr(module, "is_transposed") and getattr(module, "config", None) is model.config
        for module in model.modules()
    )


class _Unknown:
    """To resume, Trainer reads ``config.json`` as a PreTrainedConfig, which has no such length."""

    def __get__(self, config: Any, owner: Any) -> None:
        if type(config) is not PreTrainedConfig:
            raise AttributeError("max_position_embeddings")


def before(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return configuration fields from before any patch; None for fields that did not exist."""
    record = saved_record(config)
    fields = {name: getattr(config, name, None) for name in names}
    if record is not None and not record.native:
        fields |= record.config
    values = {name: copy.deepcopy(fields.get(name)) for name in names}
    return values | {FIELD: record.to_json()} if record is not None and record.native else values


def is_scaled(decoder: nn.Module, site: RotarySite) -> str | None:
    """Describe how the checkpoint's configuration scales a site; None if it does not."""
    factor = site.settings.factor
    if site.scaled or factor not in (None, 1, 1.0):
        return f"rope_type {site.rope_type!r} with factor {factor}"
    record = saved_record(text_config(decoder))
    if record is not None and record.native:
        return f"{record.call()}, which it was saved with"
    return None


def saved_record(config: Any) -> Record | None:
    """Return the record that a checkpoint was saved with, if it can be read.

    A native one is in force, because transformers builds its patch from the other fields.
    """
    with suppress(RecordError):  # only if the user passed the trained length
        return record_of(config)


def part_of(parameters: dict[str, Any], site: RotarySite) -> dict[str, Any]:
    """Return the entry of a configuration's ``rope_parameters`` that belongs to ``site``."""
    part = None if site.layer_type is None else parameters.get(site.layer_type)
    return part if isinstance(part, dict) else parameters


def _older_fields(place: PatchTarget, record: Record) -> dict[str, Any]:
    """Return the fields in ``OLDER`` for a configuration whose other fields describe the patch.

    mlx-lm, transformers 4 and older converters read them instead of ``rope_parameters``. Without
    them, they fall back to a default base and no scaling, and silently drop the patch. So they
    either describe the patch, or store a sentence instead of the base, which makes the reader fail.

    transformers 5 prefers ``rope_scaling`` to ``rope_parameters`` if both exist, and reads the base
    from it, so these fields never change what it builds.
    """
    config = text_config(place.decoder)
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        # The older fields describe only one embedding.
        return {_THETA: STOP if record.native else CURE}
    if not record.native:
        refused = {_SCALING: copy.deepcopy(parameters)}
        return {_THETA: CURE, **(refused if parameters.get("rope_type") == CURE else {})}
    describes = not record.resolved.is_dynamic and not any(site.baked for site in place.sites)
    scaling = _rope_scaling(config, parameters) if describes else None
    if scaling is None:
        return {_THETA: STOP}
    reads = parameters["rope_type"] in READ.get(config.model_type, ())
    fields = {_THETA: parameters["rope_theta"] if reads else STOP}
    return fields if parameters["rope_type"] == "default" else {**fields, _SCALING: scaling}


def _rope_scaling(config: Any, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a ``rope_scaling`` that mlx-lm and transformers interpret equally, or None.

    See ``mlx_lm/models/rope_utils.py`` in mlx-lm 0.32.2, which ignores ``attention_factor``,
    ``truncate`` and ``partial_rotary_factor``.
    """
    kind = parameters["rope_type"]
    given = parameters.get("attention_factor")
    scaling = copy.deepcopy(dict(parameters))
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        return None
    if kind in ("default", "linear", "llama3"):
        return scaling
    if kind == "yarn":
        factor = parameters["factor"]
        if not parameters.get("truncate", True) or parameters.get("mscale_all_dim") or factor <= 1:
            return None
        usual = yarn_factor(factor)
        if given is not None and not math.isclose(given, usual, rel_tol=1e-9):
            # mlx-lm computes (0.1 mscale ln(factor) + 1) / 1.
            scaling |= {"mscale": (given - 1) / (usual - 1), "mscale_all_dim": 0}
        return scaling
    if kind == "longrope" and parameters["short_factor"] == parameters["long_factor"]:
        length = parameters["original_max_position_embeddings"]
        factor = config.max_position_embeddings / length
        computed = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
        if given is None or math.isclose(computed, given, rel_tol=1e-6):
            return scaling
    return None


@dataclass(frozen=True)
class Written:
    """Saved form of a patch."""

    values: dict[str, Any]  # configuration fields and their new values
    native: bool  # whether plain transformers rebuilds the patch from them
    # float32 frequencies that transformers built for each patched site, so that the model in
    # memory and the reloaded one are bit-identical
    built: dict[RotarySite, torch.Tensor]
    note: str  # one sentence for describe


def written(place: PatchTarget, method: FrequencyMethod, target: int) -> Written:
    """Find a configuration from which transformers rebuilds ``method`` on the scaled sites."""
    config = text_config(place.decoder)
    sites = place.sites
    scaled = place.scaled
    heads: list[dict[str, int]] = [{}]
    if vars(config).get(HEAD, 0) is None:  # some transformers functions cannot read it
        heads.append({HEAD: config.hidden_size // config.num_attention_heads})
    for proposal, head in itertools.product(_proposals(method, scaled), heads):
        values = {"rope_parameters": _merged(config, proposal, method), **head}
        types = {entry["rope_type"] for entry in proposal.values()}
        if hasattr(config, "original_max_position_embeddings"):
            values["original_max_position_embeddings"] = scaled[0].rope.length
        # The dynamic type scales from max_position_embeddings.
        dynamic = types == {"dynamic"}
        values["max_position_embeddings"] = scaled[0].rope.length if dynamic else target
        built = _built(place.decoder, config, values, sites=sites)
        if built is None or not _equal(built, scaled, method, dynamic="dynamic" in types):
            continue
        exact = {} if method.is_dynamic else {site: built[site][0] for site in scaled}
        note = f"plain transformers reloads it (rope_type {', '.join(sorted(types))})"
        if "dynamic" in types:
            note += (
                "; max_position_embeddings stays the trained length, because transformers' "
                "dynamic type scales from it: pass the length to evaluators explicitly"
            )
        return Written(values=values, native=True, built=exact, note=note)
    return unsaved(place, target)


def unsaved(place: PatchTarget, target: int) -> Written:
    """Return fields for a patch that transformers cannot express, so that it raises an error.

    ``rope_type`` is set to a name it does not know. Some families only accept certain names, or
    ignore the field. For those the experts implementation is set instead, which every transformers
    model looks up first, with or without experts.
    """
    config = text_config(place.decoder)
    marked = copy.deepcopy(getattr(config, "rope_parameters", None) or {})
    for site in place.scaled:
        part_of(marked, site)["rope_type"] = CURE

    refused = {"rope_parameters": marked, "max_position_embeddings": target}
    if _is_refused(config, refused, lambda x: _rebuilt_modules(place.decoder, x, place.sites)):
        return Written(values=refused, native=False, built={}, note=UNSAVED.format(REFUSED))
    # Other engines read no experts implementation: they run these unextended, so the length in the
    # configuration stays as it is, up to which they serve.
    if _is_refused(place.model.config, {EXPERTS: CURE}, type(place.model)):
        note = f"{UNSAVED.format(REFUSED)}; {LENGTH_STAYS}"
        return Written(values={EXPERTS: CURE}, native=False, built={}, note=note)
    note = f"{UNSAVED.format(UNPATCHED)}; {LENGTH_STAYS}"
    return Written(values={}, native=False, built={}, note=note)


def _is_refused(config: Any, values: dict[str, Any], build: Callable[[Any], Any]) -> bool:
    """Whether transformers saves and loads the configuration, but cannot build a model from it."""
    with quieted(logging.getLogger("transformers")):
        try:
            trial = _reloaded(config, values)
        except Exception:  # but rope_ext.from_pretrained must read it
            return False
        try:
            with torch.device("meta"):
                build(trial)
        except Exception as error:
            return CURE in str(error)
    return False


def _proposals(method: FrequencyMethod, scaled: list[RotarySite]) -> Iterator[Entries]:
    """Yield candidate entries, the most readable first."""
    raised = {site: dict(site.raised[0]) for site in scaled if site.raised is not None}
    if raised:  # keep the checkpoint's own type
        yield raised
        return
    if not any(site.scaled for site in scaled):
        yield {site: method.rope_parameters(site.rope) for site in scaled}
    if not method.is_dynamic:
        tables = {}
        for site in scaled:
            inv_freq, scaling = site.under(method)
            tables[site] = longrope_table(
                site.rope, inv_freq, method.factor, attention_scaling=scaling
            )
        yield tables
        # Some types cover the whole head, with frequency zero beyond partial_rotary_factor.
        yield {site: {**table, "partial_rotary_factor": 1.0} for site, table in tables.items()}


def _merged(config: Any, proposal: Entries, method: FrequencyMethod) -> dict[str, Any]:
    """Return ``rope_parameters`` with the proposed entry of each site; its base and share stay."""
    merged = copy.deepcopy(getattr(config, "rope_parameters", None) or {})
    for site, entry in proposal.items():
        part = part_of(merged, site)
        old = {name: part.pop(name, None) for name in SCALING_FIELDS}
        part.setdefault("rope_theta", site.rope.base)
        part.update(copy.deepcopy(entry))
        if old["mscale_all_dim"] and part["rope_type"] == "longrope":
            # Multi-head latent attention computes its softmax scale from these two fields.
            share = old["mscale_all_dim"]
            if site.baked:
                grown = 0.1 * math.log(old["factor"])
                share = (method.attention_scaling(site.rope) * (grown * share + 1) - 1) / grown
            part.update(factor=old["factor"], mscale_all_dim=share)
    return merged


def _reloaded(config: Any, values: dict[str, Any]) -> Any:
    """Return a copy of ``config`` with ``values``, after a round trip through config.json."""
    trial = copy.deepcopy(config)
    for name in OLDER:  # they would override the new values
        vars(trial).pop(name, None)
    for name, value in values.items():
        setattr(trial, name, copy.deepcopy(value))
    return type(config).from_dict(trial.to_dict())


def _built(
    decoder: nn.Module, config: Any, values: dict[str, Any], sites: list[RotarySite]
) -> Built | None:
    """Build what transformers builds from ``values``, after a round trip through config.json."""
    try:
        # transformers may reject a candidate; hide its messages from users.
        with quieted(logging.getLogger("transformers")):
            modules = _rebuilt_modules(decoder, _reloaded(config, values), sites)
        result = {}
        for site in sites:
            module = modules[site.name]
            inv_freq = module.get_buffer(site.buffer).detach()
            result[site] = inv_freq, float(getattr(module, site.scaling_attribute, 1.0))
        return result
    except Exception:  # whatever the error, this candidate does not work
        return None


def _rebuilt_modules(
    decoder: nn.Module, config: Any, sites: list[RotarySite]
) -> dict[str, nn.Module]:
    own = {site.name: site.module for site in sites}
    # Rotary modules may have their own configurations and arguments, which only the decoder knows.
    if len(own) == 1 and all(module.config is text_config(decoder) for module in own.values()):
        with torch.device("cpu"):
            return {name: type(module)(config) for name, module in own.items()}
    with torch.device("meta"):
        skeleton = type(decoder)(config)
    modules = {name: skeleton.get_submodule(name) for name in own}
    return {name: rebuilt(module, module.config) for name, module in modules.items()}


def _equal(built: Built, scaled: list[RotarySite], method: FrequencyMethod, dynamic: bool) -> bool:
    """Whether transformers built what the patch computes, and left the other sites alone."""
    for site, (got, got_scaling) in built.items():
        inv_freq = site.loaded.double()
        scaling = site.scaling
        if site in scaled:
            inv_freq, scaling = site.under(method)
            if dynamic:  # dynamic modules start unscaled
                inv_freq = site.loaded.double()
            elif method.is_dynamic:  # a new module starts at the trained length
                inv_freq = method.frequencies(site.rope, site.rope.length)
        # A frequency of zero is saved as one that rotates 1e-30 times as fast.
        if got.shape != inv_freq.shape or abs(got_scaling - scaling) > 1e-9 * scaling:
            return False
        if not torch.allclose(got.double(), inv_freq, rtol=ROUNDING, atol=1e-25):
            return False
    return True
