"""Continuous batching writes what generate writes for each prompt by itself."""

from __future__ import annotations

import importlib.util
import os
import threading
import types
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import rope_ext
from rope_ext.attention import paged
from rope_ext.position import pages
from tests.helpers.models import tiny_llama
from tests.helpers.positions import FAMILIES, METHODS, patch

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

CLOSE = 2e-5  # of log-probabilities in float32, which are summed in another order
PAGES = {"page_size": 16, "num_blocks": 32, "max_batch_tokens": 48}  # prompts come in chunks
Written = list[tuple[list[int], list[float]]]
"""For each prompt, the tokens and their log-probabilities."""


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 100, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = prompts(90, 4, 30, 65)


def greedy(new: int = 6, **more: Any) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=1, **more
    )


def batched(
    model: nn.Module, inputs: list[list[int]], config: GenerationConfig | None = None, **more: Any
) -> Written:
    pages = ContinuousBatchingConfig(return_logprobs=True, **{**PAGES, **more})
    results = model.generate_batch(
        inputs, generation_config=config or greedy(), continuous_batching_config=pages
    )
    assert [result.error for result in results.values()] == [None] * len(results)
    return [(result.generated_tokens, result.logprobs) for result in results.values()]


def alone(model: nn.Module, inputs: list[list[int]]) -> Written:
    written = []
    for prompt in inputs:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            generation_config=greedy(return_dict_in_generate=True, output_scores=True),
            attention_mask=torch.ones_like(ids),
        )
        tokens = out.sequences[0, len(prompt) :].tolist()
        scores = [x[0].log_softmax(-1) for x in out.scores]
        written.append((tokens, [float(x[t]) for x, t in zip(scores, tokens, strict=True)]))
    return written


def assert_same(written: Written, expected: Written) -> None:
    assert [tokens for tokens, _ in written] == [tokens for tokens, _ in expected]
    for (_, found), (_, by_itself) in zip(written, expected, strict=True):
        torch.testing.assert_close(found, by_itself, atol=CLOSE, rtol=0)


