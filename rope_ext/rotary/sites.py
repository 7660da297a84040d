"""Finds the rotary embeddings of a loaded model.

Nothing here depends on the model family. A rotary site is a buffer whose name ends in
``inv_freq``, and ``probe`` verifies how its module uses it.
"""

import copy
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rope_ext.config.nested import text_of
from rope_ext.config.record import FIELD
from rope_ext.config.settings import (
    LONGEST,
    METHODS,
    RopeSettings,
    patch_for,
    rope_settings,
    trained_length,
    unscaled,
)
from rope_ext.errors import NoRopeError, OptionError, UnsupportedModelError, brief
from rope_ext.methods import FrequencyMethod, Method, Rope, geometric
from rope_ext.methods.rope import MOST_TOKENS, plain_number, whole_number
from rope_ext.rotary.probe import Columns, prove

ROUNDING = 1e-5
"""Relative error of float32 frequencies: pow of a large base, which differs between devices."""
_LOCAL = ("sliding", "chunked", "local")
_NO_ATTENTION = ("linear", "mamba", "conv", "recurrent")
_MOVING = ("dynamic", "longrope")  # transformers changes their buffers between forwards


@dataclass(eq=False)
class RotarySite:
    """One set of rotary frequencies of a loaded model."""

    name: str  # path of the rotary module in the model
    module: nn.Module  # the rotary module
    layer_type: str | None  # layer type that it serves if the module has several sets, else None
    prefix: str  # of the names of its buffers: that layer type and an underscore, or nothing
    rope: Rope  # the embedding that the checkpoint was trained with
    loaded: Tensor  # float32 on the CPU, [pairs]: from its buffer, or rebuilt if a cast rounded it
    scaling: float  # factor of cosine and sine in the checkpoint
    rope_type: str  # transformers' name for the checkpoint's scaling
    local: bool  # whether only sliding-window layers use it
    shared: bool  # whether layers with and without a sliding window use it
    columns: Columns  # the verified layout of the module's output
    settings: RopeSettings  # RoPE settings, of the configuration unless it was changed
    # latent attention layers whose softmax scale has the checkpoint's factor (mscale_all_dim)
    baked: tuple[nn.Module, ...] = ()
    rounded: bool = False  # whether a cast has rounded the buffer
    # what the configuration says that is not in force in the loaded model, and what to do
    changed: tuple[str, str] | None = None
    # with compose="raise", the checkpoint's own rope_parameters entry with the larger factor, and
    # the resulting length in tokens. The other fields then describe the unscaled embedding
    raised: tuple[Mapping[str, Any], int] | None = None
    # patched buffers by name, float32 on the CPU; none if transformers changes them itself
    values: dict[str, Tensor] = field(default_factory=dict)

    @property
    def buffer(self) -> str:
        return f"{self.prefix}inv_freq"

    @property
    def buffers(self) -> list[str]:
        """Names of the buffers with these frequencies."""
        names = (f"{self.prefix}inv_freq", f"{self.prefix}original_inv_freq")
        return [name for name in names if name in self.module._buffers]

    @property
    def scaling_attribute(self) -> str:
        return f"{self.prefix}attention_scaling"

    def factors(self, *methods: Method) -> tuple[float, float]:
        """Return the factor of cosine and sine, and the one whose square scales the softmax.

        The only place that decides where the combined ``attention_factor`` of methods is applied:
        to cosine and sine, with the checkpoint's own, unless the checkpoint includes it in the
        softmax scale of its layers (:attr:`baked`), which also scales columns that do not rotate.
        """
        numbers = [method.attention_scaling(self.rope) for method in methods]
        if self.baked:
            return self.scaling, math.prod(numbers, start=1.0)
        return math.prod(numbers, start=self.scaling), 1.0

    def under(self, method: FrequencyMethod) -> tuple[Tensor, float]:
        """Frequencies (float64, ``[pairs]``) and scaling under ``method``."""
        scaling, _ = self.factors(method)
        inv_freq = method.inv_freq(self.rope)
        most = max(math.pi, float(self.rope.inv_freq.max()))  # beyond, positions alias
        if not (inv_freq <= most).all() or not math.isfinite(scaling):
            raise OptionError(
                f"{method} gives frequencies up to {float(inv_freq.max()):g} radians per token and "
                f"cos and sin times {scaling:g} on {self.name}; choose options "
                f"with which no pair rotates by more than half a circle per token"
            )
        return inv_freq, scaling

    def target_length(self, method: Method) -> int:
        return method.target_length(self.rope) if self.raised is None else self.raised[1]

    @property
    def moving(self) -> bool:
        """Whether transformers changes the buffer between forwards."""
        return self.rope_type in _MOVING

    @property
    def scaled(self) -> bool:
        """Whether the checkpoint's configuration scales these frequencies."""
        return self.rope_type in METHODS


