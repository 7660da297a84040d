"""What docs/adding.md offers is written as it says, and passes the checks of every method."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

import rope_ext
from rope_ext.encodings import Encoding
from rope_ext.methods import FrequencyMethod, Method, PositionMethod, Rope, register
from rope_ext.methods.temperature import LogN
from tests.helpers import distances, encodings, methods
from tests.helpers.encodings import Made, parameters
from tests.helpers.models import LENGTH
from tests.helpers.positions import Family, Seen
from tests.helpers.promises import (
    decodes_as_it_reads,
    documents_are_apart,
    is_saved_and_taken_out,
    learns,
    rows_are_as_alone,
    sees_nothing_later,
)
from tests.methods import test_temperature
from tests.methods.cases import CASES, FACTOR, LLAMA, Case, encoding, over
from tests.methods.test_matrix import STEPS, is_the_formula
from tests.test_docs import snippets

pytestmark = pytest.mark.usefixtures("own_registry")


def of_the_page(section: str, name: str) -> Any:
    names: dict[str, Any] = {"__name__": __name__}
    exec(snippets(section)[0], names)
    return names[name]


def passes_every_check(case: Case, ids: torch.Tensor, folder: Path) -> None:
    is_the_formula(case, LLAMA, case.plain(), case.patched(), ids)
    decodes_as_it_reads(case.patched(), "dynamic", ids, STEPS)
    rows_are_as_alone(case.patched(), "left", ids)
    documents_are_apart(case.patched(), ids[:1, :70], (30, 40))
    is_saved_and_taken_out(case.plain(), case.patch, ids, folder)


def set_defaults(monkeypatch: pytest.MonkeyPatch, name: str, **defaults: Any) -> None:
    monkeypatch.setitem(methods.DEFAULTS, name, methods.Defaults(**defaults))


def takes_temperatures(method: Method) -> None:
    test_temperature.takes_both(method)
    test_temperature.has_its_defaults(method)


def warm(factor: float, length: int) -> float:
    return 1 + 0.05 * math.log(factor)


def test_a_frequency_method_with_defaults_of_its_own(ids, tmp_path, monkeypatch) -> None:
    step: type[FrequencyMethod] = of_the_page("A frequency method", "Step")

    @register
    class Warm(step):
        name, paper, summary = "warm_step", "an example", "a step, with sharper attention"

        def own_scaling(self, rope: Rope) -> float:
            return warm(self.factor, rope.length)

        def own_temperature(self) -> LogN:
            return LogN()

    takes_temperatures(step(factor=FACTOR))
    passes_every_check(over("step", under=step(factor=FACTOR)), ids, tmp_path / "step")

    with pytest.raises(AssertionError, match="DEFAULTS"):
        test_temperature.has_its_defaults(Warm(factor=FACTOR))
    set_defaults(monkeypatch, "warm_step", scaling=warm, temperature=methods.log_n)
    takes_temperatures(Warm(factor=FACTOR))
    scaled = step(factor=FACTOR, attention_factor=warm(FACTOR, LENGTH))
    case = over("warm_step", under=scaled, log_n=LENGTH)
    passes_every_check(case, ids, tmp_path / "warm")


def test_a_position_method_of_two_bands(ids, tmp_path, monkeypatch) -> None:
    halved: type[PositionMethod] = of_the_page("A position method", "Halved")

    @register
    class WarmHalved(halved):
        name, paper, summary = "warm_halved", "an example", "far tokens, with sharper attention"

        def own_scaling(self, rope: Rope) -> float:
            return warm(self.factor, rope.length)

    def distance(m: int, n: int, window: int) -> float:
        return m - n if m - n < window else (m + window) / 2 - n / 2

    monkeypatch.setitem(distances.EVERY, "halved", distance)
    takes_temperatures(halved(factor=FACTOR))
    case = over("halved", distance="halved", constants={"window": 16})
    passes_every_check(case, ids, tmp_path)

    set_defaults(monkeypatch, "warm_halved", scaling=warm)
    takes_temperatures(WarmHalved(factor=FACTOR))


def test_an_encoding_with_bounds(ids, tmp_path, monkeypatch) -> None:
    slope: type[Encoding] = of_the_page("An encoding", "Slope")

    @register
    class Gentle(slope):
        name, paper, summary = "gentle", "an example", "a slope within bounds"

        @property
        def bounds(self) -> dict[str, tuple[float, float]]:
            return {"slope": (0.05, 0.4)}

    def scores(seen: Seen) -> Made:
        learned = seen.learned["slope"][:, None, None]
        return seen.logits - learned * seen.apart.clamp(max=30)

    for name in ("slope", "gentle"):
        entry = encodings.Encoding(name, scores, {"clip": 30})
        monkeypatch.setitem(encodings.ALL, name, entry)
        case = encoding(name)
        passes_every_check(case, ids, tmp_path / name)
        model = case.patched()
        learns(model, parameters(model), ids)
    with torch.no_grad():
        for slopes in parameters(model).values():
            slopes.fill_(7.0)
    model(ids).logits.sum().backward()
    assert all((slopes == 0.4).all() for slopes in parameters(model).values())


def own_family(monkeypatch: pytest.MonkeyPatch) -> Family:
    """The family of the page, with logits, which transformers knows until the test ends."""
    names: dict[str, Any] = {"__name__": __name__}
    exec(snippets("A family")[0], names)
    config_class, page_class = names["OwnConfig"], names["OwnModel"]

    class OwnForCausalLM(page_class):
        def forward(self, input_ids, attention_mask=None, use_cache=None):
            [hidden] = super().forward(input_ids, attention_mask, use_cache)
            return CausalLMOutput(logits=hidden @ self.embed_tokens.weight.mT)

    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", {**mapping._extra_content})
    AutoConfig.register("own", config_class)
    AutoModelForCausalLM.register(config_class, OwnForCausalLM)

    class OwnFamily(Family):
        def model(self) -> nn.Module:
            torch.manual_seed(0)
            model = OwnForCausalLM(config_class(vocab_size=128)).eval()
            for parameter in model.parameters():  # large enough for positions to matter
                nn.init.normal_(parameter, std=0.25)
            return model

    return OwnFamily("own", neighbours=True)


@contextmanager
def scaled_by_hand(
    plain: nn.Module, family: Family, model: nn.Module, t: torch.Tensor
) -> Iterator[None]:
    method = rope_ext.YaRN(factor=FACTOR)
    rotary = plain.rotary_emb
    trained = rotary.inv_freq.clone()
    rope = Rope.geometric(base=1e4, dim=2 * len(trained), length=LENGTH)
    rotary.inv_freq.copy_(method.inv_freq(rope))
    rotary.attention_scaling = method.attention_scaling(rope)
    yield
    rotary.inv_freq.copy_(trained)
    rotary.attention_scaling = 1.0


@pytest.mark.parametrize("key", ["yarn", "rerope", "dual_chunk", "alibi", "t5 over rerope"])
def test_a_family(key: str, ids, tmp_path, monkeypatch) -> None:
    """It has no cache and takes no positions, so that nothing is decoded and rows are one text."""
    family = own_family(monkeypatch)
    case = CASES[key]
    if key == "yarn":
        case = replace(case, formula=scaled_by_hand)

    def patch(model: nn.Module) -> nn.Module:
        return case.patch(model, original_max_position_embeddings=LENGTH)

    is_the_formula(case, family, family.model(), patch(family.model()), ids)
    for side in ("left", "right"):
        rows_are_as_alone(patch(family.model()), side, ids)
    sees_nothing_later(patch(family.model()), ids)
    is_saved_and_taken_out(family.model(), patch, ids, tmp_path)
