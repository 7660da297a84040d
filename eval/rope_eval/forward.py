"""Forward passes for all scores: teacher-forced ones, and real generation.

Rows of unequal length are padded on the left, with their own positions. Only scored logits are
computed, and never more than ``LOGITS`` numbers at a time: the decoder runs once, then the model's
head runs on segments of its hidden states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from rope_ext.rotary.sites import text_config, text_decoder

Advance = Callable[[float], None]
"""Called with the work (:func:`cost`) of every finished forward."""
LOGITS = 2**26
"""Maximum number of logits at a time: 256 MiB in float32, 512 positions of a 128k vocabulary."""


def cost(length: int) -> float:
    """Work of one forward over ``length`` tokens, for progress: linear plus attention."""
    return length + length * length / 4096


def left_padded(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Build inputs ``[rows, longest]``; positions count from the row's own first token."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad, dtype=torch.long, device="cpu")
    for row, tokens in zip(ids, rows, strict=True):
        # On the left: the scored tokens of all rows are then the last columns.
        row[width - len(tokens) :] = torch.tensor(tokens, dtype=torch.long, device="cpu")
    inputs = {"input_ids": ids.to(device)}
    # Only with padding, since a mask of ones would keep faster kernels from running.
    if any(len(tokens) < width for tokens in rows):
        sizes = torch.tensor([len(tokens) for tokens in rows], device="cpu").unsqueeze(1)
        places = torch.arange(width, device="cpu") - (width - sizes)
        inputs["attention_mask"] = (places >= 0).long().to(device)
        inputs["position_ids"] = places.clamp(min=0).to(device)
    return inputs


@torch.no_grad()  # inference tensors would remain in buffers of dynamic scaling
def score(
    model: nn.Module, rows: Sequence[Sequence[int]], tail: int, pad: int = 0, logits: int = LOGITS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score the last ``tail`` tokens of each row, in one forward, some ``logits`` at a time.

    Returns negative log likelihoods, float32, nats, and whether each token is the argmax, so that
    greedy decoding would write it; both ``[rows, tail]`` on the CPU.
    """
    inputs = left_padded(rows, pad, cast(PreTrainedModel, model).device)
    ids = inputs["input_ids"]
    targets = ids[:, ids.shape[1] - tail :]
    losses = torch.empty(targets.shape, dtype=torch.float32, device="cpu")
    hits = torch.empty(targets.shape, dtype=torch.bool, device="cpu")
    for start, stop, part in _logits(model, inputs, tail, most=logits):
        wanted = targets[:, start:stop]
        loss = nn.functional.cross_entropy(
            part.float().flatten(0, 1), wanted.flatten(), reduction="none"
        )
        losses[:, start:stop] = loss.view(wanted.shape).cpu()
        # For bfloat16 on CPUs, argmax is three times slower; on ties, both return the first.
        hits[:, start:stop] = (part.max(-1).indices == wanted).cpu()
    return losses, hits


def _logits(
    model: nn.Module, inputs: dict[str, torch.Tensor], tail: int, most: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (start, stop, logits) of tail segments; logits ``[rows, stop - start, vocab]``."""
    rows, width = inputs["input_ids"].shape
    decoder = text_decoder(model)
    vocabulary = getattr(text_config(decoder), "vocab_size", 1)
    size = max(1, most // (rows * max(1, vocabulary)))
    known = inspect.signature(model.forward).parameters
    sparing = "logits_to_keep" in known or "kwargs" in known
    if tail <= size or decoder is model:
        keep = {"logits_to_keep": tail + 1} if sparing else {}
        logits = model(**inputs, use_cache=False, **keep).logits
        # The logits at a token predict the next one.
        yield 0, tail, logits[:, -tail - 1 : -1]
        return
    caught: list[Any] = []
    hook = decoder.register_forward_hook(lambda module, args, output: caught.append(output))
    try:
        # Only the hidden states are used: as few logits as the model allows.
        model(**inputs, use_cache=False, **({"logits_to_keep": 1} if sparing else {}))
    finally:
        hook.remove()
    output = caught[-1]
    hidden = output[0]
    for start in range(0, tail, size):
        stop = min(tail, start + size)
        # The state before the first token of the segment predicts it.
        begin = width - tail - 1 + start
        part = hidden[:, begin : begin + stop - start]
        # The decoder does not run again: only the number of these tokens matters.
        with _answering(decoder, output, part):
            yield start, stop, model(inputs["input_ids"][:, : part.shape[1]]).logits


@contextmanager
def _answering(decoder: nn.Module, output: Any, hidden: torch.Tensor) -> Iterator[None]:
    """Return ``hidden`` as the decoder's output; the model's own head then computes the logits."""
    answer = type(output)(last_hidden_state=hidden)
    # Somebody may have replaced it on this instance before.
    own = decoder.__dict__.get("forward")
    decoder.forward = lambda *args, **kwargs: answer  # Module.__call__ looks it up
    try:
        yield
    finally:
        if own is None:
            del decoder.forward
        else:
            decoder.forward = own


def write(
    model: nn.Module, rows: Sequence[Sequence[int]], count: int, pad: int, eos: Any
) -> list[list[int]]:
    """Generate up to ``count`` tokens greedily after each row, with a cache, up to ``eos``."""
    plain = cast(PreTrainedModel, model)
    inputs = left_padded(rows, pad, plain.device)
    inputs.pop("position_ids", None)  # generate computes them from the mask
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    greedy = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}
    greedy |= {"no_repeat_ngram_size": 0, "pad_token_id": pad, "eos_token_id": eos}
    settings = GenerationConfig(max_new_tokens=count, bos_token_id=None, **greedy)
    with torch.no_grad(), _without_defaults(plain):
        output = cast(Any, model).generate(**inputs, generation_config=settings)
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    texts = []
    for row in output[:, inputs["input_ids"].shape[1] :].tolist():
        # Rows that end early are padded up to the longest.
        end = next((place for place, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:end])
    return texts


@contextmanager
def _without_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Clear the checkpoint's settings, since generate uses them for unset options."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
