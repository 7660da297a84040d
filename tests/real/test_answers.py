"""Where one forward stands for decoding, both agree prompt by prompt on pretrained models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

import rope_ext
from rope_eval.cases import share_found
from rope_eval.forward import score, write
from rope_eval.tasks.passkey import PasskeyPrompts
from rope_eval.tune.fitness import losses_of_answers, prompts_of
from rope_ext.errors import OptionError
from tests.helpers import pretrained

LENGTHS, PROMPTS = (256, 512), 3
TEXT = "The city has a harbor, an old market and two bridges over the river. "
Load = Callable[[str, torch.dtype], PreTrainedModel]


def tokenizer_of(name: str) -> Any:
    path = getattr(pretrained, name)()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def decoded(model: PreTrainedModel, tokenizer: Any, ids: Any, count: int) -> list[int]:
    eos = model.generation_config.eos_token_id
    [written] = write(model, [list(ids)], count, pad=tokenizer.pad_token_id or 0, eos=eos)
    return written


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, "yarn"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_one_forward_judges_as_decoding_does(name: str, method: str | None, load: Load) -> None:
    """For a lead-in, where each token of the key decides: recipes judge a training so.

    The key is right if decoding begins with it; that no digit follows is not part of it, so the
    text is cut there.
    """
    model, tokenizer = load(name, torch.float32), tokenizer_of(name)
    prompts = PasskeyPrompts(tokenizer)  # without a chat template
    changed = nullcontext() if method is None else rope_ext.patched(model, method, factor=2)
    found = []
    with changed:
        for length in LENGTHS:
            for number in range(PROMPTS):
                depth = (number + 0.5) / PROMPTS
                given = prompts.forward_case(length, depth, number)
                asked = prompts.case(length, depth, number)
                assert given.ids[: -given.count] == asked.ids
                _, hits = score(model, [given.ids], given.count)
                written = decoded(model, tokenizer, asked.ids, given.count)
                text = tokenizer.decode(written, skip_special_tokens=True)
                assert bool(hits.all()) == (share_found(asked, text) == 1), (length, number, text)
                found.append(bool(hits.all()))
    assert any(found)  # two answers that are always wrong would agree, too


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_answers_of_calibrations_are_judged_as_decoding_does(name: str, load: Load) -> None:
    model, tokenizer = load(name, torch.float32), tokenizer_of(name)
    text = tokenizer(TEXT * 200, add_special_tokens=False)["input_ids"]
    prompts = prompts_of(tokenizer, [256], 6, [text], seed=0)
    judged = losses_of_answers(model, prompts, lambda work: None)
    for prompt, (_, hit) in zip(prompts, judged, strict=True):
        ids, answer = prompt.ids[: -prompt.count], prompt.ids[-prompt.count :]
        written = decoded(model, tokenizer, ids, prompt.count)
        assert hit == (tuple(written) == tuple(answer))
    assert any(hit for _, hit in judged)


@pytest.mark.slow
def test_no_forward_stands_for_a_chat_models_answer() -> None:
    """It words its answer freely, so no token is known to decide."""
    from rope_eval.data.prompts import Frame

    tokenizer = tokenizer_of("smollm2")
    prompts = PasskeyPrompts(tokenizer, Frame.from_tokenizer(tokenizer))
    with pytest.raises(OptionError, match="words its answer freely"):
        prompts.forward_case(512, 0.5, 0)
