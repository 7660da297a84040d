"""Compares a temperature for every head with one for all heads.

    python -m lab.benchmarks.heads --output runs/heads

``temperature="log_n"`` sharpens all heads alike: a query at position ``i`` is multiplied by ``1 +
scale max(0, ln(i + 1) / ln L - 1)``. Here every layer and head has its own ``scale``, from

* ``entropy``: the scale that keeps the mean entropy of the head's attention, for queries at the end
  of the target length, at what it is at the end of the trained length in the unpatched model. It is
  measured on text, without gradients.
* ``learned``: only the scales are trained, as in Scalable-Softmax (Nakanishi 2025, arXiv
  2501.19399), on the sum that ``calibrate`` minimizes: the loss of text beyond the trained length
  plus that of passkey answers;
* ``adapter``, with ``--adapter`` and instead of the other two: the scales that
  ``recipes/finetune.py`` trained with ``temperature="ssmax"``, on rows of text that state facts and
  ask for them in other words.

All are compared with the best of a few scales for all heads, chosen by the same sum, on unseen
documents and passkeys. Within the trained length, no scale has any effect.

Every cell is a file in the output; interrupted cells resume.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext
from lab.benchmarks.calibration import BOX, parser_of, run, texts_of
from rope_eval.cases import Case
from rope_eval.data.prompts import Frame, beginning
from rope_eval.forward import score
from rope_eval.reports.calibration import mean
from rope_eval.reports.intervals import mean_interval, paired_rates
from rope_eval.tasks.passkey import Passkey
from rope_eval.tune.calibrate import cut
from rope_eval.tune.fitness import (
    Prompt,
    losses_at_end,
    losses_of_answers,
    prompts_of,
    windows_of,
)
from rope_ext.command.arguments import parse_length
from rope_ext.methods import Method, build_method
from rope_ext.methods.temperature import LogN
from rope_ext.position.attend import watched
from rope_ext.position.learned import TEMPERATURE
from rope_ext.position.tensors import Dense
from rope_ext.rotary.sites import text_decoder

METHODS = ("yarn", "self_extend")
TRAINED = 512
"""Trained length of both checkpoints, tokens; a patch changes the one in their configuration."""
ONE = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Scales for all heads; 1 is ``log_n``."""
SCALES = torch.linspace(0, 8, 33)
"""Scales at which entropies are measured; between them, they are interpolated."""
ROUNDS = 2  # a third round changes the scales of tiny-512 at 2048 tokens by at most 0.03
QUERIES = 16  # number of queries at the end of every window
SEED = 7


def growth(t: torch.Tensor) -> torch.Tensor:
    """``max(0, ln(t + 1) / ln L - 1)`` at positions ``t``."""
    return (LogN(length=TRAINED).at(t.double()) - 1).float()


@contextmanager
def scaled(model: nn.Module, scales: torch.Tensor | None) -> Iterator[None]:
    """Multiply the queries of every head, in forwards without a cache and without padding.

    Args:
        model: a Llama or a Qwen3, patched or not.
        scales: ``[layers, heads]``; None: no scaling.
    """
    with ExitStack() as stack:
        for index, layer in enumerate(() if scales is None else _layers(model)):
            module = getattr(layer, "q_norm", layer.q_proj)  # before the rotation, which is linear
            handle = module.register_forward_hook(_Multiply(scales, index, layer.head_dim))
            stack.callback(handle.remove)
        yield


class _Multiply:
    """Hook that multiplies queries; see :func:`scaled`."""

    def __init__(self, scales: Any, layer: int, columns: int) -> None:
        self.scales, self.layer, self.columns = scales, layer, columns

    def __call__(self, module: nn.Module, args: tuple, query: torch.Tensor) -> torch.Tensor:
        by_head = query.view(*query.shape[:2], -1, self.columns)
        grown = growth(torch.arange(query.shape[1]))
        factor = 1 + grown[:, None] * self.scales[self.layer]  # [tokens, heads]
        return (by_head * factor[..., None]).view(query.shape)


def _layers(model: nn.Module) -> list[Any]:
    layers: Any = text_decoder(model).layers
    return [layer.self_attn for layer in layers]


