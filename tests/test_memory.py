"""The estimated memory of a prompt, against what a forward allocates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import rope_ext
from rope_ext.advice.memory import Live, memory
from rope_ext.errors import OptionError, UnsupportedModelError
from tests.families.zoo import tiny_of
from tests.helpers.models import tiny_llama


def allocated(model: nn.Module, *chunks: int) -> int:
    """Peak of the last chunk's forward, with the cache, bytes."""
    live, cache = Live(), None
    live.known((*model.parameters(), *model.buffers()))
    with torch.no_grad(), live:
        for count in chunks:
            live.peak = live.live
            ids = torch.zeros(1, count, dtype=torch.long)
            cache = model(ids, use_cache=True, logits_to_keep=1, past_key_values=cache)
            cache = cache.past_key_values
    return live.peak


@pytest.mark.parametrize("chunks", [(512,), (384, 128)])
def test_cache_and_prefill_are_what_torch_allocates(chunks: tuple[int, ...]) -> None:
    model = tiny_llama().bfloat16().eval()
    found = memory(model.config, sum(chunks), chunk=chunks[-1])
    assert found.weights == sum(p.nbytes for p in model.parameters())
    assert found.cache + found.prefill == pytest.approx(allocated(model, *chunks), rel=0.02)


@pytest.mark.parametrize("method", ["rerope", "self_extend", "dual_chunk", "lampe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_position_method_adds_at_most_what_is_said(method: str, dtype: torch.dtype) -> None:
    model = tiny_llama().to(dtype)
    short, long = (memory(model.config, length, dtype=dtype) for length in (1024, 2048))
    most = long.cache + long.prefill + long.position_method
    most -= short.cache + short.prefill + short.position_method
    rope_ext.patch(model, method, factor=32)
    allocated(model, 2048)  # tables of rotations are made once
    assert allocated(model, 2048) - allocated(model, 1024) <= most  # blocks have a fixed size


def test_a_quantized_cache_is_smaller_by_its_bits() -> None:
    config = tiny_llama().config
    full, packed = (memory(config, 4096, cache_bits=bits).cache for bits in (16, 4))
    assert 0.28 < packed / full < 0.32  # 4.5 bits of 16, and 128 tokens as they are


def test_a_family_without_grouped_keys_has_as_many_as_queries() -> None:
    config = tiny_of(transformers.GPTNeoXForCausalLM).config
    found = memory(config, 256)
    assert found.cache == 2 * config.num_hidden_layers * config.hidden_size * 256 * 2
    assert found.position_method > 0


def test_a_family_with_heads_of_two_sizes_is_estimated() -> None:
    model = tiny_of(transformers.Gemma4ForCausalLM).bfloat16()
    found = memory(model.config, 256)
    assert found.weights == sum(p.nbytes for p in model.parameters())
    assert found.cache > 0 and found.position_method > 0


@pytest.mark.parametrize("name", ["length", "batch", "chunk"])
def test_a_number_below_one_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}=0"):
        memory(tiny_llama().config, **{"length": 64, name: 0})


@pytest.mark.parametrize("kind", ["longrope", "dynamic_ntk", "dynamic_yarn"])
def test_frequencies_that_depend_on_the_length_are_estimated_too(kind: str, tmp_path: Path) -> None:
    """Tensors without storage have no largest position to choose them by."""
    plain = memory(tiny_llama().config, 300)
    if kind == "longrope":
        tables = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **tables}
        tiny_llama(rope_parameters=rope).save_pretrained(tmp_path)
    else:
        rope_ext.patch(tiny_llama(), kind, factor=4).save_pretrained(tmp_path)
    assert memory(tmp_path, 300) == plain


def test_sizes_that_do_not_fit_together_are_one_line(tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.num_key_value_heads = 3
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="cannot be estimated") as raised:
        memory(tmp_path, 64)
    assert "\n" not in str(raised.value)


def test_an_encoder_decoder_is_refused_by_name() -> None:
    model = tiny_of(transformers.T5GemmaForConditionalGeneration)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        memory(model.config, 128)


def test_an_encoder_needs_no_cache(tmp_path: Path) -> None:
    tiny_of(transformers.ModernBertModel).save_pretrained(tmp_path)
    found = memory(tmp_path, 128)
    assert found.cache == 0 < found.prefill
    with pytest.raises(UnsupportedModelError, match="one forward; leave chunk out"):
        memory(tmp_path, 128, chunk=32)