def trained(model: nn.Module) -> nn.Module:
    """Give learned parameters values that matter."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "rope_ext" in name:
            size = parameter.data.abs().mean().clamp(min=0.3)
            parameter.data += 0.3 * size * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_position_methods(method: str) -> None:
    model = patch(tiny_llama(), method)
    assert_same(batched(model, PROMPTS), alone(model, PROMPTS))


@pytest.mark.parametrize(
    "kind",
    [
        "qwen2",
        "gemma3_text",
        "gemma3_text scaled",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("gemma2 scaled", "gpt_oss scaled", "smollm3", "mistral windowed", "glm4")
        ),
    ],
)
def test_families_with_windows_caps_sinks_and_unrotated_layers(kind: str) -> None:
    family = FAMILIES[kind]
    model = patch(family.model(), **family.options)
    assert_same(batched(model, PROMPTS), alone(model, PROMPTS))


@pytest.mark.parametrize(
    "name",
    [
        "alibi",
        "fire",
        "xpos",
        "repo",
        "sinusoidal",
        "swan",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("nope", "t5", "kerple_log", "kerple_power", "sandwich", "dape", "cope", "shaw"),
                *("transformer_xl", "deberta", "3d_rpe", "floater", "drope", "learned"),
                "multiplicative",
            )
        ),
    ],
)
def test_encodings(name: str) -> None:
    tables = {"length": 200} if name in ("learned", "multiplicative") else {}
    model = trained(rope_ext.patch(tiny_llama(num_hidden_layers=4), name, **tables))
    assert_same(batched(model, PROMPTS), alone(model, PROMPTS))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("yarn", {}),
        ("yarn", {"precise": True}),
        ("yarn", {"temperature": "log_n"}),
        ("yarn", {"layers": [0], "bias": "alibi"}),
        ("dynamic_yarn", {"length": 200}),
        ("longrope2", {}),
    ],
)
def test_frequency_methods(method: str, options: dict[str, Any]) -> None:
    model = rope_ext.patch(tiny_llama(), method, factor=4, **options)
    assert_same(batched(model, PROMPTS), alone(model, PROMPTS))


@pytest.mark.parametrize("implementation", ["eager", "paged|eager", "sdpa"])
def test_models_loaded_with_each_attention_implementation(implementation: str) -> None:
    given = tiny_llama()
    config = LlamaConfig(**given.config.to_dict())
    config._attn_implementation = implementation
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(given.state_dict())
    patch(model)
    expected = alone(patch(given), PROMPTS)
    assert_same(batched(model, PROMPTS), expected)
    rope_ext.unpatch(model)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("method", ["self_extend", "repo"])
def test_requests_that_share_a_prefix(method: str) -> None:
    """Equal pages are cached once, so each prompt after the first one reuses them."""
    prefix, *rest = prompts(64, 9, 20, 33)
    inputs = [prefix + each for each in rest]
    one = {"factor": 4} if method == "self_extend" else {}
    model = trained(rope_ext.patch(tiny_llama(), method, **one))
    expected = alone(model, inputs)
    given = ContinuousBatchingConfig(return_logprobs=True, **PAGES)
    written = []
    with model.continuous_batching_context_manager(
        generation_config=greedy(), continuous_batching_config=given
    ) as manager:
        for prompt in inputs:
            manager.add_request(prompt, max_new_tokens=6)
            result = manager.get_result(timeout=60)
            written.append((result.generated_tokens, result.logprobs))
    assert_same(written, expected)


def test_requests_that_fork_and_requests_that_wait_for_pages() -> None:
    model = patch(tiny_llama())
    expected = alone(model, PROMPTS)
    best = GenerationConfig(**greedy().to_diff_dict() | {"do_sample": True, "top_k": 1})
    best.num_return_sequences = 2  # only sampling allows several, here among one token
    several = batched(model, PROMPTS[:1], best)
    assert [tokens for tokens, _ in several] == [expected[0][0]] * 2
    assert_same(batched(model, PROMPTS, num_blocks=8), expected)  # 8 pages of 16 tokens


def test_generate_in_another_thread_meanwhile() -> None:
    model = patch(tiny_llama())
    expected = alone(model, PROMPTS)
    found: list[Written] = []
    thread = threading.Thread(target=lambda: found.append(alone(model, PROMPTS)))
    thread.start()
    written = batched(model, PROMPTS)
    thread.join()
    assert_same(written, expected)
    assert_same(found[0], expected)


def test_a_manager_kept_for_another_session_does_not_outlive_the_patch() -> None:
    """Its pages hold keys with the rotation of the earlier patch."""
    model = patch(tiny_llama())

    def written() -> Written:
        results = model.generate_batch(
            PROMPTS,
            generation_config=greedy(),
            continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True, **PAGES),
            persistent_manager=True,
        )
        return [(x.generated_tokens, x.logprobs) for x in results.values()]

    assert_same(written(), alone(model, PROMPTS))
    assert_same(written(), alone(model, PROMPTS))
    patch(model, "rerope", replace=True)
    assert_same(written(), alone(model, PROMPTS))
    rope_ext.unpatch(model)
    assert_same(written(), alone(model, PROMPTS))
    rope_ext.patch(model, "yarn", factor=4)
    assert_same(written(), alone(model, PROMPTS))


def test_pages_of_another_patch_are_not_continued_beside_a_new_request() -> None:
    """Those of a manager that somebody has kept."""
    model, pages = patch(tiny_llama()), types.SimpleNamespace(layer_to_allocator={})
    places, ends = torch.tensor([[0, 1, 2, 30]]), torch.tensor([0, 3, 4])
    with pytest.raises(rope_ext.CacheError, match="pages"):
        model(torch.tensor([PROMPTS[1]]), cache=pages, position_ids=places, cu_seq_lens_q=ends)


def test_what_cannot_be_served_is_refused_before_anything_runs() -> None:
    model = rope_ext.patch(tiny_llama(), "dynamic_yarn", factor=4)
    for call in (
        lambda: model.generate_batch(PROMPTS, generation_config=greedy()),
        model.init_continuous_batching,
    ):
        with pytest.raises(rope_ext.CacheError, match="pass length=TOKENS"):
            call()
    model = patch(model, replace=True)
    with pytest.raises(rope_ext.CacheError, match="object"):
        model(torch.tensor([PROMPTS[1]]), cache=object())
    model.set_attn_implementation("sdpa")
    with pytest.raises(rope_ext.UnsupportedModelError, match="attention implementation"):
        model.init_continuous_batching()


def test_a_cuda_graph_is_refused(monkeypatch) -> None:
    from transformers.generation.continuous_batching import initialization

    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    model = patch(tiny_llama())
    with pytest.raises(rope_ext.CacheError, match="use_cuda_graph"):
        model.init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=True)
        )
    assert_same(batched(model, PROMPTS), alone(model, PROMPTS))


def test_caches_of_generate_are_unchanged_afterwards() -> None:
    model = patch(tiny_llama())
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        before = model(ids, past_key_values=DynamicCache(config=model.config)).logits
        batched(model, PROMPTS)
        after = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    torch.testing.assert_close(after, before, atol=0, rtol=0)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run the paged kernel on the CPU as on a GPU; returns the numbers of tokens of its calls."""
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs the package triton, and TRITON_INTERPRET=1 before it is imported")
    tokens = []

    def attend(query: torch.Tensor, **more: Any) -> torch.Tensor:
        tokens.append(len(query))
        return original(query=query, **more)

    original = paged.attend
    monkeypatch.setattr(paged, "attend", attend)
    monkeypatch.setattr(paged, "SPLITS", 2)  # programs run one after the other here
    monkeypatch.setattr(pages, "runs_on", lambda device: True)
    return tokens


