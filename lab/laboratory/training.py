"""One cell: trains a new model on one subject and evaluates it."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from lab.laboratory.model import Reading, Size, readings
from lab.laboratory.rates import NORMAL, SEED, Rates, choose
from lab.pretrain.train import MuonAdamW, schedule, weighted_loss

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler prints when it starts
POINTS = 20
"""Number of points of the training loss curve."""


class Subject(Protocol):
    """Data to train and evaluate a model with."""

    @property
    def trained(self) -> int: ...

    @property
    def steps(self) -> int: ...

    def rows_of(self, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def choosing(self) -> tuple[torch.Tensor, torch.Tensor]: ...

    def read(self, model: torch.nn.Module, make: Reading, device: torch.device) -> dict: ...


@dataclass(frozen=True)
class Training:
    """Settings that all models share.

    Args:
        size: size of the model.
        learning_rate: rate for matrices (Muon); other parameters use a sixth of it (AdamW).
        device: device to run on.
    """

    size: Size
    learning_rate: float
    device: torch.device

    def run(
        self, subject: Subject, name: str, seed: int, rates: Rates, tell: Callable[[str], None]
    ) -> dict[str, Any]:
        """Train and evaluate one model; arguments and errors are those of :meth:`train`."""
        model, record = self.train(subject, name, seed, rates=rates, tell=tell)
        clock = _clock(self.device)
        began = clock()
        found = {}
        for label, make in readings(name).items():
            tell(f"reading {label}")
            found[label] = subject.read(model, make, self.device)
        return record | {"reading_seconds": clock() - began, "rates": asdict(rates), "read": found}

    def choose_rates(
        self, subject: Subject, name: str, tell: Callable[[str], None]
    ) -> dict[str, Any]:
        """Train models with several rates, and choose by their loss on unreported rows.

        Raises:
            RopeExtError: the model does not support the encoding.
        """

        def loss(rates: Rates) -> float:
            model, _ = self.train(subject, name, seed=SEED, rates=rates, tell=lambda text: None)
            with torch.no_grad():
                found = weighted_loss(model(input_ids=ids).logits, ids, weights).item()
            tell(f"{rates}, loss {found:.3f}")
            return found

        ids, weights = (rows.to(self.device) for rows in subject.choosing())
        own = bool(_own(self.size.build(name, SEED, subject.trained)))
        choice = choose(loss, own, name in NORMAL)
        tried = [asdict(rates) | {"loss": found} for rates, found in choice.tried]
        return {"chosen": asdict(choice.rates), "tried": tried, "own": own}

    def train(
        self, subject: Subject, name: str, seed: int, rates: Rates, tell: Callable[[str], None]
    ) -> tuple[torch.nn.Module, dict[str, Any]]:
        """Return a trained model, and the cost of its training.

        Args:
            subject: data to train on.
            name: name of the encoding.
            seed: seed of weights and rows.
            rates: factors of the learning rate.
            tell: function that receives the progress.

        Raises:
            RopeExtError: the model does not support the encoding.
            FloatingPointError: the loss is NaN or infinite.
        """
        model = self.size.build(name, seed, subject.trained).to(self.device)
        steps = subject.steps
        own = _own(model)
        with torch.no_grad():
            for p in own:
                p.mul_(rates.initial)
        optimizer = MuonAdamW(
            model=model, lr=self.learning_rate, model_rate=rates.model, encoding_rate=rates.encoding
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
        clock = _clock(self.device)
        curve = []
        recent = []
        seconds = []
        tokens = 0
        peak = None
        for step in range(steps):
            ids, weights = (rows.to(self.device) for rows in subject.rows_of(seed, step))
            started = clock()

            def update(ids: torch.Tensor = ids, weights: torch.Tensor = weights) -> float:
                loss = weighted_loss(model(input_ids=ids).logits, ids, weights)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                return loss.item()

            if step == 1:  # the first step also allocates states and tables
                # Not timed, since the profiler slows it down.
                loss, peak = peak_of(update, self.device)
            else:
                loss = update()
                seconds.append(clock() - started)
            if not math.isfinite(loss):
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
            "own_parameters": sum(p.numel() for p in own),
            "steps": steps,
            "tokens": tokens,
            "seconds": statistics.median(seconds) if seconds else None,
            "peak_bytes": peak,
            "curve": curve,
        }


def _own(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters of the model's encoding."""
    return [p for name, p in model.named_parameters() if "rope_ext" in name]


def _clock(device: torch.device) -> Callable[[], float]:
    """CPU time if there is no GPU, which other programs do not affect."""
    return time.perf_counter if device.type == "cuda" else time.process_time


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