@dataclass(frozen=True)
class PatchTarget:
    """The parts of a model that a patch changes."""

    model: Any  # the unwrapped model
    decoder: nn.Module  # its text model
    sites: list[RotarySite]  # all rotary sites of the decoder
    scaled: list[RotarySite]  # the sites that the patch changes

    @property
    def is_encoder(self) -> bool:
        """Whether it is the encoder of an encoder-decoder, which does not generate."""
        return self.decoder is text_encoder(self.model)


def unwrap(model: Any) -> Any:
    """Return the transformers model inside a wrapper.

    Of PEFT, torch.compile, data parallelism or sentence-transformers.
    """
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(getattr(model, "transformers_model", None), nn.Module):
            model = model.transformers_model  # of a SentenceTransformer or CrossEncoder
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def text_decoder(model: nn.Module) -> nn.Module:
    """Return the text model of ``model``, the part to patch."""
    unwrapped: Any = unwrap(model)
    if not isinstance(unwrapped, nn.Module) or not hasattr(unwrapped, "config"):
        raise NoRopeError(
            f"{type(unwrapped).__name__} is not a transformers model; pass the loaded model itself"
        )
    decoder: Any = unwrapped
    if hasattr(unwrapped, "get_decoder"):
        decoder = cast("Any", unwrapped).get_decoder()
    if decoder is unwrapped and hasattr(unwrapped, "get_encoder"):
        encoder = cast("Any", unwrapped).get_encoder()
        if isinstance(encoder, PreTrainedModel) and encoder.config is not unwrapped.config:
            return encoder  # the rest is a head
    # Some families name their output layer "decoder", and get_decoder returns it.
    return unwrap(decoder) if hasattr(decoder, "config") else unwrapped


def text_config(module: nn.Module) -> Any:
    """Return the configuration of the text model of ``module``."""
    return text_of(cast("Any", module).config)


def text_encoder(model: nn.Module) -> nn.Module | None:
    """Return the text model of an encoder-decoder's encoder if it rotates, else None."""
    unwrapped: Any = unwrap(model)
    if not getattr(unwrapped.config, "is_encoder_decoder", False):
        return None
    found = cast("Any", unwrapped).get_encoder() if hasattr(unwrapped, "get_encoder") else None
    if found is None or found is unwrapped or not hasattr(found, "config"):
        return None
    encoder = text_decoder(found)
    rotates = any(name.endswith("inv_freq") for name, _ in encoder.named_buffers())
    return encoder if rotates else None


def text_parts(model: nn.Module) -> list[nn.Module]:
    """Return the text models that a patch of ``model`` changes: its decoder, then its encoder."""
    decoder = text_decoder(model)  # first, since it raises NoRopeError without a configuration
    encoder = text_encoder(model)
    return [decoder, *([] if encoder is None else [encoder])]


def text_root(model: nn.Module) -> nn.Module:
    """Return the smallest model with all :func:`text_parts` of ``model``."""
    decoder, *others = text_parts(model)
    if not others:
        return decoder
    whole = unwrap(model)
    return getattr(whole, "base_model", whole)


def vocabulary_of(decoder: nn.Module) -> nn.Embedding:
    """Return a decoder's table of token embeddings; raises UnsupportedModelError without one."""
    try:
        found = cast("Any", decoder).get_input_embeddings()
    except (AttributeError, NotImplementedError):
        found = _only_table(decoder)
    if not hasattr(found, "num_embeddings"):
        raise UnsupportedModelError(f"{type(decoder).__name__}: {no_text(decoder)}")
    return cast("nn.Embedding", found)


