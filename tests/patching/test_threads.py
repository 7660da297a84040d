"""Requests that overlap: in several threads, in replicas, or one within another."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import rope_ext
from rope_ext.caches import living
from tests.families.checks import changed, snapshot
from tests.helpers.models import tiny_llama

EXACT = {"atol": 1e-4, "rtol": 0}  # float32 sums in another order; logits are of size 10
ASKED = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """What each job returns, or the error it raises, each in a thread of its own."""
    results: list[Any] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Meeting:
    """Has every forward of a module wait for the other threads', right after it has begun."""

    def __init__(self, module: torch.nn.Module, parties: int) -> None:
        self.barrier = threading.Barrier(parties)
        self.handle = module.register_forward_hook(self.wait)

    def wait(self, *args: Any) -> None:
        with suppress(threading.BrokenBarrierError):  # the others are done
            self.barrier.wait(timeout=2)


@pytest.mark.parametrize("name", ["dynamic_ntk", "dynamic_yarn"])
def test_forwards_in_two_threads_give_what_they_give_one_after_the_other(ids, name: str) -> None:
    model = rope_ext.patch(tiny_llama(), name, factor=4)
    prompts = [ids[:1], ids[1:, :100]]

    def say(prompt: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(prompt, use_cache=False).logits

    alone = [say(prompt) for prompt in prompts]
    meeting = Meeting(model.model.embed_tokens, 2)  # after the decoder's pre-hook
    together = at_once(*(lambda prompt=prompt: say(prompt) for prompt in prompts))
    meeting.handle.remove()
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_generate_in_two_threads_writes_what_each_writes_alone(ids) -> None:
    model = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4)
    prompts = [ids[:1], ids[1:, :70]]

    def write(prompt: torch.Tensor) -> torch.Tensor:
        settings = {"output_logits": True, "return_dict_in_generate": True}
        return torch.cat(model.generate(prompt, **ASKED, **settings).logits)

    alone = [write(prompt) for prompt in prompts]
    meeting = Meeting(model.model.embed_tokens, 2)
    together = at_once(*(lambda prompt=prompt: write(prompt) for prompt in prompts))
    meeting.handle.remove()
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("second", ["generate", "forward"])
def test_a_request_within_another_disturbs_neither(ids, second: str) -> None:
    model = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4)
    other = ids[1:, :100]

    def ask() -> torch.Tensor:
        if second == "generate":
            return model.generate(other, **ASKED)
        with torch.no_grad():
            return model(other, use_cache=False).logits

    class Asks(StoppingCriteria):
        """Also stands for a streamer."""

        def __init__(self) -> None:
            self.answers: list[torch.Tensor] = []

        def put(self, tokens: torch.Tensor) -> None:
            self.answers.append(ask())

        def end(self) -> None:
            pass

        def __call__(self, tokens: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.answers.append(ask())
            return torch.zeros(len(tokens), dtype=torch.bool)

    written, answer = model.generate(ids[:1], **ASKED), ask()
    asks = Asks()
    assert torch.equal(model.generate(ids[:1], streamer=asks, **ASKED), written)
    criteria = StoppingCriteriaList([asks])
    for cached in (True, False):
        again = model.generate(ids[:1], stopping_criteria=criteria, use_cache=cached, **ASKED)
        assert torch.equal(again, written)
    assert len(asks.answers) > 2 * ASKED["max_new_tokens"]
    assert all(torch.equal(one, answer) for one in asks.answers)


def test_replicas_in_threads_give_what_the_model_gives(ids) -> None:
    """What ``DataParallel`` does: replicas share the hooks of the model they were made from."""
    model = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4)

    def replica() -> torch.nn.Module:
        twins = {name: m._replicate_for_data_parallel() for name, m in model.named_modules()}
        for name, module in model.named_modules():
            for child in module._modules:
                twins[name]._modules[child] = twins[f"{name}.{child}".lstrip(".")]
            twins[name]._parameters = dict(module._parameters)
        return twins[""]

    prompts = [ids[:1], ids[1:, :100]]
    with torch.no_grad():
        alone = [model(prompt, use_cache=False).logits for prompt in prompts]
    meeting = Meeting(model.model.embed_tokens, 2)

    def say(prompt: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return replica()(prompt, use_cache=False).logits

    together = at_once(*(lambda prompt=prompt: say(prompt) for prompt in prompts))
    meeting.handle.remove()
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("negative", [None, 80])
def test_both_branches_of_guidance_keep_the_frequencies_of_the_request(
    ids, use_cache: bool, negative: int | None
) -> None:
    given = {"guidance_scale": 1.5, "use_cache": use_cache, "output_scores": True}
    if negative is not None:  # 80 tokens that grow to 84: beyond the trained 64
        given["negative_prompt_ids"] = ids[1:, :negative]
    written = []
    for length in (None, 100 + ASKED["max_new_tokens"]):
        model = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4, length=length)
        made = model.generate(ids[:1, :100], return_dict_in_generate=True, **given, **ASKED)
        written.append(torch.cat(made.scores))
    torch.testing.assert_close(*written, **EXACT)


