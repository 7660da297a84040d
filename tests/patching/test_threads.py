"""Requests that overlap: in several threads, in replicas, or one within another."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import rope_ext
from tests.helpers.models import tiny_llama


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


@pytest.mark.parametrize("name", ["dynamic_ntk", "dynamic_yarn", "rerope", "lampe"])
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


def replica(model: torch.nn.Module, scale: float = 1.0) -> torch.nn.Module:
    """What ``DataParallel`` makes of a model, but with other weights: on another device."""
    twins = {name: m._replicate_for_data_parallel() for name, m in model.named_modules()}
    for name, module in model.named_modules():
        for child in module._modules:
            twins[name]._modules[child] = twins[f"{name}.{child}".lstrip(".")]
        weights = module._parameters.items()
        twins[name]._parameters = {k: None if x is None else scale * x for k, x in weights}
    return twins[""]


REPLICATED = [("yarn", {}), ("dynamic_ntk", {}), ("rerope", {}), ("yarn", {"bias": "kerple_log"})]
REPLICATED += [("self_extend", {"bias": "t5"}), ("yarn", {"temperature": "ssmax"})]


@pytest.mark.parametrize(("name", "more"), REPLICATED, ids=str)
def test_a_replica_computes_with_its_own_weights(ids, name: str, more: dict) -> None:
    model = rope_ext.patch(tiny_llama(), name, factor=4, **more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)  # also a bias that begins with zeros
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.mul_(0.7)
        found = replica(model, 0.7)(ids, use_cache=False).logits
        assert torch.equal(found, other(ids, use_cache=False).logits)
        assert not torch.equal(found, model(ids, use_cache=False).logits)


def test_replicas_in_threads_give_what_the_model_gives(ids) -> None:
    """Replicas share the hooks of the model they were made from."""
    model = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=4)
    prompts = [ids[:1], ids[1:, :100]]
    with torch.no_grad():
        alone = [model(prompt, use_cache=False).logits for prompt in prompts]
    meeting = Meeting(model.model.embed_tokens, 2)

    def say(prompt: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return replica(model)(prompt, use_cache=False).logits

    together = at_once(*(lambda prompt=prompt: say(prompt) for prompt in prompts))
    meeting.handle.remove()
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_of_threads_that_patch_one_model_one_does(ids) -> None:
    model = tiny_llama()
    before = model(ids).logits

    results = at_once(*[lambda: rope_ext.patch(model, "self_extend", factor=4)] * 4)
    assert [isinstance(x, rope_ext.AlreadyPatchedError) for x in results].count(True) == 3
    assert torch.equal(rope_ext.unpatch(model)(ids).logits, before)


def test_threads_that_load_leave_logging_and_classes_as_they_were(tmp_path, monkeypatch) -> None:
    """The first to begin each of the three stages is the first to end it."""
    rope_ext.patch(tiny_llama(), "t5").save_pretrained(tmp_path)
    loggers = [logging.getLogger(name) for name in ("rope_ext", "transformers")]
    ignored = "_keys_to_ignore_on_load_unexpected"
    before = [*(logger.level for logger in loggers), getattr(PreTrainedModel, ignored)]
    waits = 20  # seconds; each event is set long before
    reached = {(who, stage): threading.Event() for who in "12" for stage in "abc"}
    config, weights = AutoConfig.from_pretrained, LlamaForCausalLM.from_pretrained.__func__
    rotate = LlamaRotaryEmbedding.forward

    def slow_config(*args: Any, **kwargs: Any) -> Any:
        who = threading.current_thread().name
        reached[who, "a"].set()
        other = reached["2", "a"] if who == "1" else reached["1", "b"]
        assert other.wait(waits)
        return config(*args, **kwargs)

    def slow_weights(cls: type, *args: Any, **kwargs: Any) -> Any:
        who = threading.current_thread().name
        reached[who, "b"].set()
        other = reached["2", "b"] if who == "1" else reached["1", "c"]
        assert other.wait(waits)
        loaded = weights(cls, *args, **kwargs)
        if who == "2":
            reached["2", "c"].set()
        return loaded

    def slow_rotation(*args: Any, **kwargs: Any) -> Any:  # patch tries the module out
        if threading.current_thread().name == "1" and not reached["1", "c"].is_set():
            reached["1", "c"].set()
            assert reached["2", "c"].wait(waits)
            time.sleep(0.3)  # until the second waits for its turn to patch
        return rotate(*args, **kwargs)

    monkeypatch.setattr(AutoConfig, "from_pretrained", slow_config)
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", classmethod(slow_weights))
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", slow_rotation)

    def load(who: str) -> Any:
        threading.current_thread().name = who
        assert who == "1" or reached["1", "a"].wait(waits)
        return rope_ext.from_pretrained(tmp_path)

    for found in at_once(lambda: load("1"), lambda: load("2")):
        assert rope_ext.describe(found).method == "t5"
    after = [*(logger.level for logger in loggers), getattr(PreTrainedModel, ignored)]
    assert after == before