def _only_table(decoder: nn.Module) -> nn.Embedding | None:
    """Return the only table of a model that reads token IDs, under a name transformers misses."""
    reads = "input_ids" in inspect.signature(type(decoder).forward).parameters
    tables = [child for child in decoder.children() if isinstance(child, nn.Embedding)]
    return tables[0] if reads and len(tables) == 1 else None


def no_text(decoder: nn.Module) -> str:
    """Explain why ``decoder`` takes no token IDs, as a sentence for an error."""
    models = (name for name, one in decoder.named_modules() if isinstance(one, PreTrainedModel))
    inner = None if isinstance(decoder, PreTrainedModel) else next(models, None)
    if inner is None:
        return "it does not read token IDs of one vocabulary"
    # as in another package's wrapper
    return f"it is not a transformers model; pass the one in it, model.get_submodule({inner!r})"


@torch.no_grad()
def run(decoder: nn.Module, tokens: Tensor, use_cache: bool = False) -> Any:
    """Run ``decoder`` on token ids, ``[rows, tokens]``, in evaluation mode."""
    device = vocabulary_of(decoder).weight.device
    tokens = tokens.to("cpu" if device.type == "meta" else device)  # if offloaded, hooks move them
    with evaluating(decoder):
        return decoder(
            input_ids=tokens, use_cache=use_cache, **encoder_states(decoder, len(tokens))
        )


def encoder_states(decoder: nn.Module, rows: int) -> dict[str, Tensor]:
    """Return the argument with which a decoder with cross-attention can be run without encoder."""
    config = text_config(decoder)
    name = "encoder_hidden_states"
    takes = name in inspect.signature(type(decoder).forward).parameters
    if not takes or getattr(config, "add_cross_attention", True) is False:
        return {}
    widths = ("cross_attention_hidden_size", "cross_hidden_size", "hidden_size")
    columns = next(filter(None, (getattr(config, width, None) for width in widths)))
    like = next(x for x in decoder.parameters() if x.is_floating_point())
    return {name: torch.ones(rows, 3, columns, device=like.device, dtype=like.dtype)}


def find_sites(decoder: nn.Module, length: int | None = None) -> list[RotarySite]:
    """Return all rotary sites of ``decoder``, each verified to rotate by its buffer.

    ``length`` is the trained length in tokens; None reads it from the configuration.
    """
    _require_in_use(decoder)
    sites = []
    unused = _unused_modules(decoder)
    for name, module in decoder.named_modules():
        for buffer in list(module._buffers) if name not in unused else ():
            if not buffer.endswith("inv_freq") or buffer.endswith("original_inv_freq"):
                continue
            if not name:
                raise UnsupportedModelError(
                    f"{type(decoder).__name__} is a rotary module, not a model; pass the model "
                    f"that contains it"
                )
            prefix = buffer.removesuffix("inv_freq").rstrip("_")
            try:
                sites.append(_site(decoder, name, module, layer_type=prefix or None, length=length))
            except UnsupportedModelError as error:
                parts = [f"model.{part}" for part in _parts_that_rotate(decoder)]
                if not parts:
                    raise
                raise UnsupportedModelError(
                    f"{type(decoder).__name__} consists of several models; pass the one to patch: "
                    f"{' or '.join(parts)}"
                ) from error
    if not sites:
        raise NoRopeError(
            f"{type(decoder).__name__} has no rotary position embedding kept in a buffer (no "
            f"module owns an inv_freq), so there is nothing to extend; choose a RoPE model"
        )
    return sites


def other_parts(model: nn.Module) -> list[str]:
    """Return names of models within ``model`` that can be patched, and that its patch leaves out.

    Such as an encoder of sound.
    """
    return _parts_that_rotate(unwrap(model), without=text_parts(model))