@torch.no_grad()
def entropies(
    model: nn.Module,
    windows: Sequence[Sequence[int]],
    scales: torch.Tensor | None = None,
    queries: int = QUERIES,
) -> torch.Tensor:
    """Mean attention entropy of the last ``queries`` tokens, for several scales of each head.

    Memory is linear in the length of a window.

    Args:
        model: patched model with ``scales`` applied.
        windows: token ids.
        scales: applied scales, ``[layers, heads]``, or None.
        queries: number of queries at the end of every window.

    Returns:
        Nats, ``[layers, heads, scales]``: for each of :data:`SCALES` in this head, with all other
        heads unchanged.
    """
    found: dict[int, list[torch.Tensor]] = {}

    def look(module: Any, dense: Dense, window: int | None) -> None:
        tokens, layer = dense.query.shape[2], module.layer_idx
        weights = dense.weights(slice(tokens - queries, None))[0]  # [heads, queries, keys]
        logits = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
        logits = logits.masked_fill(weights == 0, -math.inf)
        grown = growth(torch.arange(tokens - queries, tokens))[:, None]
        now = 1 if scales is None else 1 + grown * scales[layer][:, None, None]
        by_scale = []
        for scale in SCALES:  # weights are a softmax, and so are their powers, normalized
            share = (logits * ((1 + grown * scale) / now)).log_softmax(-1)
            by_scale.append(torch.special.entr(share.exp()).sum(-1).mean(-1))
        found.setdefault(layer, []).append(torch.stack(by_scale, -1))

    decoder = text_decoder(model)
    with watched(decoder, look):
        for window in windows:
            decoder(input_ids=torch.tensor([window]), use_cache=False)
    return torch.stack([torch.stack(found[layer]).mean(0) for layer in sorted(found)])


