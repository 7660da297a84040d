"""Puts a position map in force on a decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from rope_ext.errors import CacheError, OptionError, UnsupportedModelError
from rope_ext.methods import PositionMethod, Rope
from rope_ext.methods.geometry import Geometry
from rope_ext.position.attend import LAYER, NAME, Layer
from rope_ext.position.forward import Forward, keep
from rope_ext.position.layers import Head, find_heads
from rope_ext.position.plan import Plan
from rope_ext.position.tables import Turns
from rope_ext.rotary import calls, hooks
from rope_ext.rotary.sites import RotarySite, text_config
from rope_ext.under_way import here


class Mapping:
    """A position map in force on a decoder.

    Args:
        decoder: where.
        method: the map, resolved.
        rope: the trained embedding, after a frequency map if there is one.
        frequencies: inverse frequencies (float64) and scaling of each site.
        label: the patch in words; caches may only be continued under the same.
        precise: angles in float64, else in float32, as transformers computes them.
        kernel: as :func:`rope_ext.attention.attend` takes it.
        local_too: also layers with a limited window.
    """

    def __init__(
        self,
        decoder: nn.Module,
        method: PositionMethod,
        rope: Rope,
        frequencies: dict[RotarySite, tuple[torch.Tensor, float]],
        label: str,
        precise: bool,
        kernel: str,
        local_too: bool,
    ) -> None:
        self.method, self.rope, self.precise, self.kernel = method, rope, precise, kernel
        self.frequencies = frequencies
        self.bands = method.bands()
        self.stored = self.bands[-1].key
        self.key = (label, rope.length, precise, local_too)
        self.handles: list[Any] = []
        self._turns: dict[tuple, list[tuple[Geometry, Turns, Turns]]] = {}
        self._config = text_config(decoder)
        self._before = self._config._attn_implementation_internal
        if getattr(self._config, "output_attentions", False):  # allowed under "eager" only
            raise OptionError(
                f"config.output_attentions=True would keep transformers from saving a model under "
                f"{method.name}; set it to False and pass output_attentions=True to the model or "
                f"to generate, which then return the weights"
            )
        heads = find_heads(decoder, list(frequencies))
        self.windowed = 0
        if not local_too:
            self.windowed = sum(head is not None and head.local for head in heads.values())
            heads = {m: None if h is not None and h.local else h for m, h in heads.items()}
        if not any(heads.values()):
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: every layer with a rotary embedding sees a limited "
                f"window only, so {method.name} cannot lengthen its reach; pass "
                f"sliding_layers='scale' to change positions within the window all the same"
            )
        self.heads = heads

    @property
    def current(self) -> Forward | None:
        """The forward under way in this thread."""
        return next((f for f in reversed(here.positions) if f.mapping is self), None)

    def __getstate__(self) -> dict[str, Any]:
        made = {"bands", "stored", "_turns"}  # functions, and what follows from them
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _turns={})
        self.bands = self.method.bands()
        self.stored = self.bands[-1].key

    def install(self, decoder: nn.Module) -> None:
        """Put hooks and the attention function in place."""
        for site in self.frequencies:
            hook = _RotaryHook(self, site)
            self.handles.append(site.module.register_forward_hook(hook, with_kwargs=True))
        if self.windowed and any(site.shared for site in self.frequencies):
            self.handles += hooks.keep_native(decoder, list(self._config.layer_types))
        for module, head in self.heads.items():
            module.__dict__[LAYER] = Layer(self, head)
        self.handles.append(decoder.register_forward_pre_hook(self.begin, with_kwargs=True))
        self.handles.append(
            decoder.register_forward_hook(self.end, with_kwargs=True, always_call=True)
        )
        self._config._attn_implementation_internal = NAME  # the public name sets sub-configurations

    def notes(self) -> list[str]:
        """Sentences for ``describe``."""
        mapped = sum(head is not None for head in self.heads.values())
        notes = [f"positions: changed in {mapped} of {len(self.heads)} attention layers"]
        if self.windowed:
            notes.append(f"sliding layers: {self.windowed} see a limited window and stay")
        return notes

    def undo(self) -> None:
        """Take hooks and attention function back."""
        for handle in self.handles:
            handle.remove()
        for module in self.heads:
            module.__dict__.pop(LAYER, None)
        if self._config._attn_implementation == NAME:  # else somebody has chosen another since
            self._config._attn_implementation_internal = self._before

    @torch.compiler.disable
    def begin(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Decoder pre-hook."""
        name = self.method.name
        calls.refuse_sharded(name)
        if torch.compiler.is_exporting():
            raise UnsupportedModelError(
                f"{name} follows the positions of every sequence as it comes, which an exported "
                f"graph cannot do; use a frequency method such as 'yarn'"
            )
        if self._config._attn_implementation != NAME:
            raise UnsupportedModelError(
                f"the attention implementation was set to "
                f"{self._config._attn_implementation!r} after the model was patched with {name}, "
                f"which needs its own; call rope_ext.unpatch(model) first, or patch again with "
                f"replace=True"
            )
        given = {**dict(zip(calls.parameters(type(decoder)), args, strict=False)), **kwargs}
        cache = given.get("past_key_values")
        if given.get("cache") is not None or (cache is not None and not isinstance(cache, Cache)):
            raise CacheError(
                f"continuous batching keeps keys in pages, and {name} needs them in order; "
                f"generate with a DynamicCache or a StaticCache, or use a frequency method such "
                f"as 'yarn'"
            )
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        mask = given.get("attention_mask")
        if isinstance(mask, dict):  # one for each kind of layer, made before the forward
            mask = next(iter(mask.values()), None)
        if isinstance(mask, Plan):
            mask = mask.padding
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            mask = None
        filled = 0 if cache is None else int(cache.get_seq_length())
        rows, length = tokens.shape[:2]
        weights = bool(given.get("output_attentions"))
        here.positions.append(Forward(self, rows, length, filled, cache, mask, weights))

    @torch.compiler.disable
    def end(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Decoder hook: a cache that the decoder made itself gets the positions too."""
        forward = self.current
        if forward is None:  # refused before it began
            return
        here.positions.remove(forward)
        for part in output if isinstance(output, tuple) else (output,):
            cache = getattr(part, "past_key_values", part)
            if isinstance(cache, Cache) and forward.log is not None:
                keep(cache, forward.log)

    def turns(self, head: Head) -> list[tuple[Geometry, Turns, Turns]]:
        """For every band, the turns of queries and of keys."""
        key = (head.site, tuple(head.pair.tolist()))
        if key not in self._turns:
            dtype = torch.float64 if self.precise else torch.float32
            inv_freq = self.frequencies[head.site][0][head.pair].to(dtype)
            self._turns[key] = [
                (
                    band.geometry,
                    Turns(band.query, self.stored, inv_freq),
                    Turns(band.key, self.stored, inv_freq),
                )
                for band in self.bands
            ]
        return self._turns[key]

    def temperature(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """``[tokens]``."""
        made = self.method.temperature(t.double().clamp(min=0), self.rope)
        return None if made is None else made.to(dtype)


class _RotaryHook:
    """Forward hook of a rotary module: turns by the position under which keys are cached."""

    def __init__(self, mapping: Mapping, site: RotarySite) -> None:
        self.mapping, self.site = mapping, site

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        forward = self.mapping.current
        if forward is None or not self.site.called(args, kwargs):
            return None
        forward.locate(kwargs["position_ids"] if "position_ids" in kwargs else args[1])
        result = forward.embeddings(self.site, output)
        if self.site.shared:
            first = result if isinstance(result, torch.Tensor) else result[0]
            hooks.attach_native(first, output)
        return result