def _parts_that_rotate(module: nn.Module, without: Sequence[nn.Module] = ()) -> list[str]:
    """Return names of the outermost models within ``module`` whose text model can be patched.

    None that is, or is inside of, one of ``without``, or whose text model is.
    """
    inside = {id(one) for part in without for one in part.modules()}
    found: list[str] = []
    for name, child in module.named_modules():
        seen = not name or any(name.startswith(f"{one}.") for one in found)
        if seen or not isinstance(child, PreTrainedModel):
            continue
        with suppress(NoRopeError, UnsupportedModelError):
            decoder = text_decoder(child)
            if id(decoder) not in inside:
                chosen_sites(decoder, find_sites(decoder), "auto")
                found.append(name)
    return found


def _unused_modules(decoder: nn.Module) -> set[str]:
    """Return names of rotary modules that no layer uses.

    With ``rope_scaling_layers``, one of two modules ignores the scaling, and serves only the layers
    that the list leaves out.
    """
    config = text_config(decoder)
    listed = getattr(config, "rope_scaling_layers", None)
    if listed is None or not set(range(config.num_hidden_layers)) <= set(listed):
        return set()
    trial = copy.deepcopy(config)
    trial.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": 2.0}
    with torch.device("meta"):
        built = type(decoder)(trial)
    modules = built.named_modules()
    return {name for name, module in modules if getattr(module, "rope_type", None) == "default"}


def rebuilt(module: Any, config: Any) -> Any:
    """Build a rotary module like ``module`` from a configuration, on the CPU.

    Some ignore the configuration's scaling, by an argument of their own.
    """
    with torch.device("cpu"):
        built = type(module)(config)
        kind = getattr(module, "rope_type", None)
        if not isinstance(kind, str) or kind == getattr(built, "rope_type", None):
            return built
        config = copy.deepcopy(config)
        config.rope_parameters = {**config.rope_parameters, "rope_type": kind}
        return type(module)(config)


def chosen_sites(decoder: nn.Module, sites: list[RotarySite], sliding: str) -> list[RotarySite]:
    """Return the sites to scale; raises UnsupportedModelError if all serve only windowed layers."""
    if sliding == "scale":
        return sites
    chosen = [site for site in sites if not site.local]
    if not chosen:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: every layer with a rotary embedding sees a limited window "
            f"only, so scaling cannot lengthen its reach; load it without its window first "
            f"(config.sliding_window = None, or no sliding kind in config.layer_types), or pass "
            f"sliding_layers='scale' to scale all the same"
        )
    return chosen


def _require_in_use(decoder: nn.Module) -> None:
    """Raise NoRopeError if the configuration disables the rotation in the code."""
    uses = [m.use_rope for m in decoder.modules() if hasattr(m, "use_rope")]
    off = None
    if uses and not any(uses):
        off = "its layers all have use_rope off"
    if getattr(text_config(decoder), "alibi", None):
        off = "its configuration has alibi=True, which takes the place of the rotation"
    if off is not None:
        raise NoRopeError(
            f"{type(decoder).__name__} does not rotate: {off}, so there is nothing to extend; "
            f"choose a model that was trained with RoPE"
        )


def _rope_type(decoder: nn.Module, name: str, module: nn.Module, layer_type: str | None) -> str:
    """Return the rope_type of a rotary module for a layer type, or its only one."""
    rope_type = getattr(module, "rope_type", "default")
    if not isinstance(rope_type, dict):
        return str(rope_type)
    if layer_type not in rope_type:  # Evolla's encoder of proteins
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: its rotary module {name} ({type(module).__name__}) names "
            f"no rope_type, so it may not be the language model's: this family is not supported"
        )
    return rope_type[layer_type]


def _refuse_points(decoder: nn.Module, config: Any, length: int | None) -> None:
    """Raise UnsupportedModelError if the configured length counts points of a time series."""
    patch_length = getattr(config, "patch_length", None)
    if patch_length:  # TimesFM reads patches of so many points of a series as one token
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: its configuration gives its length as {length} points, and "
            f"{patch_length} of them (patch_length) are one token; pass "
            f"original_max_position_embeddings={(length or 0) // patch_length} for these, and "
            f"forecast_context_len=POINTS in calls, which else cut their input"
        )


