"""Installs a position map on a decoder (hooks and the attention function), and removes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from rope_ext.config.record import option_texts
from rope_ext.encodings import Encoding, Heads
from rope_ext.errors import CacheError, OptionError, UnsupportedModelError
from rope_ext.position import bias, head_positions, head_scales, inputs, tensors
from rope_ext.position.attend import LAYER, NAME, AttentionLayer, MappedLayer
from rope_ext.position.forward import PositionForward, keys_of, whole
from rope_ext.position.layers import (
    KeyProjection,
    LayerInput,
    Layout,
    chosen_layers,
    find_inputs,
    find_key_projections,
    find_layouts,
    layer_number,
)
from rope_ext.position.map import PositionMap
from rope_ext.position.masks import BatchMask, shown
from rope_ext.position.window_cache import SPARE, shorten
from rope_ext.rotary import calls, hooks
from rope_ext.rotary.context import (
    cache_among,
    caches_in,
    current,
    enter,
    forget_failed_exports,
    is_traced,
    leave,
    run_eagerly,
)
from rope_ext.rotary.device_cache import cached_on_device
from rope_ext.rotary.sites import RotarySite, text_config
from rope_ext.rotary.third_party import refuse_presses


def install(decoder: nn.Module, position_map: PositionMap) -> Installed:
    """Install a position map on a decoder; the decoder does not change if an error is raised.

    Raises:
        OptionError: the configuration does not allow it.
        UnsupportedModelError: the layers do not allow it.
    """
    installed = Installed(decoder, position_map)
    try:
        installed.put(decoder)
        if position_map.computes_positions:
            head_positions.prove(decoder)
    except BaseException:
        installed.undo()
        raise
    return installed


class Installed:
    """A position map on a decoder: what was installed, and how to remove it.

    Args:
        decoder: the decoder.
        position_map: the map that rotates its tokens.
    """

    def __init__(self, decoder: nn.Module, position_map: PositionMap) -> None:
        self.map, self.decoder, name = position_map, decoder, position_map.method.name
        self.handles: list[Any] = []
        self._config = text_config(decoder)
        self._before = self._config._attn_implementation_internal
        if getattr(self._config, "output_attentions", False):  # allowed under "eager" only
            raise OptionError(
                f"config.output_attentions=True would keep transformers from saving a model under "
                f"{name}; set it to False and pass output_attentions=True to the model or to "
                f"generate, which then return the weights"
            )
        refuse_presses(decoder.modules(), name, position_map.instead)
        layouts = find_layouts(decoder, list(position_map.frequencies), position_map.instead)
        rotated = {module: layout for module, layout in layouts.items() if layout is not None}
        reach = [m for m, one in rotated.items() if position_map.include_sliding or not one.local]
        self.windowed = len(rotated) - len(reach)
        if not reach:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: every layer with a rotary embedding sees a limited "
                f"window only, so {name} cannot lengthen its reach; pass "
                f"sliding_layers='scale' to change positions within the window all the same"
            )
        self.layers = position_map.layers
        if self.layers is None:
            self.layers = _default_layers(decoder, position_map.encoding, reach)
        self.mapped = chosen_layers(decoder, reach, self.layers)
        self.kept = [module for module in rotated if module not in self.mapped]
        if position_map.window is not None and not self.kept:
            raise OptionError(
                f"{name}: every layer of {type(decoder).__name__} that rotates would lose its "
                f"rotation, and none is left for the window; choose another every= or start=, or "
                f"patch with 'nope' for no positions at all"
            )
        self._stay = {module: rotated[module] for module in self.kept}
        self.layouts = {**layouts, **dict.fromkeys(self.kept)}
        self._names = calls.parameters(type(decoder))
        self._projections: dict[nn.Module, KeyProjection] = {}
        if position_map.encoding is not None and position_map.encoding.projected:
            sites = list(position_map.frequencies)
            self._projections = find_key_projections(decoder, sites, self.mapped)
        self._inputs: dict[nn.Module, LayerInput] = {}
        if position_map.computes_positions:
            self._inputs = find_inputs(decoder, list(position_map.frequencies), self.mapped)

    def put(self, decoder: nn.Module) -> None:
        """Install hooks and the attention function."""
        for site in self.map.frequencies:
            hook = _RotaryHook(self.map, site, bool(self.kept))
            self.handles.append(site.module.register_forward_hook(hook, with_kwargs=True))
        self.handles += hooks.keep_native(decoder, self.kept)
        distinct = list(dict.fromkeys(self.layouts.values()))
        for module, layout in self.layouts.items():
            layer, window = AttentionLayer(self.map), self.map.window
            if layout is not None:
                rotated = tensors.rotations_of(self.map, distinct.index(layout), layout)
                biased = self._biased(module, layout)
                layer = MappedLayer(self.map, layout, rotated, biased)
                if self.map.learned_temperature is not None:
                    head_scales.add(module, self.map.learned_temperature, layout.heads.count)
            elif window is not None and module in self.kept:
                stays = self._stay[module]
                rotated = tensors.rotations_of(self.map, len(distinct), stays, window)
                layer = MappedLayer(self.map, stays, rotated, window=window)
            module.__dict__[LAYER] = layer
        self.handles.append(decoder.register_forward_pre_hook(self.begin, with_kwargs=True))
        self.handles.append(
            decoder.register_forward_hook(self.end, with_kwargs=True, always_call=True)
        )
        self._copy_constants([layout for layout in distinct if layout is not None])
        self._config._attn_implementation_internal = NAME  # the public name sets sub-configurations
        if self.map.encoding is not None and self.map.encoding.entered:
            self.handles += inputs.enter(decoder, self.map)
        if self.map.computes_positions:
            mapped = {m: layout for m in self.mapped if (layout := self.layouts[m]) is not None}
            self.handles += head_positions.enter(self.map, mapped, self._inputs)

    def _copy_constants(self, layouts: list[Layout]) -> None:
        """Copy constants of every forward to its device, since a graph could not cache the copy."""
        _ = self.map.reach  # cached for the same reason
        for site in self.map.frequencies:
            device = getattr(site.module, site.buffer).device
            if device.type != "meta":
                self.map.inv_freq(site, device)
                cached_on_device(site.columns, "pair", device)
                for layout in (one for one in layouts if one.site is site):
                    for _, *both in self.map.rotations(layout):
                        for rotations in both:
                            rotations.copy_to(device)

    def _biased(self, module: nn.Module, layout: Layout) -> nn.Module | None:
        """Add a bias to a layer, or one for all layers to the decoder; returns its parent module.

        A bias that all layers share must not be part of a layer, since FSDP gathers the parameters
        of a layer only while that layer runs. None if the encoding does not change logits.
        """
        encoding = self.map.encoding
        if encoding is None or not encoding.changes_logits():
            return None
        own = not encoding.shared and encoding.initial(Heads(1, 1, 1), self.map.rope)
        owner = module if own else self.decoder
        there = getattr(owner, bias.NAME, None)
        if there is None:
            like = bias.like_weights(module)
            made = bias.DistanceBias(encoding, layout.heads, self.map.rope, like)
            made.projection = self._projections.get(module)
            owner.add_module(bias.NAME, made)
        elif layout.heads.count != there.heads.count:
            raise UnsupportedModelError(
                f"the layers have different numbers of heads, and the bias of {encoding.name} is "
                f"one for all"
            )
        return owner

    def unbatched(self) -> str:
        """Why continuous batching is refused, and what to do."""
        return (
            f"continuous batching (generate_batch) keeps keys in pages, which attention under "
            f"{self.map.named} cannot read; call generate with a padded batch, whose cache is a "
            f"DynamicCache or a StaticCache, or {self.map.instead}"
        )

    def notes(self) -> list[str]:
        """Sentences for ``describe``."""
        stay = self.map.method.kind == "rotation"
        what = "attention: by rope_ext" if stay else "positions: changed"
        notes = [f"{what} in {len(self.mapped)} of {len(self.layouts)} attention layers"]
        if self.layers is not None:
            numbers = (layer_number(module) for module in self.mapped)
            named = ", ".join(map(str, sorted(n for n in numbers if n is not None)))
            notes.append(f"layers: {named}; the others keep the rotation as it was trained")
        if self.map.window is not None:
            notes.append(
                f"windows: {len(self.kept)} layers attend to the last {self.map.window} tokens, "
                f"and a DynamicCache keeps {SPARE} others of them"
            )
        added = self.map.encoding
        if added is not None and added != self.map.method:
            what = ", ".join([added.name, *option_texts(added)])
            notes.append(f"bias: {what}, added to the logits there by distance")
        if self.map.encoding is not None and self.map.encoding.entered:
            notes.append(inputs.note(self.decoder))
        if self.windowed:
            notes.append(f"sliding layers: {self.windowed} see a limited window and stay")
        return notes

    def undo(self) -> None:
        """Remove hooks and the attention function."""
        for handle in self.handles:
            handle.remove()
        self.decoder._modules.pop(bias.NAME, None)
        for module in self.layouts:
            module.__dict__.pop(LAYER, None)
            for name in (bias.NAME, head_positions.NAME, head_scales.NAME):
                module._modules.pop(name, None)
        inputs.leave(self.decoder)
        if self._config._attn_implementation == NAME:  # else another one was chosen meanwhile
            self._config._attn_implementation_internal = self._before

    def begin(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Decoder pre-hook."""
        if torch.is_grad_enabled():  # an optimizer step may have left the bounds
            self._clamp()
        forget_failed_exports()
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        traced = tensors.traced(self.map, decoder, given) if self.traceable() else None
        if traced is None:
            self._begin(given)
        else:
            enter(traced)

    def _clamp(self) -> None:
        encoding = self.map.encoding
        if encoding is None or not encoding.bounds:
            return
        for module in self.mapped:
            for part in getattr(module, bias.NAME).modules():
                if isinstance(part, bias.Learning):
                    part.clamp()

    def traceable(self) -> bool:
        """Whether a graph is being made, and no error has to be raised eagerly."""
        return (
            torch.compiler.is_compiling()
            and not calls.is_sharded()
            and self._config._attn_implementation == NAME
        )

    @run_eagerly(tensors.WHY)
    def _begin(self, given: dict[str, Any]) -> None:
        name = self.map.method.name
        calls.refuse_sharded(name, self.map.instead)
        refuse_presses(self.layouts, name, self.map.instead)
        if self._config._attn_implementation != NAME:
            raise UnsupportedModelError(
                f"the attention implementation was set to "
                f"{self._config._attn_implementation!r} after the model was patched with {name}, "
                f"which needs its own; call rope_ext.unpatch(model) first, or patch again with "
                f"replace=True"
            )
        if calls.is_exporting():
            raise UnsupportedModelError(
                f"an exported program cannot hold this call of {name}: position methods are "
                f"exported with an empty cache or a StaticCache, with an attention mask under "
                f"torch.no_grad() only, and encodings that do more than add by distance for a few "
                f"tokens at a time, or not at all (docs/limits.md); use a frequency method such "
                f"as 'yarn'"
            )
        cache = cache_among(given)
        if cache is not None and not isinstance(cache, Cache):
            raise CacheError(self.unbatched())
        tokens: Any = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        mask, weights = given.get("attention_mask"), bool(given.get("output_attentions"))
        if isinstance(mask, dict):  # one per kind of layer, made before the forward
            mask = next(iter(mask.values()), None)
        made = mask if isinstance(mask, BatchMask) else None
        padding: Any = mask if made is None else made.padding
        dimensions = padding.ndim if isinstance(padding, torch.Tensor) else 0
        own = shown(padding) if dimensions == 4 else None
        rows, length = tokens.shape[:2]
        filled = 0 if cache is None else int(cache.get_seq_length())
        if not filled:
            self._shorten(cache)
        if cache is not None:
            self._require(cache, filled, length)
        padding = padding if dimensions == 2 else None
        forward = PositionForward(
            self.map, rows, length, filled, cache, False, padding, weights=weights, shown=own
        )
        if made is not None:  # documents are known before positions are counted
            made.belong_to(forward)
        enter(forward)

    def _require(self, cache: Cache, filled: int, tokens: int) -> None:
        """Raise CacheError unless a cache can be continued by so many tokens."""
        layer, known = whole(cache), keys_of(cache)
        if layer is not None and filled + tokens > layer.max_cache_len:
            raise CacheError(
                f"this static cache has room for {layer.max_cache_len} tokens, and with those of "
                f"this forward there would be {filled + tokens}; make one with a larger "
                f"max_cache_len"
            )
        if not filled:
            return
        if known is None:
            raise CacheError(
                f"this cache was begun before the model was patched with {self.map.method.name} "
                f"(or by prefix tuning), so its keys carry other rotations; start with an empty "
                f"cache, or use a frequency method such as 'yarn'"
            )
        if known.patch != self.map.key:
            raise CacheError(
                f"this cache was begun under another patch ({known.patch[0]}) than the one in "
                f"force ({self.map.key[0]}); start with an empty cache"
            )
        if known.counted is not None and filled > known.counted:
            raise CacheError(
                f"the position ids of the tokens in this cache did not count one by one, so "
                f"{self.map.method.name} cannot continue it; start with an empty cache, or run "
                f"all tokens in one forward"
            )

    def end(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Decoder hook: notes on a cache that the decoder created, too, what its keys are."""
        context = current(self.map)
        if context is None or not context.traced:
            self._end(output)
            return
        leave(context)
        for cache in caches_in(output):
            if isinstance(cache, Cache):
                context.note(cache)

    @run_eagerly(tensors.WHY)
    def _end(self, output: Any) -> None:
        forward = current(self.map)
        if forward is None:  # an error was raised before it began
            return
        leave(forward)
        for cache in caches_in(output):
            if isinstance(cache, Cache) and cache is not forward.cache:
                forward.note(cache)
                self._shorten(cache)

    def _shorten(self, cache: Any) -> None:
        """Let a cache keep what layers with a window will attend to."""
        if self.map.window is not None:
            numbers = [layer_number(module) for module in self.kept]
            shorten(cache, [n for n in numbers if n is not None], self.map.window)


def _default_layers(
    decoder: nn.Module, encoding: Encoding | None, modules: list[nn.Module]
) -> tuple[int, ...] | None:
    """The layers that an encoding changes by default, of those of ``modules``; None: all."""
    if encoding is None:
        return None
    chosen = encoding.default_layers(text_config(decoder).num_hidden_layers)
    if chosen is None:
        return None
    numbers = {layer_number(module) for module in modules}
    if encoding.by_layer:
        known = None not in numbers  # if not, choosing them raises an error that names them
        if known and (not chosen or set(chosen) - numbers):
            raise _no_such_layers(decoder, encoding, chosen, numbers)
        return chosen
    found = tuple(number for number in chosen if number in numbers)
    return found if found and len(found) < len(modules) else None


def _no_such_layers(
    decoder: nn.Module, encoding: Encoding, chosen: tuple[int, ...], rotating: set[int | None]
) -> OptionError:
    given, family = encoding.options(), type(decoder).__name__
    there = ", ".join(str(number) for number in sorted(n for n in rotating if n is not None))
    layers = f"layers {', '.join(map(str, chosen))}" if chosen else "none of its layers"
    return OptionError(
        f"{encoding.name} with every={given['every']}, start={given['start']} takes the rotation "
        f"of {layers}, and {family} has a rotation to take in layers {there}; choose every= and "
        f"start= that meet only these, or patch with 'nope' and layers=, which has no windows"
    )


class _RotaryHook:
    """Forward hook of a rotary module: rotates to the position at which keys are cached."""

    def __init__(self, position_map: PositionMap, site: RotarySite, native: bool) -> None:
        self.map, self.site, self.native = position_map, site, native
        inv_freq, scaling = position_map.frequencies[site]
        # The module itself rotates by the values that were written to it.
        self.written = scaling != site.scaling or not torch.equal(inv_freq.float(), site.loaded)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if is_traced(self.map):
            return self._rotated(current(self.map), args, kwargs, output)
        return self._rotation(args, kwargs, output)

    @run_eagerly(tensors.WHY)
    def _rotation(self, args: tuple, kwargs: dict, output: Any) -> Any:
        return self._rotated(current(self.map), args, kwargs, output)

    def _rotated(self, forward: Any, args: tuple, kwargs: dict, output: Any) -> Any:
        if forward is None or not self.site.called(args, kwargs):
            return None
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        forward.locate(positions)
        result = forward.embeddings(self.site, output)
        if self.native:
            site, native = self.site, output
            if self.written:
                given = site.loaded, site.scaling, self.map.precise
                native = hooks.rotation(site, positions, *given, output)
            result = hooks.with_native(result, native)
        return result
