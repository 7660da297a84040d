"""RePo by the paper's definition, pair by pair of tokens, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import rope_ext
from tests.helpers.models import attending_by

Learned = dict[str, nn.Parameter]


def parameters(model: nn.Module) -> Learned:
    return {n: p for n, p in model.named_parameters() if ".rope_ext_positions." in n}


def patch(model: nn.Module, **options: Any) -> nn.Module:
    """Under RePo, with positions of up to some tens of tokens in either direction."""
    rope_ext.patch(model, "repo", **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in parameters(model).items():
            drawn = torch.randn(parameter.shape, generator=generator)
            inputs = parameter.shape[-1]
            parameter.copy_(drawn * (6 if name.endswith("position") else 1) / math.sqrt(inputs))
    return model


class _Dense:
    """Attention whose queries and keys carry no rotation yet, and the input of every layer."""

    def __init__(self, learned: Learned, shifted: bool, t: torch.Tensor) -> None:
        self.learned, self.shifted, self.t = learned, shifted, t
        self.inputs: dict[nn.Module, torch.Tensor] = {}

    def place(self, module: nn.Module, row: int, token: int, head: int) -> torch.Tensor:
        """Where a token is for one key head: by the network of the layer, if it has one."""
        t = self.t[row if len(self.t) > 1 else 0, token].double()
        own = [p.double() for n, p in self.learned.items() if f".{module.layer_idx}." in n]
        if not own:
            return t
        gate, content, position = own
        x = self.inputs[module][row, token].double()
        a, b = gate @ x, content @ x
        z = (a * torch.sigmoid(a) * b) @ position[head]
        return t + z if self.shifted else z

    def __call__(
        self, module, query, key, value, attention_mask, scaling: float | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        groups, columns = query.shape[1] // key.shape[1], query.shape[-1]
        theta = module.dense_inv_freq.double()
        pairs = len(theta)
        scale = columns**-0.5 if scaling is None else scaling
        rows = []
        for row in range(len(query)):
            heads = []
            for head in range(query.shape[1]):
                of_key = head // groups
                z = [self.place(module, row, t, of_key) for t in range(query.shape[2])]
                q, k, v = query[row, head].double(), key[row, of_key].double(), value[row, of_key]
                out = []
                for i in range(len(q)):
                    logits = []
                    seen = [j for j in range(len(k)) if attention_mask[row, 0, i, j]]
                    for j in seen:
                        angle = (z[i] - z[j]) * theta
                        a, b, rest = q[i, :pairs], q[i, pairs : 2 * pairs], q[i, 2 * pairs :]
                        c, d = k[j, :pairs], k[j, pairs : 2 * pairs]
                        turned = angle.cos() * (a * c + b * d) + angle.sin() * (a * d - b * c)
                        logits.append(scale * (turned.sum() + rest @ k[j, 2 * pairs :]))
                    if seen:
                        out.append(torch.stack(logits).softmax(0) @ v[seen].double())
                    else:
                        out.append(v.new_zeros(v.shape[-1]).double())
                heads.append(torch.stack(out))
            rows.append(torch.stack(heads))
        return torch.stack(rows).transpose(1, 2).to(value.dtype), None


@contextmanager
def dense(
    model: nn.Module, learned: Learned, t: torch.Tensor, shifted: bool = False
) -> Iterator[nn.Module]:
    """``model``, not patched, that attends by the parameters of a patched one.

    ``t``: numbers of the tokens, ``[rows or 1, tokens]``; layers without parameters rotate by them.
    """

    def unrotated(module: nn.Module, args: tuple, output: Any) -> Any:
        return torch.ones_like(output[0]), torch.zeros_like(output[1])

    made, handles = _Dense(learned, shifted, t), []
    rotary = next(m for n, m in model.named_modules() if n.endswith("rotary_emb"))
    handles.append(rotary.register_forward_hook(unrotated))
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.dense_inv_freq = rotary.inv_freq.clone()

            def keep(module: nn.Module, args: tuple, kwargs: dict) -> None:
                made.inputs[module] = args[0] if args else kwargs["hidden_states"]

            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        with attending_by(model, made):
            yield model
    finally:
        for handle in handles:
            handle.remove()
