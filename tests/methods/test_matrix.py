"""Every method and encoding: its formula, decoding, padding, documents, saving, compiling.

A tiny model of transformers that is not patched attends by the formula, dense and in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import rope_ext
from rope_ext.methods import FrequencyMethod, Rope, all_encodings, all_methods
from tests.helpers import biases, inputs, methods, relative, repo, scored, swan
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.positions import CACHES, EXACT, FAMILIES, METHODS, Family, by_formula, logits
from tests.helpers.positions import patch as patch_positions
from tests.helpers.promises import (
    decodes_as_it_reads,
    documents_are_apart,
    is_saved_and_taken_out,
    pieces_of_rows_are_as_alone,
    rows_are_as_alone,
)
from tests.helpers.variants import VARIANTS

LLAMA = FAMILIES["llama"]
FIRST_LAYER = Family("llama", mapped=(0,))
TINY = Rope.geometric(base=1e4, dim=16, length=LENGTH)
FACTOR = 4.0


@dataclass(frozen=True)
class Case:
    """``patch`` a model; ``formula`` of a plain model, the patched one, and positions.

    ``name``: the registered name; ``tokens``: of the comparison, which may be slow.
    """

    name: str
    patch: Callable[[nn.Module], nn.Module]
    formula: Callable[[nn.Module, nn.Module, torch.Tensor], AbstractContextManager[Any]]
    tokens: int = 90
    layers: int = 2

    def plain(self) -> nn.Module:
        return tiny_llama(num_hidden_layers=self.layers)

    def patched(self) -> nn.Module:
        return self.patch(self.plain())


@contextmanager
def rotating(model: nn.Module, method: FrequencyMethod) -> Iterator[nn.Module]:
    """``model`` under cosine and sine of the map's frequencies, made in float64."""
    inv_freq, scaling = method.inv_freq(TINY), method.attention_scaling(TINY)

    def rotate(
        module: nn.Module, args: tuple, kwargs: dict, output: Any
    ) -> tuple[torch.Tensor, ...]:
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
        lambda model: rope_ext.patch(model, method),
        lambda plain, model, t: rotating(plain, method),
    )


def position(name: str) -> Case:
    return Case(
        name,
        lambda model: patch_positions(model, name),
        lambda plain, model, t: by_formula(plain, LLAMA, name, t[None], **METHODS[name]),
    )


def bias(name: str) -> Case:
    return Case(
        name,
        lambda model: biases.patch(model, name),
        lambda plain, model, t: biases.dense(plain, LLAMA, name, t[None], biases.parameters(model)),
    )


def absolute(key: str) -> Case:
    return Case(
        inputs.VARIANTS.get(key, (key,))[0],
        lambda model: inputs.patch(model, key),
        lambda plain, model, t: inputs.by_hand(
            plain, key, t, inputs.parameters(model), inputs.scale_of(model)
        ),
    )


def of_distances(name: str) -> Case:
    return Case(
        name,
        lambda model: relative.patch(model, name),
        lambda plain, model, t: relative.dense(plain, name, t[None], biases.parameters(model)),
    )


def variant(key: str) -> Case:
    name, options, formula = VARIANTS[key]

    def patch(model: nn.Module) -> nn.Module:
        relative.randomized(rope_ext.patch(model, name, **options))
        for path, value in biases.parameters(model).items():
            if path.endswith("fire_multiplier"):
                value.data.fill_(0.03)  # denominators change after 15 tokens
        return model

    return Case(
        name,
        patch,
        lambda plain, model, t: relative.dense(plain, formula, t[None], biases.parameters(model)),
        tokens=40,
    )


def by_content(key: str) -> Case:
    return Case(
        key.split()[0],
        lambda model: scored.patch(model, key),
        lambda plain, model, t: scored.dense(plain, LLAMA, key, t[None], biases.parameters(model)),
    )


def learned_positions(**options: Any) -> Case:
    return Case(
        "repo",
        lambda model: repo.patch(model, **options),
        lambda plain, model, t: repo.dense(
            plain, repo.parameters(model), t[None], options.get("shifted", False)
        ),
        tokens=14,
    )


def added(name: str, over: str, family: Family, formula: str, **options: Any) -> Case:
    """What is put beside a rotation or in some layers: ALiBi, a temperature, ``layers``."""
    constants = options.pop("constants", {})
    with_bias = "bias" in options or name == "alibi"
    heads = 4
    return Case(
        name,
        lambda model: rope_ext.patch(model, over, factor=FACTOR, **options),
        lambda plain, model, t: by_formula(
            *(plain, family, formula, t[None]),
            bias=(lambda module, d: biases.alibi(d, heads, {})) if with_bias else None,
            log_n=LENGTH if options.get("temperature") == "log_n" else None,
            **constants,
        ),
    )