def matched(by_scale: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The scale at which each entropy reaches its target, or the nearest of :data:`SCALES`.

    Args:
        by_scale: entropies by scale, decreasing, ``[layers, heads, scales]``.
        target: entropies, ``[layers, heads]``.
    """
    above = (by_scale > target[..., None]).sum(-1)  # the first scale at or below the target
    low = (above - 1).clamp(0, len(SCALES) - 2)
    high, step = low + 1, float(SCALES[1] - SCALES[0])
    first, second = (by_scale.gather(-1, at[..., None])[..., 0] for at in (low, high))
    share = ((first - target) / (first - second).clamp(min=1e-12)).clamp(0, 1)
    return SCALES[low] + step * share


def by_entropy(
    model: nn.Module,
    method: Method,
    windows: Sequence[Sequence[int]],
    inside: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Scales ``[layers, heads]`` that keep the entropy at the trained length; see the module.

    Args:
        model: unpatched model.
        method: method without a temperature.
        windows: token ids of the target length.
        inside: token ids of the trained length.
    """
    scales = None
    target = entropies(model, inside)[..., 0]
    with rope_ext.patched(model, method):
        for _ in range(ROUNDS):
            with scaled(model, scales):
                scales = matched(entropies(model, windows, scales), target)
    assert scales is not None
    return scales


def learned(
    model: Any,
    method: Method,
    windows: Sequence[Sequence[int]],
    prompts: Sequence[Prompt],
    steps: int,
    rate: float = 0.1,
) -> torch.Tensor:
    """Scales ``[layers, heads]``, trained from 0 by Adam on one window and one prompt per step."""
    heads = model.config.num_attention_heads
    scales = torch.zeros(len(_layers(model)), heads, requires_grad=True)
    optimizer = torch.optim.Adam([scales], lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    with rope_ext.patched(model, method), scaled(model, scales):
        for step in range(steps):
            window, prompt = windows[step % len(windows)], prompts[step % len(prompts)]
            optimizer.zero_grad()
            _loss(model, window, len(window) - TRAINED).backward()
            _loss(model, prompt.ids, prompt.count).backward()
            optimizer.step()
            schedule.step()
    return scales.detach()


def of_adapter(folder: Path) -> torch.Tensor:
    """Scales ``[layers, heads]`` that ``recipes/finetune.py`` has saved in a directory."""
    weights = load_file(folder / "adapter_model.safetensors")
    found = {name: value for name, value in weights.items() if TEMPERATURE in name}
    numbers = {int(name.split(".layers.")[1].split(".")[0]): name for name in found}
    return torch.stack([found[numbers[layer]].float() for layer in sorted(numbers)])


def _loss(model: Any, row: Sequence[int], tail: int) -> torch.Tensor:
    """Mean loss of the last ``tail`` tokens, nats."""
    ids = torch.tensor([row])
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=tail + 1).logits[0, :-1]
    return nn.functional.cross_entropy(logits, ids[0, -tail:])


class Cell:
    """One checkpoint at one length, with text for selection and for measurement."""

    def __init__(self, checkpoint: str, args: argparse.Namespace) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(BOX / checkpoint, dtype=torch.float32)
        self.model.eval().requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(BOX / checkpoint)
        seen, other = texts_of(checkpoint)
        self.length, self.args = parse_length(args.length), args

        def rows(texts: list[str], count: int, seed: int) -> Any:
            return windows_of(tokenizer, texts, self.length, count, seed, "ask for fewer --windows")

        self.seen = rows(seen, args.windows, 0).windows
        first = beginning(tokenizer)
        self.inside = [piece for row in self.seen for piece in islice(cut(row, TRAINED, first), 2)]
        self.prompts = prompts_of(tokenizer, [self.length], 24, self.seen, 0)
        steps = 0 if args.adapter else args.steps
        more = rows(seen, 3 * args.windows, 3).windows if steps else ()
        asked = prompts_of(tokenizer, [self.length], steps, more, 3)
        self.training = more, random.Random(3).sample(asked, len(asked))
        self.other = rows(other, args.windows, SEED)
        frame = Frame.from_tokenizer(tokenizer, "no")
        self.passkeys: Sequence[Case] = (
            Passkey(trials=args.trials).questions(frame, [self.length], SEED).cases
        )

    def compare(self, name: str) -> dict[str, Any]:
        """Compare losses and passkeys of the best common scale and of scales by head."""
        model = self.model
        method = build_method(name, factor=self.length / TRAINED, temperature=1.0)
        shape = len(_layers(model)), model.config.num_attention_heads
        every = {f"{one:g}": torch.full(shape, one) for one in ONE}
        chosen = {one: self._choose(method, scales) for one, scales in every.items()}
        best = min(chosen, key=lambda one: sum(chosen[one]))
        tried = {"0": every["0"], "one": every[best]}
        if self.args.adapter:
            tried["adapter"] = of_adapter(self.args.adapter)
        else:
            tried["entropy"] = by_entropy(model, method, self.seen, self.inside)
        if self.training[1]:
            tried["learned"] = learned(model, method, *self.training, self.args.steps)
        return {
            "chosen": chosen,
            "best": best,
            "scales": {one: scales.tolist() for one, scales in tried.items()},
            "measured": {one: self._measure(method, scales) for one, scales in tried.items()},
        }

    def _choose(self, method: Method, scales: torch.Tensor) -> tuple[float, float]:
        with rope_ext.patched(self.model, method), scaled(self.model, scales):
            far = losses_at_end(self.model, self.seen, self.length // 4, lambda rows: None)
            answers = losses_of_answers(self.model, self.prompts, lambda rows: None)
        return mean(far), mean([loss for loss, _ in answers])

    def _measure(self, method: Method, scales: torch.Tensor) -> dict[str, list[Any]]:
        with rope_ext.patched(self.model, method), scaled(self.model, scales):
            windows = self.other.windows
            far = losses_at_end(self.model, windows, self.length // 4, lambda rows: None)
            found = [
                bool(score(self.model, [tuple(case.ids)], case.count)[1].all())
                for case in self.passkeys
            ]
        return {"far": [mean(each) for each in self.other.by_document(far)], "found": found}


def show(cells: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    table = Table(title="unseen text and passkeys at the target length, and the change by heads")
    for column in ("checkpoint", "method", "scales", "loss", "change", "passkeys", "change"):
        table.add_column(column)
    for (checkpoint, name), cell in cells.items():
        one = cell["measured"]["one"]
        for kind, other in cell["measured"].items():
            changes = ["", ""]
            if kind not in ("0", "one"):
                change = [b - a for a, b in zip(one["far"], other["far"], strict=True)]
                changes = [
                    f"{mean(change):+.4f} {_text(mean_interval(change))}",
                    _text(paired_rates(other["found"], one["found"])),
                ]
            table.add_row(
                checkpoint,
                name,
                f"{cell['best'] if kind == 'one' else kind} for all" if changes[0] == "" else kind,
                f"{mean(other['far']):.4f}",
                changes[0],
                f"{sum(other['found'])} of {len(other['found'])}",
                changes[1],
            )
    Console(width=140).print(table)


def _text(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"[{interval[0]:+.3f}, {interval[1]:+.3f}]"


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0], METHODS)
    parser.add_argument("--windows", type=int, default=12, help="windows per half of the text")
    parser.add_argument("--trials", type=int, default=20, help="passkeys at each of five depths")
    parser.add_argument("--steps", type=int, default=40, help="training steps; 0: no training")
    parser.add_argument("--adapter", type=Path, help="output directory of recipes/finetune.py")
    args = parser.parse_args()
    suffix = f"-{args.length}-{args.adapter.name}" if args.adapter else f"-{args.length}"
    run(args, lambda checkpoint, name: Cell(checkpoint, args).compare(name), show, suffix)


if __name__ == "__main__":
    main()