def _require_tokens(decoder: nn.Module, length: int | None) -> int:
    """Return the trained length in tokens; raises if it is not known or cannot be extended."""
    if length is None:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: its configuration has no max_position_embeddings, so the "
            f"trained length is unknown; pass original_max_position_embeddings=TOKENS"
        )
    if not 2 <= length <= MOST_TOKENS:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: a trained length of {length} tokens cannot be extended, "
            f"only one of 2 to {MOST_TOKENS}; pass original_max_position_embeddings=TOKENS"
        )
    return length


def _site(
    decoder: nn.Module, name: str, module: nn.Module, layer_type: str | None, length: int | None
) -> RotarySite:
    """Read the frequencies that a rotary module uses for one layer type, and prove that it does.

    ``length`` is the trained length in tokens; None: that of the configuration.
    """
    config = getattr(module, "config", None) or text_config(decoder)
    prefix = f"{layer_type}_" if layer_type else ""
    rope_type = _rope_type(decoder, name, module, layer_type=layer_type)
    buffer = module.get_buffer(f"{prefix}inv_freq").detach()
    loaded = _loaded(decoder, module, name=f"{prefix}inv_freq", moving=rope_type in _MOVING)
    if not len(loaded):
        raise NoRopeError(
            f"{type(decoder).__name__}: its rotary module {name} rotates no columns; correct "
            f"partial_rotary_factor or the size of a head in its configuration"
        )
    columns = prove(decoder, module, layer_type, pairs=len(loaded))
    given = length is not None
    if not given:
        length = trained_length(config)
        _refuse_points(decoder, config, length)
    settings = rope_settings(config, layer_type)
    changed = None
    if getattr(config, FIELD, None) is None:  # else the record has the trained length
        found = _Loaded(
            decoder=decoder,
            config=config,
            name=name,
            module=module,
            layer_type=layer_type,
            rope_type=rope_type,
            inv_freq=loaded,
        )
        settings, changed = found.settings(settings)
        length = settings.target if changed and not given else length
    length = _require_tokens(decoder, length)
    bakes = settings.parameters.get("mscale_all_dim") and settings.rope_type in METHODS
    base = _base(decoder, settings.parameters.get("rope_theta"), loaded)
    theta = torch.where(loaded > 0, geometric(base, 2 * len(loaded)), 0.0)
    if not torch.allclose(theta, loaded.double(), rtol=ROUNDING, atol=0):
        theta = loaded.double()  # already scaled, or not a geometric sequence
    local, shared = _reach(config, layer_type)
    return RotarySite(
        name=name,
        module=module,
        layer_type=layer_type,
        prefix=prefix,
        rope=Rope(theta, float(base), length),
        loaded=loaded,
        scaling=_scaling(decoder, getattr(module, f"{prefix}attention_scaling", 1.0)),
        rope_type=rope_type,
        local=local,
        shared=shared,
        columns=columns,
        settings=settings,
        baked=tuple(softmax_scales(decoder, mscale_all_dim=0) or ()) if bakes else (),
        rounded=not buffer.is_meta and not torch.equal(buffer.float().cpu(), loaded),
        changed=changed,
    )


