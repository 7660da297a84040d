"""Every method and encoding, and what is put beside a rotation, each with its formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import rope_ext
from rope_ext.encodings import Heads
from rope_ext.methods import FrequencyMethod, Method, Rope, build_method
from tests.helpers import encodings, methods
from tests.helpers.encodings import Encoding, Made, of_layer, parameters, randomized
from tests.helpers.models import LENGTH
from tests.helpers.positions import FAMILIES, GEOMETRIES, KINDS, METHODS, Family, Seen, by_formula
from tests.helpers.positions import patch as patch_positions

LLAMA = FAMILIES["llama"]
TINY = Rope.geometric(base=1e4, dim=16, length=LENGTH)
FACTOR = 4.0


@dataclass(frozen=True)
class Case:
    """``patch`` a model; ``formula`` of a plain model, its family, the patched one, and positions.

    ``name``: the registered name. ``learned``: whether the patch has parameters.
    """

    name: str
    patch: Callable[..., nn.Module]
    formula: Callable[..., AbstractContextManager[Any]]
    family: Family = LLAMA
    learned: bool = False

    def plain(self) -> nn.Module:
        return self.family.model()

    def patched(self) -> nn.Module:
        return self.patch(self.plain())


@contextmanager
def rotating(model: nn.Module, method: FrequencyMethod) -> Iterator[nn.Module]:
    """``model`` under cosine and sine of the map's frequencies, made in float64."""
    inv_freq, scaling = method.inv_freq(TINY), method.attention_scaling(TINY)

    def rotate(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> tuple:
        angles = kwargs["position_ids"].double()[..., None] * inv_freq
        angles = torch.cat((angles, angles), -1)
        return tuple((x * scaling).to(args[0].dtype) for x in (angles.cos(), angles.sin()))

    handle = model.model.rotary_emb.register_forward_hook(rotate, with_kwargs=True)
    try:
        yield model
    finally:
        handle.remove()


def frequency(key: str) -> Case:
    method = methods.VARIANTS[key](FACTOR, TINY)
    return Case(
        method.name,
        lambda model, **more: rope_ext.patch(model, method, **more),
        lambda plain, family, model, t: rotating(plain, method),
    )


def position(name: str) -> Case:
    return Case(
        name,
        lambda model, **more: patch_positions(model, name, **more),
        lambda plain, family, model, t: by_formula(plain, family, name, t[None], **METHODS[name]),
    )


def has_parameters(method: Method) -> bool:
    """Whether a patch with ``method`` has learned parameters, by what it would begin with."""
    method = method.resolved(TINY)
    if not isinstance(method, rope_ext.encodings.Encoding):
        return False
    inputs = {}
    if isinstance(method, rope_ext.encodings.InputEncoding) and method.entered:
        inputs = method.initial_inputs(columns=32, size=1.0, rope=TINY)
    rotated = method.initial_positions(columns=64, heads=2)
    return bool(inputs or rotated or method.initial(Heads(4, 16, 16)))


def encoding(key: str) -> Case:
    made: Encoding = encodings.ALL[key]
    return Case(
        made.name,
        made.patch,
        lambda plain, family, model, t: encodings.dense(plain, family, made, t[None], model),
        learned=has_parameters(build_method(made.name, **{"factor": 1, **made.options})),
    )


def over(
    name: str,
    *,
    under: FrequencyMethod | None = None,
    formula: Callable[[Seen], Made] | None = None,
    family: Family = LLAMA,
    log_n: int | None = None,
    distance: str = "rerope",
    constants: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """A bias, a temperature or ``layers``, over the rotation of a method.

    Args:
        name: the method.
        under: the frequencies below ``distance``, whose ``constants`` leave it alone by default.
        formula: of what is added.
        family: which layers are patched.
        log_n: the trained length, where queries are multiplied by ``log_n``.
        distance: name of the effective distance.
        constants: of the distance.
        options: of the patch.
    """

    @contextmanager
    def right(plain: nn.Module, of: Family, model: nn.Module, t: torch.Tensor) -> Iterator[Any]:
        def scores(seen: Seen) -> Made:
            seen.learned.update(of_layer(parameters(model), seen.module.layer_idx))
            return formula(seen)

        more = {"window": 999} if constants is None else constants
        more = more | {"log_n": log_n, "scores": formula and scores}
        below = rope_ext.patched(plain, under) if under else nullcontext()
        with below, by_formula(plain, of, distance, t[None], **more):
            yield plain

    def patch(model: nn.Module, **more: Any) -> nn.Module:
        return randomized(rope_ext.patch(model, name, **{"factor": FACTOR, **options, **more}))

    parts = [build_method(name, factor=FACTOR)]
    bias = options.get("bias")
    if bias is not None:
        parts.append(build_method(bias) if isinstance(bias, str) else bias)
    learned = options.get("temperature") == "ssmax" or any(map(has_parameters, parts))
    return Case(name, patch, right, family, learned)


def ssmax(seen: Seen) -> Made:
    grown = ((seen.places + 1).double().log() / torch.tensor(64.0).log() - 1).clamp(min=0)
    return seen.logits * (1 + seen.learned["scale"][:, None, None] * grown)


YARN = rope_ext.YaRN(factor=FACTOR)
NEAR = {"window": 5, "temperature": 1, "attention_factor": 1}
FIRST_LAYER, LAST_LAYER = Family("llama", mapped=(0,)), Family("llama", mapped=(1,))
KEPT = {"kept": [1.0, 0.75, 0.5, 0.5, 0.25, 0.125, 0.0, 0.0]}
NARROW = METHODS["jet_long"]
UNTURNED = {"distance": "unturned", "constants": {}}
SSMAX = {"temperature": "ssmax", "formula": ssmax}
OVER = {
    "alibi over the rotation": over("rope", bias="alibi", formula=encodings.alibi),
    "alibi over yarn": over("yarn", under=YARN, bias="alibi", formula=encodings.alibi),
    "alibi over rerope": over(
        "rerope", bias="alibi", formula=encodings.alibi, constants={"window": 5}, **NEAR
    ),
    "t5 over rerope": over(
        "rerope",
        **{"bias": "t5", "formula": encodings.t5, "log_n": LENGTH},
        **{"window": 5, "constants": {"window": 5}},
    ),
    "kerple over yarn and log_n": over(
        "yarn",
        **{"under": YARN, "bias": "kerple_log", "formula": encodings.kerple_log},
        **{"temperature": "log_n", "log_n": LENGTH},
    ),
    "fire over yarn": over(
        "yarn", under=YARN, bias=rope_ext.FIRE(threshold=20), formula=encodings.fire
    ),
    "alibi in one layer": over(
        "alibi", formula=encodings.alibi, family=FIRST_LAYER, layers=[0], **UNTURNED
    ),
    "t5 in one layer": over("t5", formula=encodings.t5, family=LAST_LAYER, layers=[1], **UNTURNED),
    "t5 over one layer": over(
        "rope", bias="t5", formula=encodings.t5, family=LAST_LAYER, layers=[1]
    ),
    "rerope in one layer": over(
        "rerope", family=FIRST_LAYER, layers=[0], constants={"window": 5}, **NEAR
    ),
    "log_n": over("rope", temperature="log_n", log_n=LENGTH),
    "yarn and log_n": over("yarn", under=YARN, temperature="log_n", log_n=LENGTH),
    "yarn and ssmax": over("yarn", under=YARN, **SSMAX),
    "self_extend and ssmax": over(
        "self_extend",
        **{"attention_factor": 1, "distance": "self_extend", **METHODS["self_extend"]},
        **{"constants": METHODS["self_extend"], **SSMAX},
    ),
    "rerope over ntk": over(
        "rerope",
        **{"under": rope_ext.NTK(factor=2), "log_n": 2 * LENGTH, "constants": {"window": 5}},
        **{"factor": 2, "window": 5, "frequency": rope_ext.NTK(factor=2)},
    ),
    "jet_long, kept": over(
        "jet_long", distance="jet_long", constants=METHODS["jet_long"] | KEPT, **NARROW, **KEPT
    ),
    "nope and ssmax": over("nope", **UNTURNED, **SSMAX),
}
CASES: dict[str, Case] = {
    **{key: frequency(key) for key in methods.VARIANTS},
    **{name: position(name) for name in METHODS},
    **{key: encoding(key) for key in encodings.ALL},
    **OVER,
}
DISTINCT = [key for key in CASES if key == "yarn" or key not in methods.VARIANTS]
"""Fixed frequencies differ in numbers only."""
LEARNING = [key for key, case in CASES.items() if case.learned]
ONE_OF_EACH = [
    *("yarn", "rerope", "alibi", "t5", "kerple_log", "sandwich", "xpos", "3d_rpe", "drope", "shaw"),
    *("fire", "cope", "repo", "swan", "learned", "deberta, absolute", "through keys"),
    *("t5 over rerope", "alibi over yarn", "alibi in one layer", "rerope in one layer"),
    *("yarn and ssmax", "nope and ssmax"),
]
"""Cases of every kind."""
FAMILIES_OF = {
    "qwen3": ("t5", "repo", "learned", "xpos", "cope", "dape v2", "swan", "alibi over rerope"),
    "mistral": ("kerple_power", "sinusoidal", "hierarchical", "fire", "deberta", "t5 over rerope"),
    "mistral windowed": ("alibi", "deberta", "transformer_xl"),
    "gpt_neox": ("t5", "xpos", "3d_rpe", "shaw", "through keys", "alibi over the rotation"),
    "gemma": ("learned", "multiplicative", "floater", "sinusoidal", "through keys"),
    "gemma2 scaled": ("t5", "kerple_log", "shaw", "fire", "cope", "transformer_xl"),
    "gpt_oss": ("alibi", "t5", "self_extend and ssmax"),
    "gpt_oss scaled": ("kerple_log", "fire", "dape v2", "deberta", "t5 over rerope"),
    "stablelm": ("repo", "repo shifted"),
    "olmo2": ("repo", "cope", "dape v2"),
    "phi3": ("through keys",),
    "qwen2": ("through keys",),
    "smollm3": ("self_extend and ssmax",),
}
PAIRS = [
    *((kind, key) for kind, keys in FAMILIES_OF.items() for key in keys),
    *((kind, name) for kind in KINDS[1:] for name in GEOMETRIES),
    *((kind, GEOMETRIES[n % 4]) for n, kind in enumerate(FAMILIES) if kind not in KINDS),
]
"""Families whose layers differ from Llama's, and what is checked on them."""