CASES: dict[str, Case] = {
    **{key: frequency(key) for key in methods.VARIANTS},
    **{name: position(name) for name in METHODS},
    **{name: bias(name) for name in biases.FORMULAS},
    **{key: absolute(key) for key in (*inputs.CHOSEN, *inputs.VARIANTS)},
    **{name: of_distances(name) for name in relative.RELATIVE},
    **{key: variant(key) for key in VARIANTS},
    **{key: by_content(key) for key in scored.SIZES},
    "repo": learned_positions(),
    "swan": Case(
        "swan",
        lambda model: rope_ext.patch(model, "swan", **swan.GIVEN),
        lambda plain, model, t: swan.dense(plain),
        layers=4,
    ),
    "alibi over the rotation": added(
        *("alibi", "rope", LLAMA, "rerope"), bias="alibi", constants={"window": 999}
    ),
    "alibi over rerope": added(
        *("alibi", "rerope", LLAMA, "rerope"),
        bias="alibi",
        **{"window": 5, "temperature": 1, "attention_factor": 1, "constants": {"window": 5}},
    ),
    "alibi in one layer": added("alibi", "alibi", FIRST_LAYER, "unturned", layers=[0]),
    "log_n": added(
        *("rope", "rope", LLAMA, "rerope"), temperature="log_n", constants={"window": 999}
    ),
    "rerope in one layer": added(
        *("rerope", "rerope", FIRST_LAYER, "rerope"),
        layers=[0],
        **{"window": 5, "temperature": 1, "attention_factor": 1, "constants": {"window": 5}},
    ),
}
STEPS = (40, 1, 1, 30, 1, 1, 1, 15)


def test_every_method_and_encoding_is_here() -> None:
    registered = {cls.name for cls in (*all_methods(), *all_encodings())}
    assert registered <= {case.name for case in CASES.values()}


@pytest.mark.parametrize("key", CASES)
def test_logits_and_gradients_are_those_of_the_formula(key: str, ids) -> None:
    case = CASES[key]
    ids, model, plain = ids[:, : case.tokens], case.patched(), case.plain()
    untouched = logits(plain, ids)
    names = [n for n, p in plain.named_parameters() if "proj" in n]
    learned = [p for n, p in model.named_parameters() if "rope_ext" in n]
    weights = [[*learned, *map(one.get_parameter, names)] for one in (model, plain)]
    with case.formula(plain, model, torch.arange(case.tokens)):
        right = plain(ids).logits
        expected = torch.autograd.grad(right.sin().sum(), weights[1], retain_graph=True)
    found = model(ids).logits
    torch.testing.assert_close(found, right, **EXACT)
    for one, other in zip(
        torch.autograd.grad(found.sin().sum(), weights[0]), expected, strict=True
    ):
        torch.testing.assert_close(one, other, atol=4e-3, rtol=2e-3)  # sums over 16,000 pairs
    assert (found - untouched).abs().max() > 0.01


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("key", CASES)
def test_cached_decoding_equals_recomputation(key: str, cache: str, ids) -> None:
    decodes_as_it_reads(CASES[key].patched(), cache, ids, STEPS)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("key", CASES)
def test_a_row_of_a_batch_gives_what_it_gives_alone(key: str, side: str, ids) -> None:
    rows_are_as_alone(CASES[key].patched(), side, ids)


@pytest.mark.parametrize("key", CASES)
def test_padded_rows_in_pieces_give_what_they_give_alone(key: str, ids) -> None:
    model = CASES[key].patched()
    cache = DynamicCache(config=model.config)
    rows = [ids[0, :75], ids[1, :64]]
    pieces_of_rows_are_as_alone(model, rows, "left", (40, 25, 5, *[1] * 5), cache)


@pytest.mark.parametrize("key", CASES)
def test_documents_of_a_row_give_what_they_give_alone(key: str, ids) -> None:
    documents_are_apart(CASES[key].patched(), ids[:1, :70], (30, 40))


@pytest.mark.parametrize("key", CASES)
def test_saved_reloaded_and_taken_out(key: str, ids, tmp_path: Path) -> None:
    model = CASES[key].plain()
    before, plain = copy.deepcopy(model.state_dict()), logits(model, ids)
    is_saved_and_taken_out(CASES[key].patch(model), before, plain, ids, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("key", CASES)
def test_compiled_it_gives_the_same(key: str, ids, no_graphs) -> None:
    model = CASES[key].patched()
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, ids), logits(model, ids), **EXACT)