def check_on_gpus(model: nn.Module, computed: list[int], layers: int) -> None:
    """Compare mixed batches, of which the kernel computes that many layers."""
    inputs = prompts(70, 4, 29)
    written = batched(model, inputs, greedy(3), page_size=8)
    assert_same(written, [(tokens[:3], scores[:3]) for tokens, scores in alone(model, inputs)])
    assert sum(computed) == layers * sum(len(prompt) + 2 for prompt in inputs)


@pytest.mark.parametrize("method", METHODS)
def test_position_methods_on_gpus(method: str, computed: list[int]) -> None:
    model = patch(tiny_llama(), method)
    by_request = method == "dpe"  # each pair has its own positions, and tables have one
    check_on_gpus(model, computed, layers=0 if by_request else 2)


@pytest.mark.parametrize(
    ("method", "options", "layers"),
    [
        ("rerope", {"factor": 4, "bias": "alibi"}, 0),
        ("self_extend", {"factor": 4, "temperature": "llama4"}, 2),
        ("self_extend", {"factor": 4, "temperature": "ssmax"}, 0),
        ("self_extend", {"factor": 4, "precise": True, "layers": [1]}, 1),
        ("nope", {}, 2),
    ],
)
def test_options_on_gpus(
    method: str, options: dict[str, Any], layers: int, computed: list[int]
) -> None:
    check_on_gpus(rope_ext.patch(tiny_llama(), method, **options), computed, layers)


@pytest.mark.parametrize(
    ("kind", "layers"), [("qwen3", 2), ("gpt_oss", 1), ("gemma2", 1), ("glm4", 0)]
)
def test_families_on_gpus(kind: str, layers: int, computed: list[int]) -> None:
    """Sinks and soft caps; layers with a window or other pairs attend request by request."""
    family = FAMILIES[kind]
    check_on_gpus(patch(family.model(), **family.options), computed, layers)


def test_requests_that_share_a_prefix_on_gpus(computed: list[int]) -> None:
    test_requests_that_share_a_prefix("self_extend")
    assert computed
