"""Every way to patch, on pretrained models: their columns are outliers or dead, not random."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import rope_ext
from rope_ext.patching import current_patch

LENGTH = 128
"""The trained context that the patches are told of: windows and groups then begin below 300."""

PROMPT, TOKENS = 294, 300

PATCHES: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4},
    "dynamic_yarn": {"factor": 4, "length": 512},
    "llama3": {"factor": 4},
    "rerope": {"factor": 4},
    "leaky_rerope": {"factor": 4},
    "self_extend": {"factor": 4},
    "dual_chunk": {"factor": 4},
    "string": {"factor": 1.5},
    "lm_infinite": {"factor": 4},
    "alibi": {},
    "kerple": {},
    "rope": {"bias": "t5"},
}


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(1000, 40_000, (1, TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def away(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Cached decoding against one forward: root mean square of the log-probabilities."""
    last = TOKENS - PROMPT + 1
    whole = model(input_ids=ids, logits_to_keep=last).logits.float().log_softmax(-1)
    output = model(input_ids=ids[:, :PROMPT], use_cache=True, logits_to_keep=1)
    steps = [output.logits]
    for at in range(PROMPT, TOKENS):
        given = {"past_key_values": output.past_key_values, "use_cache": True}
        steps.append(model(input_ids=ids[:, at : at + 1], **given).logits)
    return float((torch.cat(steps, 1).float().log_softmax(-1) - whole).square().mean().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cached_decoding_equals_recomputation_under_every_patch(
    name: str,
    dtype: torch.dtype,
    load: Callable[[str, torch.dtype], PreTrainedModel],
    ids: torch.Tensor,
) -> None:
    # Not in float32, whose rounding a drawn bias amplifies at some lengths tenfold, at others not.
    model = load(name, dtype)
    unpatched, found = away(model, ids), {}
    bound = 1e-9 if dtype == torch.float64 else 3 * unpatched
    assert math.isfinite(unpatched)
    for method, options in PATCHES.items():
        options = {"original_max_position_embeddings": LENGTH, **options}
        torch.manual_seed(0)  # a drawn bias decides how much bfloat16 loses
        with rope_ext.patched(model, method, **options):
            assert current_patch(model) is not None
            found[method] = away(model, ids)
    apart = {method: one for method, one in found.items() if not one <= bound}
    assert apart == {}
