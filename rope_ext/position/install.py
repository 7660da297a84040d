"""Installs a position map on a decoder: hooks, learned modules and the attention function."""

import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from rope_ext.config.record import option_texts
from rope_ext.encodings import Heads
from rope_ext.errors import CacheError, OptionError, UnsupportedModelError
from rope_ext.position import direction, inputs, layers, learned, paged, steps
from rope_ext.position.attend import NAME
from rope_ext.position.forward import SPARE, PositionForward, require_known, shorten
from rope_ext.position.map import PositionMap
from rope_ext.position.masks import BatchMask, shown
from rope_ext.rotary import context, hooks
from rope_ext.rotary.sites import RotarySite, text_config
from rope_ext.rotary.swapping import Changes, set_attribute


class Installed(context.Tracker):
    """A position map installed on a decoder, with its forward hooks.

    ``mapped`` are the attention layers that it changes, ``notes`` are sentences for ``describe``.
    If ``follow`` is set, the others attend as trained, but with the map's rotation. ``generates``:
    whether the decoder is part of a model that generates text.
    """

    def __init__(
        self,
        decoder: nn.Module,
        position_map: PositionMap,
        changes: Changes,
        follow: bool = False,
        generates: bool = False,
    ) -> None:
        name = position_map.method.name
        self.patched_by = self.map = position_map
        self._config = text_config(decoder)
        if getattr(self._config, "output_attentions", False):  # only allowed with "eager"
            raise OptionError(
                f"config.output_attentions=True would keep transformers from saving a model under "
                f"{name}; set it to False and pass output_attentions=True to the model or generate"
            )
        context.refuse_presses(decoder.modules(), name, position_map.instead)
        sites = list(position_map.frequencies)
        layouts = layers.find_layouts(decoder, sites, position_map.instead)
        rotated = {module: layout for module, layout in layouts.items() if layout is not None}
        within = self._within_reach(decoder, rotated)
        self.mapped = _chosen(decoder, within, position_map)
        self.both = self._direction(decoder, [rotated[module] for module in self.mapped], generates)
        kept = [module for module in rotated if module not in self.mapped]
        if position_map.window is not None and not kept:
            raise OptionError(
                f"{name}: no layer of {type(decoder).__name__} is left for the window; choose "
                f"another every= or start=, or patch with 'nope' for no positions at all"
            )
        self._modules = list(layouts)
        self._short = [*map(_number, kept)]
        self.notes = self._notes(within, len(rotated) - len(within), follow)
        self._put_layers(decoder, layouts=layouts, kept=kept, changes=changes)
        kept_sites: set[RotarySite] = set()
        if not follow:
            self._keep_rotations(decoder, kept=kept, rotated=rotated, changes=changes)
            kept_sites = {rotated[module].site for module in kept}
        self._find_reruns(list(layouts), sites, changes)
        for site in sites:
            hook = partial(self.rotate, site, site in kept_sites)
            changes.append(site.module.register_forward_hook(hook, with_kwargs=True).remove)
        self.track(decoder, changes)
        self._attend(changes)
        self._enter(decoder, rotated, changes)

    def _within_reach(
        self, decoder: nn.Module, rotated: dict[nn.Module, layers.Layout]
    ) -> list[nn.Module]:
        """Return the attention modules whose positions the map may change."""
        follow = self.map.include_sliding
        within = [module for module, layout in rotated.items() if follow or not layout.local]
        if not within:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: every layer with a rotary embedding sees a limited "
                f"window only, so {self.map.method.name} cannot lengthen its reach; pass "
                f"sliding_layers='scale' to change positions within the window all the same"
            )
        return within

    def _keep_rotations(
        self,
        decoder: nn.Module,
        kept: list[nn.Module],
        rotated: dict[nn.Module, layers.Layout],
        changes: Changes,
    ) -> None:
        """Give unchanged layers the rotation as it was trained."""
        for module in kept:
            names = context.parameters(type(module))
            if "position_embeddings" not in names:
                raise UnsupportedModelError(
                    f"{type(decoder).__name__}: {type(module).__name__} takes no "
                    f"position_embeddings, so it cannot be kept as it was beside patched layers; "
                    f"use sliding_layers='scale', and patch every layer"
                )
            place = names.index("position_embeddings")
            hook = partial(self.keep, rotated[module].site, place)
            changes.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _find_reruns(
        self, modules: list[nn.Module], sites: list[RotarySite], changes: Changes
    ) -> None:
        """Let attention modules that rotate by themselves find the forward of a rerun."""
        rotary = {site.module for site in sites}
        for module in modules:
            if not rotary.isdisjoint(module.modules()):
                before = module.register_forward_pre_hook(self.enter_again, with_kwargs=True)
                after = module.register_forward_hook(self.leave_again, always_call=True)
                changes += [before.remove, after.remove]

    def _attend(self, changes: Changes) -> None:
        """Make the decoder use our attention function."""
        changes.append(self._give_back)
        self._before = self._config._attn_implementation_internal
        self._config._attn_implementation_internal = NAME  # the public name sets sub-configurations

    def _enter(
        self, decoder: nn.Module, rotated: dict[nn.Module, layers.Layout], changes: Changes
    ) -> None:
        """Attach encodings that change hidden states, or compute positions from them."""
        encoding = self.map.encoding
        if encoding.entered:
            self.notes.append(inputs.enter(decoder, self.map, changes))
        if encoding.computes_positions():
            mapped = {module: rotated[module] for module in self.mapped}
            inputs.enter_heads(decoder, self.map, layouts=mapped, changes=changes)

    def _direction(self, decoder: nn.Module, layouts: list[layers.Layout], generates: bool) -> bool:
        """Return whether the patched layers read the text in both directions, or raise."""
        position_map = self.map
        family = type(decoder).__name__
        named = position_map.named
        instead = position_map.instead
        if not any(layout.ahead for layout in layouts):
            return False
        direction.refuse(family, causal_only=position_map.causal_only, named=named, instead=instead)
        both = direction.reads_both_ways(self._config, {}, self.mapped)
        if not both or not all(layout.ahead for layout in layouts):
            why = f"{named} cannot tell in which calls, since is_causal of its layers is not False"
            raise direction.not_causal(family, why, instead)
        if direction.generates_from(self._config, generates):
            direction.refuse_generating(family, named, instead)
        return True

    def _give_back(self) -> None:
        if self._config._attn_implementation == NAME:  # not if it was changed meanwhile
            self._config._attn_implementation_internal = self._before

    def _put_layers(
        self,
        decoder: nn.Module,
        layouts: dict[nn.Module, layers.Layout | None],
        kept: list[nn.Module],
        changes: Changes,
    ) -> None:
        """Attach a :class:`steps.Layer` and learned modules to every attention module."""
        position_map = self.map
        encoding = position_map.encoding
        _ = position_map.query_span  # cached, since a graph could not
        projections: dict[nn.Module, layers.KeyProjection] = {}
        if encoding.projected:
            sites = list(position_map.frequencies)
            projections = layers.find_key_projections(decoder, sites, self.mapped)
        numbers: dict[tuple[layers.Layout, int | None], int] = {}
        for module, layout in layouts.items():
            window = position_map.window if module in kept else None
            if layout is None or (module in kept and window is None):  # attends as trained
                set_attribute(module, layers.LAYER, steps.Layer(position_map), changes=changes)
                continue
            owner = None
            if window is None:  # the map changes it
                if encoding.changes_logits():
                    owner = self._put_bias(
                        decoder, module=module, heads=layout.heads, changes=changes
                    )
                temperature = position_map.learned_temperature
                if temperature is not None:
                    scales = learned.HeadScales(temperature, layout.heads.count, module)
                    learned.put(module, learned.TEMPERATURE, scales, changes=changes)
            layer = steps.Layer(
                map=position_map,
                layout=layout,
                number=numbers.setdefault((layout, window), len(numbers)),
                window=window,
                biased=owner,
                keys=None if owner is None else projections.get(module),
            )
            set_attribute(module, layers.LAYER, layer, changes=changes)
            self._copy_tables(layer, layout.site)

    def _put_bias(
        self,
        decoder: nn.Module,
        module: nn.Module,
        heads: Heads,
        changes: Changes,
    ) -> nn.Module:
        """Attach the encoding's bias of an attention module; returns the module that has it."""
        encoding = self.map.encoding
        # A bias shared by all layers must not be in a layer, since FSDP gathers a layer's
        # parameters only while that layer runs.
        own = not encoding.shared and encoding.initial(Heads(1, 1, 1))
        owner = module if own else decoder
        there = getattr(owner, learned.BIAS, None)
        if there is None:
            bias = learned.DistanceBias(encoding, heads=heads, near=module)
            learned.put(owner, learned.BIAS, bias, changes=changes)
        elif heads.count != there.heads.count:
            raise UnsupportedModelError(
                f"the layers have different numbers of heads, and the bias of {encoding.name} is "
                f"one for all"
            )
        return owner

    def _copy_tables(self, layer: steps.Layer, site: RotarySite) -> None:
        """Copy the constants of a layer to its device, since graphs cannot cache a copy."""
        device = getattr(site.module, site.buffer).device
        if device.type == "meta":
            return
        self.map.inv_freq(site, device)
        context.cached_on_device(site.columns, "pair", device)
        bands = layer.rotations + (layer.rotations_both_ways if self.both else [])
        for band in bands:
            for rotation in (band.query, band.key):
                context.cached_on_device(rotation, rotation.cached, device)

    def batch(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``model.init_continuous_batching``."""
        return paged.initialize(self._require_attention, self.map.named, original, *args, **kwargs)

    def _require_attention(self) -> None:
        """Raise if the attention implementation was changed after the patch."""
        name = self.map.method.name
        attention = self._config._attn_implementation
        if attention != NAME:
            raise UnsupportedModelError(
                f"the attention implementation was set to {attention!r} after the patch with {name}"
                f", which needs its own; call rope_ext.unpatch(model), or patch with replace=True"
            )

    def _notes(self, within: list[nn.Module], windowed: int, follow: bool) -> list[str]:
        added = self.map.encoding
        mapped = self.mapped
        stay = self.map.method.kind == "rotation"
        what = "attention: by rope_ext" if stay else "positions: changed"
        notes = [f"{what} in {len(mapped)} of {len(self._modules)} attention layers"]
        if self.both:
            notes.append("direction: both; later keys have the negative distances of earlier ones")
        if len(mapped) < len(within) or self.map.layers is not None:
            named = ", ".join(map(str, sorted(map(_number, mapped))))
            notes.append(f"layers: {named}; the others keep the rotation as it was trained")
        if self.map.window is not None:
            notes.append(
                f"windows: {len(self._short)} layers attend to the last {self.map.window} tokens, "
                f"and a DynamicCache keeps {SPARE} others of them"
            )
        if added.changes_logits() and added != self.map.method:
            what = ", ".join([added.name, *option_texts(added)])
            notes.append(f"bias: {what}, added to the logits there by distance")
        if windowed:
            what = "are scaled along, as transformers does" if follow else "stay"
            notes.append(f"sliding layers: {windowed} see a limited window and {what}")
        return notes

    def begin(self, decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        super().begin(decoder, args, kwargs)
        if isinstance(context.current(self.map), paged.PagedForward):
            return args, {**kwargs, "cache": paged.RowCache()}
        return None

    def trace(self, given: dict[str, Any]) -> PositionForward | None:
        native = self._config._attn_implementation != NAME
        if native or self.both or not direction.is_causal(self._config, given):
            return None
        return steps.traced(self.map, given)

    @context.run_eagerly(steps.WHY)
    def start(self, given: dict[str, Any]) -> None:
        name = self.map.method.name
        context.refuse_sharded(name, self.map.instead)
        context.refuse_presses(self._modules, name, self.map.instead)
        self._require_attention()
        both = direction.reads_both_ways(self._config, given, self.mapped)
        if both:
            self._require_both_ways()
        if context.is_exporting():
            raise UnsupportedModelError(
                f"an exported program cannot hold this call of {name}, only some with an empty "
                f"cache or a StaticCache under torch.no_grad() (docs/limits.md)"
            )
        cache = context.cache_among(given)
        if cache is not None and not isinstance(cache, Cache):
            if both:
                raise self._not_continued()
            context.forward_context.stack.append(self._row(cache, given))
            return
        filled = 0 if cache is None else int(cache.get_seq_length())
        if both and filled:
            raise self._not_continued()
        if cache is not None and filled:
            require_known(cache, self.map)
        rows, tokens = context.shape_of(given)
        forward = PositionForward(
            patched_by=self.map, rows=rows, tokens=tokens, filled=filled, cache=cache, traced=False
        )
        forward.weights = bool(given.get("output_attentions"))
        forward.both = both
        forward.edges = given.get("cu_seq_lens_q") if both else None
        self._read_mask(forward, given)
        if cache is not None and not filled:
            shorten(cache, self._short, self.map.window)
        context.forward_context.stack.append(forward)

    def _read_mask(self, forward: PositionForward, given: dict[str, Any]) -> None:
        """Record the padding, or the mask of four axes, that a decoder was called with."""
        mask = context.mask_of_decoder(given.get("attention_mask"))
        of_transformers = mask if isinstance(mask, BatchMask) else None
        tensor: Any = mask if of_transformers is None else of_transformers.padding
        axes = tensor.ndim if isinstance(tensor, Tensor) else 0
        if axes == 4 and self.map.method.start_tokens and given.get("position_ids") is None:
            raise UnsupportedModelError(
                f"start_tokens of {self.map.method.name} are the first tokens of each text, which "
                f"a mask of four axes does not tell; give position_ids, too, or a mask of two axes"
            )
        if axes == 2:
            forward.pad(tensor)
        elif axes == 4:
            forward.show(shown(tensor))
        if of_transformers is not None:  # documents are known before positions are counted
            of_transformers.belong_to(forward)

    def _not_continued(self) -> CacheError:
        return CacheError(
            f"{self.map.method.name} reads this text in both directions, where earlier tokens "
            f"change with later ones, so a cache cannot be continued; give the whole text in one "
            f"call"
        )

    def _row(self, pages: Any, given: dict[str, Any]) -> paged.PagedForward:
        """Return the forward of a row of requests."""
        ends = given.get("cu_seq_lens_q")
        if ends is None or not hasattr(pages, "layer_to_allocator"):
            raise CacheError(
                f"{type(pages).__name__} is not a cache that {self.map.named} can continue; use "
                f"generate, generate_batch, or a DynamicCache or StaticCache"
            )
        rows, tokens = context.shape_of(given)
        row = paged.PagedForward(
            patched_by=self.map, rows=rows, tokens=tokens, filled=0, cache=None, traced=False
        )
        row.pages = pages
        row.ends = ends
        return row

    def _require_both_ways(self) -> None:
        """Raise if a call in both directions is not defined for this patch."""
        call = "a call with is_causal=False"
        named = self.map.named
        instead = self.map.instead
        direction.refuse(call, causal_only=self.map.causal_only, named=named, instead=instead)
        if self.map.encoding.sided and not self.both:
            why = f"{named} has learned parameters for earlier keys only"
            raise direction.not_causal(
                call, why, "set config.is_causal = False before the model is patched"
            )

    def finish(self, forward: PositionForward, output: Any) -> None:
        for cache in context.caches_in(output):
            # `start`, which no traced forward runs, has shortened the cache that was given.
            if isinstance(cache, Cache) and (forward.traced or cache is not forward.cache):
                forward.note(cache)
                shorten(cache, self._short, self.map.window)

    @context.as_forward
    def rotate(
        self, site: RotarySite, native: bool, _: nn.Module, args: tuple, kwargs: dict, output: Any
    ) -> Any:
        """Rotary module hook: rotates to the positions at which keys are cached."""
        positions = hooks.positions_given(site, args, kwargs)
        if positions is None:
            return None
        forward = context.current(self.map)
        if forward is None:  # the trained rotation would be another one, without an error
            raise inputs.run_by_itself(self.map, site.module)
        forward.locate(positions)
        if native:
            forward.shared.native[site.name, site.layer_type] = hooks.rotation(
                site=site,
                t=positions,
                inv_freq=site.loaded,
                scaling=site.scaling,
                precise=self.map.precise,
                like=output,
            )
        return forward.embeddings(site, output)

    @context.as_forward
    def enter_again(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Pre-hook of an attention layer with a rotary module: finds the forward of a rerun.

        Gradient checkpointing reruns the rotary module, too, which gets no mask to find it by.
        """
        if context.current(self.map) is None:
            again = copy.copy(inputs.forward_of(self.map, module, args=args, kwargs=kwargs))
            again.again = True
            context.forward_context.stack.append(again)

    @context.as_forward
    def leave_again(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Hook of that layer, also after an error."""
        forward = context.current(self.map)
        if forward is not None and forward.again:
            context.forward_context.stack.remove(forward)

    @context.as_forward
    def keep(
        self, site: RotarySite, place: int, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        """Pre-hook of an attention layer that keeps the trained rotation.

        ``place`` is the index of ``position_embeddings`` among the layer's arguments.
        """
        # By the mask, since gradient checkpointing reruns a layer when no forward is in progress.
        forward = inputs.forward_of(self.map, module, args=args, kwargs=kwargs)
        native = forward.shared.native[site.name, site.layer_type]
        if "position_embeddings" in kwargs:
            return args, {**kwargs, "position_embeddings": native}
        return (*args[:place], native, *args[place + 1 :]), kwargs


def _chosen(
    decoder: nn.Module, modules: list[nn.Module], position_map: PositionMap
) -> list[nn.Module]:
    """Return the attention modules that ``layers=`` or, by default, the encoding selects."""
    layers = position_map.layers
    encoding = position_map.encoding
    family = type(decoder).__name__
    known = {number for number in map(_number, modules) if number >= 0}
    if layers is None:
        layers = encoding.default_layers(text_config(decoder).num_hidden_layers)
        if layers is not None and not encoding.by_layer:
            layers = tuple(known.intersection(layers)) or None
    if layers is None:
        return modules
    if isinstance(layers, str):
        every = int("".join(filter(str.isdigit, layers)))
        wanted = {number for number in known if (number + 1) % every == 0}
    else:
        wanted = set(layers)
    if not wanted or not wanted <= known:
        shown = layers if isinstance(layers, str) else list(layers)
        absent = ", ".join(map(str, sorted(wanted - known))) or "none of them"
        choose = "choose among these (sliding layers with sliding_layers='scale')"
        if position_map.layers is None:
            choose = (
                "choose every= and start= that meet only these, or patch with 'nope' and layers="
            )
        raise OptionError(
            f"layers={shown!r}: {family} has a rotation to change in layers "
            f"{', '.join(map(str, sorted(known)))}, and {absent} is asked for; {choose}"
        )
    return [module for module in modules if _number(module) in wanted]


def _number(module: nn.Module) -> int:
    """Return the index of an attention module's decoder layer; -1 if unknown."""
    number = getattr(module, "layer_idx", None)
    return number if isinstance(number, int) else -1
