"""Implements ``fit``, which initializes an encoding so that attention stays close to RoPE's.

With the queries and keys that the original model computes on a text, each layer minimizes

    sum_ij  -w_ij ln softmax_j(logit_ij)

where ``w`` are the attention weights of the original model and the logits are those of the
encoding. This is their Kullback-Leibler divergence, up to a constant.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from rope_ext.encodings import Encoding, Heads
from rope_ext.errors import NotPatchedError, OptionError, brief
from rope_ext.methods import Method, all_encodings, build_method
from rope_ext.methods.rope import whole_number
from rope_ext.patching import Patch, current_patch, unpatched
from rope_ext.position.attend import NAME
from rope_ext.position.layers import LAYER
from rope_ext.position.learned import BIAS, DistanceBias
from rope_ext.position.steps import Dense, Layer
from rope_ext.rotary.context import attending
from rope_ext.rotary.sites import evaluating, text_decoder, vocabulary_of

QUERIES = 64
"""Number of evenly spaced queries to compare in each row."""

Model = TypeVar("Model", bound=nn.Module)


class _Observed(NamedTuple):
    """One layer's attention over one row of text."""

    dense: Dense  # the call without the encoding; queries and keys in float32
    queries: slice  # the queries to compare
    weights: torch.Tensor  # the target, [1, heads, queries, keys]
    module: nn.Module  # the attention module
    layer: Layer  # what the patch stores on it


def fit(
    model: Model, input_ids: torch.Tensor, *, steps: int = 300, learning_rate: float = 0.05
) -> Model:
    """Fit the encoding that ``model`` was patched with to the RoPE that it replaced.

    A fresh patch starts from generic values. This sets the encoding's parameters so that, on the
    given text, every layer attends as closely as possible to the original model. Parameters
    that do not affect weights, such as the vectors that Shaw's encoding adds to values, become 0.
    Nothing else is trained, and no random numbers are used. Memory is linear in the row length.

    Call it after :func:`rope_ext.patch`, before an adapter is added or the model is wrapped.

    Args:
        model: patched with an encoding that has parameters in the layers and changes the logits.
        input_ids: tokens of a text, int64, ``[rows, tokens]``, without padding, at most the trained
            length; a few rows of the trained length are enough.
        steps: number of steps of the optimizer, each on one row.
        learning_rate: initial learning rate of Adam, with cosine decay to 0.

    Returns ``model`` itself. Raises NotPatchedError if it is not patched, and OptionError if the
    patch has nothing to fit, or an argument is not valid.
    """
    state = current_patch(model)
    if state is None:
        raise NotPatchedError("this model is not patched; call rope_ext.patch(model, 't5') first")
    _check(state, input_ids, steps, learning_rate=learning_rate)
    decoder = text_decoder(model)
    layers = _layers(decoder)
    parts = _parts(layers)
    # A caller may be in inference mode, whose tensors take no gradients.
    with torch.inference_mode(False):
        with torch.no_grad(), unpatched(model), evaluating(decoder):
            rows = [_observe(decoder, layers, row) for row in input_ids]
        # Layers may share their parameters: each part is fitted once, to all of its layers.
        fitted = {part: copy.deepcopy(part) for part in dict.fromkeys(parts.values())}
        values = [value for part in fitted.values() for value in part.parameters()]
        for value in values:
            # Adam's last steps are smaller than bfloat16 can add.
            value.data = value.data.float()
            value.requires_grad_()
        optimizer = torch.optim.Adam(values, learning_rate)
        schedule = CosineAnnealingLR(optimizer, steps)
        with torch.enable_grad():
            for step in range(steps):
                optimizer.zero_grad()
                for module, part in parts.items():
                    _loss(rows[step % len(rows)][module], fitted[part]).backward()
                optimizer.step()
                schedule.step()
        with torch.no_grad():
            for part, own in fitted.items():
                for parameter, value in zip(part.parameters(), own.parameters(), strict=True):
                    # Without a gradient, it does not affect weights.
                    parameter.copy_(torch.zeros_like(value) if value.grad is None else value)
                part.clamp()
    return model


def _layers(decoder: nn.Module) -> dict[nn.Module, Layer]:
    """Return what the patch stores on each attention layer with parameters of an encoding."""
    return {
        module: module.__dict__[LAYER]
        for module in decoder.modules()
        if getattr(module.__dict__.get(LAYER), "biased", None) is not None
    }


def _parts(layers: Mapping[nn.Module, Layer]) -> dict[nn.Module, Any]:
    """Return the parameters of each layer, which may be the same for all; raises OptionError."""
    parts = {module: getattr(layer.biased, BIAS) for module, layer in layers.items()}
    if not all(isinstance(part, DistanceBias) for part in parts.values()):
        raise OptionError(
            "an adapter holds the parameters of the encoding; call rope_ext.fit before the "
            "adapter is added"
        )
    return parts