@dataclass(frozen=True)
class _Loaded:
    """A rotary module as loaded, to compare with its configuration, which may have been changed."""

    decoder: nn.Module
    config: Any
    name: str
    module: nn.Module
    layer_type: str | None
    rope_type: str
    inv_freq: Tensor

    def settings(self, said: RopeSettings) -> tuple[RopeSettings, tuple[str, str] | None]:
        """Return the settings in force, and what the configuration says instead, if anything."""
        length = getattr(self.module, "original_max_seq_len", None)  # of the configuration then
        same = length == getattr(self.config, LONGEST, None) and said.rope_type == "default"
        if same or type(length) is not int:
            length = said.target
        in_force = self._is_in_force(said)
        if in_force and (said.rope_type != "default" or length == said.target):
            return said, None
        base = self._base()
        if base is None and not in_force and self.rope_type == said.rope_type == "default":
            return said, None  # frequencies that were set on purpose
        what = f"max_position_embeddings {said.target}"
        cure = f"pass original_max_position_embeddings={said.target} if it was trained on them"
        now = said if base is None else unscaled(said, base, length)
        if not in_force:
            factor = "" if said.factor is None else f", factor {said.factor:g}"
            theta = said.parameters.get("rope_theta")
            what = f"rope_type {said.rope_type!r}{factor}, rope_theta {theta}"
            cure = f"call {patch_for(said, now)}"
        if self.rope_type != "default":
            now = replace(said, length=length, target=length)
            cure = "load the model with that configuration"
        why = "which is not in force, since a change after loading has no effect on the model"
        return now, (f"it says {what}, {why}", cure)

    def _is_in_force(self, said: RopeSettings) -> bool:
        """Whether a module that is built from the configuration now has these frequencies."""
        module: Any = self.module
        try:
            config = copy.deepcopy(module.config)  # some transformers functions add fields
            with torch.device("cpu"):
                built = type(module)(config)
        except Exception:
            return not hasattr(module, "rope_type") or self.rope_type == said.rope_type
        name = f"{self.layer_type}_inv_freq" if self.layer_type else "inv_freq"
        same = self._type_of(built) == self.rope_type
        if same and self.rope_type in _MOVING:
            return True
        if same and _are_equal(built.get_buffer(name), self.inv_freq):
            return True
        # Some decoders pass more than the configuration to a module.
        try:
            with torch.device("meta"):
                decoder = type(self.decoder)(copy.deepcopy(text_config(self.decoder)))
            other = self._type_of(decoder.get_submodule(self.name))
        except Exception:
            return False
        return other == self.rope_type != self._type_of(built)

    def _type_of(self, module: nn.Module) -> Any:
        kinds = getattr(module, "rope_type", "default")
        return kinds.get(self.layer_type) if isinstance(kinds, dict) else kinds

    def _base(self) -> float | None:
        """Return the base if these frequencies are unscaled and geometric."""
        if self.rope_type != "default" or len(self.inv_freq) < 2 or not 0 < self.inv_freq[1] < 1:
            return None
        base = float(f"{self.inv_freq[1].double().item() ** -len(self.inv_freq):.6g}")
        rotating = torch.where(self.inv_freq > 0, geometric(base, 2 * len(self.inv_freq)), 0.0)
        return base if _are_equal(rotating, self.inv_freq) else None


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether frequencies are equal up to the rounding of float32."""
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=ROUNDING, atol=0)


def softmax_scales(decoder: nn.Module, **changed: float) -> dict[nn.Module, float] | None:
    """Return layers whose softmax scale differs under changed ``rope_parameters``, and the scale.

    None: the decoder cannot be built from a configuration alone.
    """
    config = copy.deepcopy(text_config(decoder))
    config.rope_parameters = {**config.rope_parameters, **changed}
    try:
        with torch.device("meta"):
            built = dict(type(decoder)(config).named_modules())
    except Exception:
        return None
    found = {}
    for name, module in decoder.named_modules():
        old = module.__dict__.get("scaling")
        new = getattr(built.get(name), "scaling", None)
        if isinstance(old, float) and isinstance(new, float) and new != old:
            found[module] = new
    return found


def _base(decoder: nn.Module, base: Any, loaded: Tensor) -> float:
    if base is None:
        second = loaded[1].item() if len(loaded) > 1 else math.nan
        # Below it, the base would be too large for a float.
        if not 1e300 ** (-1 / len(loaded)) < second < 1:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: its configuration has no rope_theta, and inv_freq="
                f"[{', '.join(f'{one:g}' for one in loaded[:3].tolist())}, ...] are no frequencies "
                f"that fall from 1; if from_pretrained loaded the model, its _init_weights must "
                f"fill this buffer"
            )
        return second ** (-len(loaded))
    number = plain_number(base)
    if number is None or not 1 < number < math.inf:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: rope_theta={base!r} is no base of rotary frequencies, "
            f"which is a number above 1; correct rope_parameters in its configuration"
        )
    return float(number)


def _scaling(decoder: nn.Module, given: Any) -> float:
    try:
        number = float(given)  # of a tensor, too
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: attention_factor={brief(given)} is not a finite number; "
            f"correct rope_parameters in its configuration"
        )
    return number


def _loaded(decoder: nn.Module, module: Any, name: str, moving: bool) -> Tensor:
    """Return the frequencies that a buffer was loaded with, float32 on the CPU.

    They are rebuilt if the buffer is on the meta device, or was rounded by a cast to bfloat16 or
    float16, which a cast back does not undo. Other values were set on purpose and stay.
    """
    value = module.get_buffer(name).detach()
    found = None if value.is_meta else value.to("cpu", torch.float32, copy=True)
    whole = found is not None and value.dtype in (torch.float32, torch.float64)
    built = None
    error = "its configuration gives other values"
    try:
        config = copy.deepcopy(module.config)  # some transformers functions add fields
        built = rebuilt(module, config).get_buffer(name).detach()
    except Exception as raised:
        error = raised
    if built is not None and (found is None or _is_rounded(found, built) or (moving and not whole)):
        return built
    if found is not None and whole:
        return found
    raise UnsupportedModelError(
        f"{type(decoder).__name__}: {type(module).__name__}.{name} is {value.dtype} on "
        f"{value.device} and cannot be rebuilt ({error}); load the model with "
        f"from_pretrained(dtype=...) and patch it then, or put your own there in float32"
    )


def _is_rounded(found: Tensor, built: Tensor) -> bool:
    """Whether ``found`` equals ``built`` after casts to bfloat16 and float16, in any order."""
    if found.shape != built.shape:
        return False
    # Rounding is monotonic, so values in this range are rounded to within the rounded range.
    for casts in itertools.product((torch.bfloat16, torch.float16), repeat=3):  # enough casts
        least = built * (1 - ROUNDING)
        most = built * (1 + ROUNDING)
        for dtype in casts:
            least = least.to(dtype)
            most = most.to(dtype)
        if bool(((least.float() <= found) & (found <= most.float())).all()):
            return True
    return False


@contextmanager
def _gathered(model: nn.Module) -> Iterator[None]:
    """Gather every module's weights during its forward, as DeepSpeed's engine does.

    Needed before the engine exists. All processes must run the same forwards.
    """
    open_ones: list[Any] = []

    def enter(module: nn.Module, args: tuple) -> None:
        import deepspeed

        own = module.parameters(recurse=False)
        missing = [weight for weight in own if weight.numel() < size(weight)]
        open_ones.append(deepspeed.zero.GatheredParameters(missing))
        open_ones[-1].__enter__()

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        if open_ones:  # empty if an earlier pre-hook raised
            open_ones.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for module in model.modules():
            if any(hasattr(weight, "ds_id") for weight in module.parameters(recurse=False)):
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def size(weight: nn.Parameter) -> int:
    """Return the number of elements of a weight, partitioned or not."""
    return getattr(weight, "ds_numel", weight.numel())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Use evaluation mode inside a block, with ZeRO-3 weights gathered for each forward.

    Afterwards, every module returns to its previous mode.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with _gathered(model):
            yield
    finally:
        for module in training:
            module.training = True


def is_local(layer_type: str) -> bool:
    """Whether layers of this type have a sliding window."""
    return any(word in layer_type for word in _LOCAL)


def sees_window(config: Any, layer: nn.Module, window: int | None) -> bool:
    """Whether an attention layer has a sliding window; ``window``: its ``sliding_window``."""
    kinds = getattr(config, "layer_types", None)
    index = getattr(layer, "layer_idx", None)
    named = bool(kinds) and isinstance(index, int) and is_local(kinds[index])
    return named or window is not None


def _reach(config: Any, layer_type: str | None) -> tuple[bool, bool]:
    """Return whether only sliding-window layers use a site, and whether both kinds do."""
    if layer_type is not None:
        return is_local(layer_type), False
    names = ("sliding_window", "attention_window_size")
    windows = (whole_number(getattr(config, name, None)) for name in names)  # or damaged
    window = next(filter(None, windows), 0)
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if isinstance(kind, str)]
    kinds = [kind for kind in kinds if not any(word in kind for word in _NO_ATTENTION)]
    limited = [is_local(kind) for kind in kinds]
    if "use_sliding_window" in vars(config) and not config.use_sliding_window:
        return False, False
    if not limited:  # Phi-3's window is twice its context length
        return 0 < window < (rope_settings(config).target or math.inf), False
    return all(limited), any(limited) and not all(limited)