@pytest.mark.parametrize("first", ["patch", "adapter"])
def test_prompt_tuning_announces_what_it_will_write(ids, first: str) -> None:
    """PEFT replaces what generate calls before each forward, by what it found when it was made."""
    peft = pytest.importorskip("peft")
    model = tiny_llama()
    if first == "patch":
        rope_ext.patch(model, "dynamic_ntk", factor=4)
    torch.manual_seed(0)
    tuned = peft.get_peft_model(
        model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    ).eval()
    if first == "adapter":
        rope_ext.patch(tuned, "dynamic_ntk", factor=4)
    given = {"input_ids": ids[:, :90], "attention_mask": torch.ones(2, 90, dtype=torch.long)}
    settings = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}
    written = tuned.generate(**given, **settings)
    rope_ext.patch(tuned, "dynamic_ntk", factor=4, length=120, replace=True)
    assert torch.equal(written, tuned.generate(**given, **settings))


# --- patching -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["yarn", "dynamic_yarn", "rerope"])
def test_one_of_several_threads_patches_and_the_others_are_told(model, ids, name: str) -> None:
    before = snapshot(model)
    with torch.no_grad():
        right = rope_ext.patch(tiny_llama(), name, factor=4)(ids).logits
    for _ in range(3):
        jobs = [lambda: rope_ext.patch(model, name, factor=4)] * 4
        results = at_once(*jobs)
        assert sorted(type(result).__name__ for result in results) == [
            *["AlreadyPatchedError"] * 3,
            "LlamaForCausalLM",
        ]
        with torch.no_grad():
            assert torch.equal(model(ids).logits, right)
        results = at_once(*[lambda: rope_ext.unpatch(model)] * 4)
        assert [type(result).__name__ for result in results].count("NotPatchedError") == 3
        assert not changed(before, snapshot(model))


@pytest.mark.parametrize("name", ["yarn", "dynamic_yarn", "rerope"])
def test_patching_and_unpatching_in_many_threads_leaves_the_model_as_it_was(
    model, ids, name: str
) -> None:
    before = snapshot(model)
    other = tiny_llama()
    other_before = snapshot(other)

    def work(which: torch.nn.Module) -> None:
        for _ in range(4):
            for step in (
                lambda: rope_ext.patch(which, name, factor=4),
                lambda: rope_ext.patch(which, "pi", factor=2, replace=True),
                lambda: rope_ext.unpatch(which),
            ):
                with suppress(rope_ext.AlreadyPatchedError, rope_ext.NotPatchedError):
                    step()
        with suppress(rope_ext.NotPatchedError):
            rope_ext.unpatch(which)

    results = at_once(*[lambda which=which: work(which) for which in (model, other) * 2])
    assert results == [None] * 4
    for which, was in ((model, before), (other, other_before)):
        if rope_ext.describe(which).method is not None:
            rope_ext.unpatch(which)
        assert not changed(was, snapshot(which))


def test_caches_are_listed_while_another_thread_makes_some() -> None:
    living()
    made: list[DynamicCache] = []
    finished = threading.Event()

    def make() -> None:
        made.extend(DynamicCache() for _ in range(3000))
        finished.set()

    def ask() -> None:
        while not finished.wait(0):
            living()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        results = at_once(make, ask)
    finally:
        sys.setswitchinterval(before)
    assert results == [None, None]
    assert {id(cache) for cache in made} <= {id(cache) for cache in living()}


def test_a_check_of_caches_that_another_thread_ends_disturbs_no_forward(ids) -> None:
    """Torch calls a hook without keyword arguments once it is removed from the dict of those."""
    gc.collect()
    model = tiny_llama()
    cache = model(ids[:, :9]).past_key_values
    rope_ext.patch(model, "yarn", factor=4)  # from now on, forwards check their caches
    before = len(model.model._forward_pre_hooks)
    del cache
    jobs = [lambda: model(ids[:, :9], use_cache=False)]

    def interrupt(module: torch.nn.Module, args: tuple) -> None:
        if module is model.model and jobs:  # after torch has listed the hooks
            assert type(at_once(jobs.pop())[0]).__name__ == "CausalLMOutputWithPast"

    handle = torch.nn.modules.module.register_module_forward_pre_hook(interrupt)
    try:
        found = model(ids[:, :9]).logits
    finally:
        handle.remove()
    assert not jobs and len(model.model._forward_pre_hooks) == before - 1
    assert torch.equal(found, model(ids[:, :9]).logits)
