"""Reference encodings, as in the papers: dense, in float64, on an unpatched model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

import rope_ext
from tests.helpers.models import LENGTH
from tests.helpers.positions import Family, Seen, by_formula

Learned = dict[str, torch.Tensor]
Made = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Logits, and additions to the values for pairs of tokens."""


def nope(s: Seen) -> Made:
    return s.logits


def alibi(s: Seen) -> Made:
    heads = s.logits.shape[1]
    assert heads & (heads - 1) == 0  # a power of two
    fixed = torch.tensor([2 ** (-8 * h / heads) for h in range(1, heads + 1)]).double()
    return s.logits - s.learned.get("slope", fixed)[:, None, None] * s.apart


def t5(s: Seen) -> Made:
    bucket = T5Attention._relative_position_bucket(-s.apart, False)
    return s.logits + _by_head(s.learned["beta"], bucket)


def t5_offsets(s: Seen) -> Made:
    return s.logits + _by_head(s.learned["beta"], s.apart.clamp(max=7))


def _by_head(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[:, index[:, 0]].transpose(0, 1)


def _kerple(s: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(s.learned[name][:, None, None] for name in ("r1", "r2"))


def kerple_log(s: Seen) -> Made:
    r1, r2 = _kerple(s)
    return s.logits - r1 * (1 + r2 * s.apart).log()


def kerple_power(s: Seen) -> Made:
    r1, r2 = _kerple(s)
    return s.logits - r1 * s.apart.double() ** r2


def sandwich(s: Seen) -> Made:
    """As of NVIDIA NeMo, with the paper's width."""
    heads = s.logits.shape[1]
    w = 10000.0 ** (-2 * torch.arange(1, 65, dtype=torch.float64) / 128)
    total = (s.apart.double().unsqueeze(-1) * w).cos().sum(-1) - 64
    return s.logits + total / (torch.arange(1, heads + 1)[:, None, None] * 8 / heads)


def fire(s: Seen, threshold: float = 20.0, prefix: str = "") -> torch.Tensor:
    own = {k.removeprefix(prefix): v for k, v in s.learned.items() if k.startswith(prefix)}
    c, reach = own["c"].abs(), own["multiplier"].abs() * threshold
    far = torch.log(1 + c * torch.maximum(s.places.double(), reach)) + 1e-6
    x = torch.log(1 + c * s.apart) / far
    inner = F.relu(F.linear(x[..., None], own["first_weight"], own["first_bias"]))
    bias = F.linear(inner, own["second_weight"], own["second_bias"])
    return s.logits + bias.movedim(-1, 1).squeeze(2)


def dape(s: Seen) -> Made:
    """The version 1 network, for one pair of query and key at a time."""
    biased = kerple_log(s)
    return biased + _network(s, torch.cat((s.logits, biased - s.logits), 1))


def dape_on_fire(s: Seen) -> Made:
    biased = fire(s, 512.0, "fire_")
    return biased + _network(s, torch.cat((s.logits, biased - s.logits), 1))


def dape_on_nothing(s: Seen) -> Made:
    return s.logits + _network(s, s.logits)


def _layers(s: Seen) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(s.learned[f"{n}_weight"], s.learned[f"{n}_bias"]) for n in ("first", "second")]


def _network(s: Seen, given: torch.Tensor) -> torch.Tensor:
    first, second = _layers(s)
    return F.linear(F.leaky_relu(F.linear(given.movedim(1, -1), *first)), *second).movedim(-1, 1)


def dape_v2(s: Seen) -> Made:
    biased, (first, second) = kerple_log(s), _layers(s)
    both, adapted = torch.cat((s.logits, biased - s.logits), 1), torch.zeros_like(s.logits)
    for at in range(s.logits.shape[2]):
        seen = torch.nonzero(s.visible[0, 0, at]).flatten()
        # One masked key follows, as in all rows of a training sequence except the last.
        x = F.leaky_relu(F.conv1d(F.pad(both[:, :, at, seen], (0, 1)), *first, padding=1))
        adapted[:, :, at, seen] = F.conv1d(x, *second, padding=1)[..., :-1]
    return biased + adapted


def cope(s: Seen) -> Made:
    table = s.learned["table"]
    gates = s.logits.masked_fill(~s.visible, -torch.inf).sigmoid()
    counted = torch.stack([gates[..., j:].sum(-1) for j in range(gates.shape[-1])], -1)
    counted = counted.clamp(max=len(table) - 1)
    low, high = counted.floor().long(), counted.ceil().long()
    whole, part = s.query @ table.mT, counted - low
    return s.logits + whole.gather(-1, high) * part + whole.gather(-1, low) * (1 - part)


def shaw(s: Seen) -> Made:
    """``q . (k + aK)``, and values with ``aV`` for every pair."""
    of_key, of_value = (s.learned[name][s.apart[:, 0].clamp(max=7)] for name in ("key", "value"))
    return s.logits + s.scale * torch.einsum("bhid,aijd->bhij", s.query, of_key), of_value


def shaw_keys(s: Seen) -> Made:
    of_key = s.learned["key"][s.apart[:, 0].clamp(2, 7) - 2]
    return s.logits + s.scale * torch.einsum("bhid,aijd->bhij", s.query, of_key)


def nezha(s: Seen) -> Made:
    """Equations 5 and 6, of ``j - i`` clipped, for keys and values."""
    columns = s.query.shape[-1]
    table = torch.zeros(*s.apart[:, 0].shape, columns, dtype=torch.float64)
    for k in range(columns // 2):
        angle = -s.apart[:, 0].clamp(max=7).double() / 10000 ** (2 * k / columns)
        table[..., 2 * k], table[..., 2 * k + 1] = angle.sin(), angle.cos()
    return s.logits + s.scale * torch.einsum("bhid,aijd->bhij", s.query, table), table


def deberta(s: Seen) -> Made:
    of_key, of_query = (
        _by_head(s.learned[name], s.apart.clamp(max=6)) for name in ("key", "query")
    )
    c2p = torch.einsum("bhid,ahijd->bhij", s.query, of_key)
    p2c = torch.einsum("bhjd,ahijd->bhij", s.key, of_query)
    return (s.logits + s.scale * (c2p + p2c)) / 3**0.5


def transformer_xl(s: Seen) -> Made:
    """``<u, k> + <q + v, r R_d>``, with the sinusoid of the distance."""
    u, v, r = (s.learned[name] for name in "uvr")
    width = r.shape[-1]
    frequencies = 10000 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = s.apart[:, 0, ..., None] * frequencies
    keys = torch.einsum("hdw,aijw->ahijd", r, torch.cat((angle.sin(), angle.cos()), -1))
    position = torch.einsum("bhid,ahijd->bhij", s.query + v[:, None], keys)
    return s.logits + s.scale * ((s.key @ u[..., None]).mT + position)


def through_keys(s: Seen) -> Made:
    """Each sinusoid projected as ``k_proj`` does with a token."""
    w = key_projection(s.module).double()
    heads = w.unflatten(0, (-1, s.query.shape[-1]))
    s.learned["r"] = heads.repeat_interleave(s.query.shape[1] // len(heads), 0)
    return transformer_xl(s)


def key_projection(module: nn.Module) -> torch.Tensor:
    """Return the key rows in an attention layer's weights, also if fused."""
    if hasattr(module, "k_proj"):
        return module.k_proj.weight
    config, size = module.config, module.head_size if hasattr(module, "head_size") else None
    heads, kv = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if hasattr(module, "query_key_value"):  # of each head query, key, value
        return module.query_key_value.weight.unflatten(0, (heads, 3, size))[:, 1].flatten(0, 1)
    weight = module.qkv_proj.weight
    size = len(weight) // (heads + 2 * kv)
    return weight[heads * size : (heads + kv) * size]


def xpos(s: Seen) -> Made:
    pairs = len(s.theta)
    zeta = (torch.arange(pairs).double() / pairs + 0.4) / 1.4
    apart = s.apart.double()[..., None]
    return s.turned(torch.polar(zeta ** (apart / 16), apart * s.theta))


def rpe_3d(s: Seen) -> Made:
    """Definition 1, of the pair 1: ``e^(i m theta) (cos(phi) i + sin(phi))``, chunks of 20."""
    state = torch.stack(
        [
            torch.polar(torch.ones(1).double(), i % 20 * s.theta)
            * complex(math.sin(2.0 ** -(i // 20)), math.cos(2.0 ** -(i // 20)))
            for i in s.places.flatten().tolist()
        ]
    )
    return s.turned((state[:, None] * state.conj())[None, None])


def drope(s: Seen) -> Made:
    return s.logits * (1 + 0.2 * ((s.places + 1).double() / LENGTH).clamp(min=1).log())


def repo(s: Seen, shifted: bool = False) -> Made:
    """Positions from the layer's network, per key head; without a network, the token's index."""
    z = s.places.double().mT
    if s.learned:
        gate, content, position = (s.learned[n] for n in ("gate", "content", "position"))
        x = s.inputs.double()
        found = ((F.silu(x @ gate.mT) * (x @ content.mT)) @ position.mT).mT[:, :, None]
        z = z + found if shifted else found
    z = z.repeat_interleave(s.query.shape[1] // z.shape[1], 1)
    apart = z.mT - z
    return s.turned(torch.polar(torch.ones(1).double(), apart[..., None] * s.theta))


def repo_shifted(s: Seen) -> Made:
    return repo(s, shifted=True)


def swan(s: Seen) -> Made:
    """Every second layer does not rotate, the others have a window of 7 tokens."""
    if s.module.layer_idx % 2 == 0:
        return s.logits * ((s.places + 1).double().log() / math.log(LENGTH)).clamp(min=1)
    apart = s.apart.double()[..., None] * s.theta
    turned = s.turned(torch.polar(torch.ones(1).double(), apart))
    return turned.masked_fill(s.apart >= 7, -1e30)


@dataclass(frozen=True)
class Entered:
    """Hidden states of one row at positions, learned parameters, and the size of the addition."""

    x: torch.Tensor
    t: torch.Tensor
    learned: Learned
    scale: float


def sinusoid(t: torch.Tensor, columns: int, base: float = 10000.0) -> torch.Tensor:
    found = [
        [(math.sin, math.cos)[c % 2](i / base ** (c // 2 * 2 / columns)) for c in range(columns)]
        for i in t.tolist()
    ]
    return torch.tensor(found, dtype=torch.float64)


def path(learned: Learned, tokens: int, step: float) -> torch.Tensor:
    """The classical Runge-Kutta method, one step per token, for each column."""
    w1, b1, w2, b2 = (learned[f"{a}_{b}"] for a in ("first", "second") for b in ("weight", "bias"))

    def f(tau: float, p: torch.Tensor) -> torch.Tensor:
        inner = (w1[:, :-1] @ p + w1[:, -1] * tau + b1).clamp(min=0)
        return w2[:, :-1] @ inner + w2[:, -1] * tau + b2

    found = [learned["start"]]
    for t in range(tokens - 1):
        tau, p = t * step, found[-1]
        k1 = f(tau, p)
        k2 = f(tau + step / 2, p + k1 * step / 2)
        k3 = f(tau + step / 2, p + k2 * step / 2)
        k4 = f(tau + step, p + k3 * step)
        found.append(p + step * (k1 + 2 * k2 + 2 * k3 + k4) / 6)
    return torch.stack(found)


def recursion(learned: Learned, tokens: int) -> torch.Tensor:
    """``p + f(p)`` from token to token."""
    w1, b1, w2, b2 = (learned[f"{a}_{b}"] for a in ("first", "second") for b in ("weight", "bias"))
    found = [learned["start"]]
    for _ in range(tokens - 1):
        found.append(found[-1] + w2 @ (w1 @ found[-1] + b1).tanh() + b2)
    return torch.stack(found)


def hierarchical(e: Entered) -> torch.Tensor:
    """Su's u, from which p is computed."""
    u = (e.learned["table"] - 0.4 * e.learned["table"][0]) / 0.6
    return e.x + 0.4 * u[e.t // 16] + 0.6 * u[e.t % 16]


def interpolated(e: Entered) -> torch.Tensor:
    """2 * 64 positions on 30 entries, whose last one holds on."""
    at = (e.t.double() * 30 / (2 * LENGTH)).clamp(max=29)
    near = (1 - (at[:, None] - torch.arange(30)).abs()).clamp(min=0)
    return e.x + near @ e.learned["table"]


def follows(e: Entered, step: float) -> torch.Tensor:
    return e.x + e.scale * path(e.learned, int(e.t.max()) + 1, step)[e.t]


@dataclass(frozen=True)
class Encoding:
    """An encoding, its options, and its formula.

    Args:
        name: the registered name.
        formula: of the logits of a layer.
        options: small enough that everything matters within 90 tokens.
        entered: what enters a layer.
        into: the first of the layers that it enters, and the first of those behind.
        drawn: of parameters whose initial values do not matter within 90 tokens.
    """

    name: str
    formula: Callable[[Seen], Made] = nope
    options: dict[str, Any] = field(default_factory=dict)
    entered: Callable[[Entered], torch.Tensor] | None = None
    into: tuple[int | None, int | None] = (0, 1)
    drawn: dict[str, tuple[float, float]] = field(default_factory=dict)

    def patch(self, model: nn.Module, **options: Any) -> nn.Module:
        """``model`` under the encoding, with parameters that are all different."""
        patched = rope_ext.patch(model, self.name, **{**self.options, **options})
        return randomized(patched, self.drawn)


TENS_OF_TOKENS = {"position": (0.0, 2.0)}
"""Weights that move positions up to some tens of tokens in either direction."""

ALL: dict[str, Encoding] = {
    **{f.__name__: Encoding(f.__name__, f) for f in (nope, alibi, t5, kerple_log, kerple_power)},
    **{f.__name__: Encoding(f.__name__, f) for f in (sandwich, dape, transformer_xl, drope)},
    "alibi learned": Encoding("alibi", alibi, {"learned": True}),
    "t5 offsets": Encoding("t5", t5_offsets, {"buckets": "offsets", "max_distance": 7}),
    "fire": Encoding("fire", fire, {"threshold": 20.0}),
    "dape v2": Encoding("dape", dape_v2, {"version": 2}),
    "dape on fire": Encoding(
        "dape", dape_on_fire, {"on": "fire"}, drawn={"fire_multiplier": (0.03, 0.0)}
    ),
    "dape on nothing": Encoding("dape", dape_on_nothing, {"on": None}),
    "cope": Encoding("cope", cope, {"positions": 16}),
    "shaw": Encoding("shaw", shaw, {"clip": 7}),
    "shaw keys": Encoding("shaw", shaw_keys, {"clip": 7, "p_min": 2, "values": False}),
    "shaw sinusoidal": Encoding("shaw", nezha, {"clip": 7, "table": "sinusoidal"}),
    "deberta": Encoding("deberta", deberta, {"clip": 7}),
    "deberta, absolute": Encoding(
        "deberta",
        deberta,
        {"clip": 7, "absolute_layers": 1, "length": 100},
        lambda e: e.x + e.learned["table"][e.t],
        (-1, None),
    ),
    "through keys": Encoding("transformer_xl", through_keys, {"projection": "key"}),
    "xpos": Encoding("xpos", xpos, {"scale_base": 16}),  # at most 70 queries are rotated together
    "3d_rpe": Encoding("3d_rpe", rpe_3d, {"chunk": 20, "base": 2.0}),
    "repo": Encoding("repo", repo, drawn=TENS_OF_TOKENS),
    "repo shifted": Encoding("repo", repo_shifted, {"positions": "shifted"}, drawn=TENS_OF_TOKENS),
    "swan": Encoding("swan", swan, {"every": 2, "window": 7, "factor": 4}),
    "sinusoidal": Encoding(
        "sinusoidal", entered=lambda e: e.x + e.scale * sinusoid(e.t, e.x.shape[-1])
    ),
    "scaled": Encoding(
        "sinusoidal",
        options={"scale": 0.3, "base": 100.0},
        entered=lambda e: e.x + e.scale * sinusoid(e.t, e.x.shape[-1], 100.0),
    ),
    "learned": Encoding(
        "learned", options={"length": 100}, entered=lambda e: e.x + e.learned["table"][e.t]
    ),
    "hierarchical": Encoding(
        "learned",
        options={"factor": 4, "length": 16, "extend": "hierarchical"},
        entered=hierarchical,
    ),
    "interpolate": Encoding(
        "learned",
        options={"factor": 2, "length": 30, "extend": "interpolate"},
        entered=interpolated,
    ),
    "multiplicative": Encoding(
        "multiplicative", options={"length": 100}, entered=lambda e: e.x * e.learned["table"][e.t]
    ),
    "sines": Encoding(
        "multiplicative",
        options={"table": "sinusoidal"},
        entered=lambda e: e.x * sinusoid(e.t, e.x.shape[-1]),
    ),
    "floater": Encoding(
        "floater", options={"hidden": 8}, entered=lambda e: follows(e, 0.1), into=(None, None)
    ),
    "first": Encoding(
        "floater",
        options={"into": "first", "step": 0.2, "hidden": 8},
        entered=lambda e: follows(e, 0.2),
    ),
    "discrete": Encoding(
        "floater",
        options={"flow": "discrete", "hidden": 8},
        entered=lambda e: e.x + e.scale * recursion(e.learned, int(e.t.max()) + 1)[e.t],
        into=(None, None),
    ),
}


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the learned parameters of a patch, by name in the model."""
    return {n: p for n, p in model.named_parameters() if ".rope_ext_" in f".{n}"}


Drawn = dict[str, tuple[float, float]]
"""Mean and standard deviation of a parameter, by its short name."""


@torch.no_grad()
def randomized(model: nn.Module, drawn: Drawn | None = None) -> nn.Module:
    """Make all parameters of the patch different, and large enough to matter.

    They are drawn around an initial value that all of a parameter's numbers have, or around 0, and
    within bounds; or as ``drawn`` says. Initial values that are drawn do not matter: tests patch
    several models that have to be the same.
    """
    generator = torch.Generator().manual_seed(5)
    for path, module in model.named_modules():
        if not path.split(".")[-1].startswith("rope_ext_"):
            continue
        for name, parameter in module.named_parameters():
            first = parameter.flatten()[0]
            mean, spread = 0.0, 0.3
            if name in (drawn or {}):
                mean, spread = drawn[name]
            elif first != 0 and bool((parameter == first).all()):
                mean, spread = float(first), 0.3 * float(first)
            elif parameter.ndim > 1:
                spread = min(0.3, parameter.shape[-1] ** -0.5)
            noise = torch.randn(parameter.shape, generator=generator)
            if name in getattr(module, "bounds", {}):
                parameter.copy_((spread * noise).abs().clamp(*module.bounds[name]))
            else:
                parameter.copy_(mean + spread * noise)
    return model


def of_layer(learned: Learned, number: int | None) -> Learned:
    """Return parameters of one layer and shared ones, by short name, in float64."""
    whole = {f".{n}": p for n, p in learned.items()}
    own = {n: p for n, p in whole.items() if f".layers.{number}." in n or ".layers." not in n}
    return {n.split(".")[-1]: p.double() for n, p in own.items() if "rope_ext_input" not in n}


@contextmanager
def dense(
    plain: nn.Module,
    family: Family,
    encoding: Encoding,
    tokens: torch.Tensor,
    patched: nn.Module | Learned,
) -> Iterator[nn.Module]:
    """``plain``, not patched, with the attention of the paper.

    ``tokens``: positions, ``[rows, tokens]``; ``patched``: has what is learned.
    """
    learned = patched if isinstance(patched, dict) else parameters(patched)
    scale = 0.3
    if isinstance(patched, nn.Module):
        found = [b for n, b in patched.named_buffers() if n.endswith("rope_ext_input.scale")]
        scale = float(found[0]) if found else scale
    inputs = {n.split(".")[-1]: p.double() for n, p in learned.items() if "rope_ext_input" in n}
    t = (tokens - tokens[:, :1]).expand(2, -1)

    def enter(layer: nn.Module, args: tuple) -> tuple:
        rows = zip(args[0], t, strict=False)
        x = [encoding.entered(Entered(x.double(), at, inputs, scale)) for x, at in rows]
        return (torch.stack(x).to(args[0].dtype), *args[1:])

    def formula(seen: Seen) -> Made:
        seen.learned.update(of_layer(learned, seen.module.layer_idx))
        return encoding.formula(seen)

    decoder = plain.get_decoder() if hasattr(plain, "get_decoder") else plain.base_model
    with ExitStack() as stack:
        if encoding.entered is not None:
            for layer in decoder.layers[slice(*encoding.into)]:
                stack.callback(layer.register_forward_pre_hook(enter).remove)
        stack.enter_context(by_formula(plain, family, "unturned", tokens, scores=formula))
        yield plain