def can_fit(method: Method | None) -> bool:
    """Whether a method is an encoding that changes the logits with parameters in the layers."""
    if not (isinstance(method, Encoding) and method.changes_logits()):
        return False
    # Drawing values must not move the user's generator.
    with torch.random.fork_rng(devices=[]):
        return bool(method.initial(Heads(1, 2, 2)))


def supported() -> list[str]:
    """Return the names of the encodings that :func:`fit` supports with their default options."""
    return sorted(cls.name for cls in all_encodings() if can_fit(build_method(cls.name)))


def _loss(seen: _Observed, part: DistanceBias) -> torch.Tensor:
    """Cross entropy between target weights and those of the encoding, in nats."""
    key = seen.dense.key
    projection = seen.layer.projection(seen.module, key)
    added = part(key.shape[2], device=key.device, dtype=key.dtype, projection=projection)
    call = replace(seen.dense.call, **added)
    query = seen.dense.query  # of the unpatched model, without the patch's temperature
    scale = seen.layer.map.temperature(torch.arange(query.shape[2], device=query.device), key.dtype)
    if scale is not None:
        query = query * scale[:, None]
    found = seen.dense._replace(query=query, call=call).weights(seen.queries)
    least = torch.finfo(found.dtype).tiny  # masked keys have weight 0 in both
    return -(seen.weights * found.clamp(min=least).log()).sum((-3, -1)).mean()


def _observe(
    decoder: nn.Module, layers: dict[nn.Module, Layer], row: torch.Tensor
) -> dict[nn.Module, _Observed]:
    """Record the attention of the unpatched ``decoder`` over a row, for each of the layers."""
    found: dict[nn.Module, _Observed] = {}

    def look(module: nn.Module, dense: Dense, window: int | None) -> None:
        layer = layers.get(module)
        if layer is None or layer.layout is None or layer.biased is None:
            return
        tokens = dense.query.shape[2]
        # Otherwise, all queries have the last position.
        if not torch.equal(dense.places.query, dense.places.key):
            raise OptionError(
                "rope_ext.fit needs layers that see all earlier tokens and no later ones, and this "
                "model has some that see both, or a window; train the encoding without it"
            )
        # Evenly spaced, the last token among them.
        queries = slice((tokens - 1) % -(-tokens // QUERIES), None, -(-tokens // QUERIES))
        layout = layer.layout
        # Undo the rotation, since an encoding gets queries and keys without it; in float64, since
        # an angle of many radians loses its fraction in float32.
        theta = layout.site.loaded.double().to(dense.query.device)
        angles = -torch.arange(tokens, device=theta.device)[:, None] * theta
        back = angles.cos(), angles.sin()
        query, key = (layout.pairs.rotate(x.float(), back) for x in (dense.query, dense.key))
        found[module] = _Observed(
            dense=dense._replace(query=query, key=key),
            queries=queries,
            weights=dense.weights(queries).float(),
            module=module,
            layer=layer,
        )

    with attending(decoder, NAME, look):
        decoder(input_ids=row[None].to(vocabulary_of(decoder).weight.device), use_cache=False)
    return found


def _check(state: Patch, input_ids: Any, steps: Any, learning_rate: Any) -> None:
    """Raise an OptionError if there is nothing to fit, or an argument is not valid."""
    if not can_fit(state.method):
        raise OptionError(
            f"{state.method.name} has no parameters that rope_ext.fit sets; it supports "
            f"{', '.join(supported())}, and alibi with learned=True"
        )
    # Queries and keys are observed before the rotary module, which multiplies by it.
    if (given := getattr(state.method, "attention_factor", None)) not in (None, 1):
        raise OptionError(
            f"rope_ext.fit would not see attention_factor={given}; patch with "
            f"temperature={given**2:g} instead"
        )
    tensor = isinstance(input_ids, torch.Tensor)
    shape = list(input_ids.shape) if tensor and not input_ids.is_floating_point() else []
    if len(shape) != 2 or not 2 <= shape[1] <= state.length or not shape[0]:
        shown = list(input_ids.shape) if tensor else brief(input_ids)
        raise OptionError(
            f"input_ids={shown} is not valid; it must be a tensor of token ids, [rows, tokens], "
            f"with 2 to {state.length} tokens, the trained length"
        )
    if whole_number(steps, minimum=1) is None:
        raise OptionError(f"steps={brief(steps)} is not valid; it must be a whole number above 0")
    if not (isinstance(learning_rate, int | float) and 0 < learning_rate < 100):
        raise OptionError(
            f"learning_rate={brief(learning_rate)} is not valid; it must be a number above 0"
        )
