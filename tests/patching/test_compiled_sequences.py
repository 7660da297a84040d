"""Methods that follow sequences in a graph: in decoding what the cache holds, else every length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

import rope_ext
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, logits, padded

METHODS: dict[str, dict[str, Any]] = {
    "dynamic_yarn": {},
    "dynamic_ntk": {"temperature": "log_n"},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "start_tokens": 4},
    "yarn": {"temperature": "log_n"},
}


def patch(name: str) -> nn.Module:
    return rope_ext.patch(tiny_llama(num_hidden_layers=1), name, factor=4, **METHODS[name])


pytestmark = pytest.mark.usefixtures("no_graphs")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_generate_with_a_static_cache_compiles_one_graph_for_all_steps(name: str, ids) -> None:
    model = patch(name)
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    tokens, mask, _ = padded([ids[0, :80], ids[1, :50]], "left")
    new = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    given = {"attention_mask": mask, "pad_token_id": 0, **new}
    right = model.generate(tokens, **given)
    for _ in range(2):  # the second request finds the graph of the first
        said = model.generate(tokens, cache_implementation="static", compile_config=config, **given)
        assert torch.equal(said, right)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_a_prefill_compiles_whole_and_the_eager_path_goes_on(ids) -> None:
    model = patch("dynamic_ntk")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    said, right = [], []
    for part, results in ((compiled, said), (model, right)):
        cache = StaticCache(config=model.config, max_cache_len=100)
        results.append(logits(part, ids[:, :80], past_key_values=cache))
        results.append(logits(part, ids[:, 80:81], past_key_values=cache))
        results.append(logits(model, ids[:, 81:84], past_key_values=cache))
    torch.testing.assert_close(torch.cat(said, 1), torch.cat(right, 1), **EXACT)
    assert not counters["graph_break"]
