"""Methods that follow sequences in a graph: in decoding what the cache holds, else every length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig, DynamicCache, StaticCache

import rope_ext
from rope_ext.errors import CacheError
from rope_ext.forward.context import enter, forward_context, leave
from rope_ext.forward.sequences import STARTED, SequenceForward
from rope_ext.rotary.sequences import Sequences
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


@pytest.mark.parametrize("name", METHODS)
def test_what_a_graph_holds_is_what_the_eager_path_computes(
    name: str, ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as it is, without waiting for dynamo: a batch that begins, and tokens that go on."""
    model = patch(name)
    tokens, mask, positions = padded([ids[0, :80], ids[1, :50]], "left")
    given = {"attention_mask": mask, "position_ids": positions}
    right = logits(model, tokens, **given)
    one, other = (StaticCache(config=model.config, max_cache_len=160) for _ in range(2))
    steps = ids[:, :80], ids[:, 80:81], ids[:, 81:82]
    right_steps = [logits(model, step, past_key_values=one) for step in steps]

    def understood(self: Sequences, decoder: nn.Module, args: tuple, given: dict) -> None:
        traced = self._traced(decoder, given)
        assert traced is not None
        enter(traced)

    monkeypatch.setattr(Sequences, "begin", understood)
    model = patch(name)
    said = logits(model, tokens, **given)
    torch.testing.assert_close(said[mask.bool()], right[mask.bool()], **EXACT)
    for step, expected in zip(steps, right_steps, strict=True):
        torch.testing.assert_close(logits(model, step, past_key_values=other), expected, **EXACT)
    assert forward_context.stack == []


class _Devices(TorchDispatchMode):
    """The devices of the tensors that operators take and return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, out)):
            if isinstance(x, torch.Tensor):
                self.seen.add(x.device.type)
        return out


@pytest.mark.parametrize("name", METHODS)
def test_a_graph_of_decoding_holds_no_tensor_of_the_cpu(name: str, ids) -> None:
    """The device "meta" stands for a GPU, where such a tensor rules CUDA graphs out."""
    model, there = patch(name), torch.device("meta")
    cache = StaticCache(config=model.config, max_cache_len=100)
    logits(model, ids[:, :80], past_key_values=cache)
    began = getattr(cache, STARTED)
    (rotary,) = model.model.rotary_emb._forward_hooks.values()
    positions, like = torch.full((2, 1), 80, device=there), torch.empty(2, 1, 64, device=there)
    output = torch.empty(2, 1, 16, device=there), torch.empty(2, 1, 16, device=there)
    owners = [getattr(x, "__self__", None) for x in model.model._forward_pre_hooks.values()]
    (sequences,) = (x for x in owners if isinstance(x, Sequences))

    def forward() -> None:
        traced = SequenceForward(sequences, 2, 1, 0, None, True, began)
        enter(traced)
        rotary(model.model.rotary_emb, (like, positions), {}, output)
        traced.counted(positions)
        leave(traced)

    forward()  # as the eager prefill makes what the graphs find
    with _Devices() as devices:
        forward()
    assert devices.seen <= {"meta"}


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


@pytest.mark.slow
@pytest.mark.parametrize("order", [[1, 0], [0, 0]])
def test_rows_of_a_cache_that_a_graph_began_move_with_their_frequencies(order, ids) -> None:
    model = patch("dynamic_ntk")
    tokens, mask, positions = padded([ids[0, :80], ids[1, :50]], "left")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    said, right = [], []
    for run, results in ((compiled, said), (model, right)):
        cache = DynamicCache(config=model.config)
        given = {"attention_mask": mask[:, :79], "position_ids": positions[:, :79]}
        logits(run, tokens[:, :79], past_key_values=cache, **given)
        cache.reorder_cache(torch.tensor(order))
        given = {"attention_mask": mask[order], "position_ids": positions[order][:, 79:]}
        results.append(logits(model, tokens[order][:, 79:], past_key_values=cache, **given))
    torch.testing.assert_close(said, right, **EXACT)
    assert (right[0][0] - right[0][1]).abs().max() > 0.01 or order == [0, 0]


def test_a_cache_begun_without_the_patch_is_refused_in_a_graph_too(ids) -> None:
    model = tiny_llama(num_hidden_layers=1)
    cache = StaticCache(config=model.config, max_cache_len=100)
    logits(model, ids[:, :10], past_key_values=cache)
    rope_ext.patch(model, "dynamic_ntk", factor=4)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(CacheError, match="begun before the model was patched"):
        logits(compiled, ids[:, 10:11], past_key_values=cache)
