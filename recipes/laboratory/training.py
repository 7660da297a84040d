"""One cell: trains a new model on one subject and evaluates it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

import torch

from recipes.laboratory.model import Reading, Size, readings
from recipes.laboratory.rates import NORMAL, SEED, Rates, choose
from recipes.laboratory.text import Text
from recipes.pretrain.train import MuonAdamW, schedule

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler tells when it begins and ends
POINTS = 20
"""Of the curve of training losses."""


class Subject(Protocol):
    """Data to train and evaluate a model with."""

    @property
    def trained(self) -> int: ...

    @property
    def steps(self) -> int: ...

    def rows_of(self, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def read(self, model: torch.nn.Module, make: Reading, device: torch.device) -> dict: ...


def run(
    size: Size,
    subject: Subject,
    name: str,
    seed: int,
    learning_rate: float,
    rates: Rates,
    device: torch.device,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Train and evaluate one model.

    Args:
        size: of the model.
        subject: to train on.
        name: of the encoding.
        seed: of weights and rows.
        learning_rate: for matrices (Muon); other parameters use a sixth of it (AdamW).
        rates: factors of it.
        device: to run on.
        tell: called with the progress.

    Raises:
        RopeExtError: the model does not support the encoding.
        FloatingPointError: the loss is NaN or infinite.
    """
    model, record = train_model(size, subject, name, seed, learning_rate, rates, device, tell)
    clock = _clock(device)
    began, found = clock(), {}
    for label, make in readings(name).items():
        tell(f"reading {label}")
        found[label] = subject.read(model, make, device)
    return record | {"reading_seconds": clock() - began, "rates": asdict(rates), "read": found}


def choose_rates(
    size: Size,
    subject: Text,
    name: str,
    learning_rate: float,
    device: torch.device,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Train models with several rates, and choose by their loss on text that is not reported.

    Raises:
        RopeExtError: the model does not support the encoding.
    """

    def silent(text: str) -> None:
        pass

    def loss(rates: Rates) -> float:
        model, _ = train_model(size, subject, name, SEED, learning_rate, rates, device, silent)
        found = subject.choosing_loss(model, device)
        tell(f"{rates}, loss {found:.3f}")
        return found

    own = any(
        "rope_ext" in n for n, _ in size.build(name, SEED, subject.trained).named_parameters()
    )
    choice = choose(loss, own, name in NORMAL)
    tried = [asdict(rates) | {"loss": found} for rates, found in choice.tried]
    return {"chosen": asdict(choice.rates), "tried": tried, "own": own}


def _clock(device: torch.device) -> Callable[[], float]:
    """CPU time where there is no GPU to wait for: other programs then cost it nothing."""
    return time.perf_counter if device.type == "cuda" else time.process_time


def train_model(
    size: Size,
    subject: Subject,
    name: str,
    seed: int,
    learning_rate: float,
    rates: Rates,
    device: torch.device,
    tell: Callable[[str], None],
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A trained model, and what its training cost; arguments as of :func:`run`."""
    model, steps = size.build(name, seed, subject.trained).to(device), subject.steps
    parameters = [p for n, p in model.named_parameters() if "rope_ext" in n]
    own = sum(p.numel() for p in parameters)
    with torch.no_grad():
        for p in parameters:
            p.mul_(rates.initial)
    optimizer = MuonAdamW(model, learning_rate, rates.model, rates.encoding)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    clock = _clock(device)
    curve, recent, seconds, tokens, peak = [], [], [], 0, None
    for step in range(steps):
        ids, weights = (rows.to(device) for rows in subject.rows_of(seed, step))
        started = clock()

        def update(ids: torch.Tensor = ids, weights: torch.Tensor = weights) -> float:
            return train_step(model, optimizer, ids, weights)

        if step == 1:  # the first one also makes what is kept: states, tables
            loss, peak = peak_of(update, device)
        else:
            loss = update()
            seconds.append(clock() - started)
        if loss != loss:
            raise FloatingPointError(f"the loss is no number after {step} steps")
        scheduler.step()
        tokens += ids.numel()
        recent.append(loss)
        if (step + 1) * POINTS // steps > step * POINTS // steps:
            curve.append((step + 1, statistics.fmean(recent)))
            tell(f"step {step + 1}/{steps}, loss {curve[-1][1]:.3f}")
            recent = []
    return model.eval(), {
        "parameters": sum(p.numel() for p in model.parameters()),
        "own_parameters": own,
        "steps": steps,
        "tokens": tokens,
        "seconds": statistics.median(seconds) if seconds else None,
        "peak_bytes": peak,
        "curve": curve,
    }


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> float:
    """One training step; returns the loss per scored token, nats."""
    logits, targets = model(input_ids=ids).logits[:, :-1], ids[:, 1:]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    counts = weights[:, 1:].flatten()
    loss = (losses * counts).sum() / counts.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def peak_of(function: Callable[[], float], device: torch.device) -> tuple[float, int]:
    """The result of ``function``, and the peak of the tensor bytes it allocated.

    On a CPU every allocation is counted, independently of what the allocator keeps.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = function()
        return result, torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiled:
        result = function()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return result, most
