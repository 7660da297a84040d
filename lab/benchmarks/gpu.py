"""Tests and measures everything that needs a GPU, in less than ten minutes.

    python -m lab.benchmarks.gpu --output gpu.jsonl

Prints one line of JSON per result: first whether the kernels are correct (``ok``), then their speed
relative to torch's flash attention. The last line counts the failures, and the exit status is 1 if
there are any. Every part has a share of the time; measurements that do not fit are reported as
skipped. ``--device cpu --small`` tests the command itself; with ``TRITON_INTERPRET=1`` the kernels
of decoding and of pages run, too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import importlib
import itertools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

import rope_ext
from lab.benchmarks import attention as bands
from lab.benchmarks import pages
from lab.benchmarks.measuring import NATIVE, ratios, seconds_of, tensors, trained
from rope_ext.attention import bands as plain
from rope_ext.attention import cards, flash
from rope_ext.attention import decode as decode_kernel
from rope_ext.attention import paged as paged_attention
from rope_ext.attention.call import Call, RotatedBand
from rope_ext.attention.dispatch import attend
from rope_ext.methods import all_encodings, all_methods
from rope_ext.methods.geometry import Distance, Sinks

MIB = 2**20
SHARES = {"exact": 20, "paths": 15, "graphs": 10, "syncs": 10, "attention": 20, "model": 25}
SHARES |= {"decode": 20, "paged": 20, "lora": 10, "methods": 20}
"""Share of the time for each part, per cent; later parts get the unused time."""
KERNELS = ("cudnn", "flash", "flex")
SHAPES = ((128, 128, 4), (64, 64, 1), (256, 256, 1), (80, 80, 7), (96, 96, 4), (192, 128, 1))
"""Columns of queries and keys, columns of values, and queries for each key head."""
TILINGS = ({}, {"SIZE_ROTATED": 32}, {"SIZE_ROTATED": 64}, {"SIZE": 128}, {"num_warps": 2})
TILINGS = (*TILINGS, {"num_stages": 2}, {"num_stages": 4})
"""Other tiles to try in the decoding kernel."""


@contextlib.contextmanager
def using(kernel: str, least: int = flash.LEAST) -> Iterator[str]:
    """Yield the argument ``kernel`` for ``"cudnn"``, in tiles from ``least`` tokens, or another."""
    long = 2**62 if kernel == "flash" else 4 * least
    with mock.patch.multiple(flash, LONG=long, LEAST=least):
        yield "flash" if kernel == "cudnn" else kernel


class OutOfTimeError(Exception):
    """A part has used up its share of the time."""


@dataclass
class Run:
    """Settings and results of a run.

    Args:
        device: ``"cuda"``, or ``"cpu"`` to test the command.
        small: use the smallest sizes.
        minutes: time budget for all parts.
        output: file that also gets the lines.
        kernels: kernels to compare.
    """

    device: str
    small: bool
    minutes: float
    output: Path | None = None
    kernels: tuple[str, ...] = KERNELS
    failed: int = 0
    began: float = field(default_factory=time.monotonic)
    until: float = 0.0  # end of the current part, seconds since the start

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def options(self) -> tuple[str, ...]:
        """Kernels that are values of the option ``kernel``."""
        return tuple(kernel for kernel in self.kernels if kernel != "cudnn")

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def tell(self, part: str, **found: Any) -> None:
        """Print a line."""
        self.failed += found.get("ok") is False
        line = json.dumps({"part": part, **found})
        print(line, flush=True)
        if self.output is not None:
            with self.output.open("a") as file:
                file.write(line + "\n")

    def attempt(self, part: str, named: dict[str, Any], run: Callable[[], dict[str, Any]]) -> None:
        """Print the result of ``run``, or its error; the run continues."""
        if self.seconds() > self.until:
            raise OutOfTimeError
        began = time.monotonic()
        try:
            found = run()
        except Exception as error:  # any error is a result
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        self.tell(part, **named, **found, took=round(time.monotonic() - began, 2))
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def peak(self) -> int | None:
        """Peak memory since the last call, MiB; None on a CPU."""
        if self.device != "cuda":
            return None
        found = torch.cuda.max_memory_allocated() // MIB
        torch.cuda.reset_peak_memory_stats()
        return found


def exact(run: Run) -> None:
    """Compare outputs and gradients with the dense form in float64, and with its error in half."""
    n, window = (48, 16) if run.small else (700, 256)
    shapes = [(16, 16, 4), (24, 16, 1)] if run.small else SHAPES
    cases = [
        {"columns": shape, "queries": queries, "variant": "rerope"}
        for queries in (n, 1)
        for shape in shapes
    ]
    cases += [
        {"columns": shapes[0], "queries": 5, "variant": "rerope"},
        {"columns": shapes[0], "queries": n, "variant": "dual_chunk"},
        {"columns": shapes[0], "queries": n, "variant": "first tokens"},
        {"columns": shapes[0], "queries": n, "variant": "rows that see nothing"},
        {"columns": shapes[0], "queries": n, "variant": "rerope", "sinks": True},
        {"columns": shapes[0], "queries": 1, "variant": "rerope", "softcap": 5.0},
        {"columns": shapes[0], "queries": n, "variant": "rerope", "softcap": 5.0},
    ]
    for kernel, case in itertools.product(run.kernels, cases):
        kernel = "auto" if case.get("softcap") and run.device == "cpu" else kernel
        narrow = max(case["columns"][:2]) <= 128 and case["queries"] == n
        if (case.get("softcap") and kernel in ("cudnn", "flash")) or (
            kernel == "cudnn" and not narrow
        ):
            continue
        check = functools.partial(_exact, run, kernel, keys=n + 37, window=window, **case)
        run.attempt("exact", {"kernel": kernel, **case}, check)


def _exact(
    run: Run,
    kernel: str,
    keys: int,
    window: int,
    columns: tuple[int, int, int],
    queries: int,
    variant: str,
    sinks: bool = False,
    softcap: float | None = None,
    backward: bool = True,
) -> dict[str, Any]:
    size, value_size, groups = columns
    grads = backward and queries > 1
    asked = _asked(variant, queries, keys, window=window, columns=size, device=run.device)
    generator = torch.Generator(run.device).manual_seed(0)
    shapes = ((2, 2 * groups, queries, size), (2, 2, keys, size), (2, 2, keys, value_size))
    if sinks:
        shapes += ((2 * groups,),)
    drawn = [torch.randn(shape, generator=generator, device=run.device) for shape in shapes]
    drawn = [x.to(run.dtype) for x in drawn]
    # Random, since in the gradients of a sum errors may cancel out.
    weight = torch.randn(*shapes[0][:3], value_size, generator=generator, device=run.device)

    def results(dtype: torch.dtype, by: Callable) -> list[torch.Tensor]:
        given = [x.to(dtype).requires_grad_(grads) for x in drawn]
        call = Call(asked, bands.halves(size), size**-0.5, softcap=softcap, sinks=None)
        if sinks:
            call = Call(asked, call.pairs, call.scale, sinks=given[3])
        out = by(*given[:3], call)
        more = torch.autograd.grad(out, given, weight.to(dtype)) if grads else ()
        return [x.detach().double() for x in (out, *more)]

    def decoded(*given: Any) -> torch.Tensor:
        *qkv, call = given
        seen = bands.ranges_of(call, queries, keys, device=torch.device(run.device))
        return decode_kernel.attend(*qkv, call, seen)

    truth = results(torch.float64, plain.attend)
    with using(kernel, 128) as name:
        ours = decoded if kernel == "decode" else functools.partial(attend, kernel=name)
        got = results(run.dtype, ours)
    found, own = (_apart(x, truth) for x in (got, results(run.dtype, plain.attend)))
    # The dense form has the error of torch's flash attention; a band adds a rotation and a merge.
    least = 1e-5 if run.dtype == torch.float32 else 5e-4
    # Rounding errors of a few numbers, such as sinks, differ by luck: compare with the largest.
    ok = max(found) <= 2 * max(own) + least
    return {"ok": ok, "error": found, "error_of_dense": own}


def _asked(
    variant: str, queries: int, keys: int, window: int, columns: int, device: str
) -> list[RotatedBand]:
    """The bands of :func:`benchmarks.attention.bands`, and two more kinds."""
    if variant not in ("first tokens", "rows that see nothing"):
        return bands.bands(variant, queries, keys, window=window, columns=columns, device=device)
    near, far = bands.bands(
        "rerope", queries=queries, keys=keys, window=window, columns=columns, device=device
    )
    if variant == "rows that see nothing":
        hidden = keys - queries // 2  # from half of the queries
        return [RotatedBand(Distance(hidden, None), far.query, far.key)]
    return [near, RotatedBand(Sinks(4, window), far.query, far.key)]


def decoding(run: Run) -> None:
    """Test the decoding kernel, time it against torch's flash attention, and try other tiles."""
    if not decode_kernel.runs_on(torch.device(run.device)):
        run.tell("decode", skipped="it needs Triton and a GPU of capability 8.0 or later")
        return
    n, window = (48, 16) if run.small else (700, 256)
    cases = [{"columns": shape, "queries": 1, "variant": "rerope"} for shape in SHAPES]
    for variant in ("rerope", "dual_chunk", "self_extend", "string"):
        cases.append({"columns": SHAPES[0], "queries": 3, "variant": variant})
    cases.append({"columns": (128, 128, 7), "queries": 16, "variant": "rerope"})
    cases.append({"columns": SHAPES[0], "queries": 1, "variant": "rerope", "softcap": 5.0})
    for case in cases[:: 5 if run.small else 1]:
        check = functools.partial(
            _exact, run, kernel="decode", keys=n + 37, window=window, backward=False, **case
        )
        run.attempt("decode", {"what": "exact", **case}, check)
    heads, kv_heads, columns, window = (4, 2, 16, 16) if run.small else (32, 8, 128, 4096)
    for length in (64,) if run.small else (2**14, 2**16, 2**17):
        given = tensors(
            heads,
            kv_heads,
            queries=1,
            keys=length,
            dtype=run.dtype,
            columns=columns,
            device=run.device,
        )
        for variant in ("rerope", "dual_chunk"):
            for graphed in (False, True) if run.device == "cuda" else (False,):
                compare = functools.partial(
                    _compared,
                    run,
                    given,
                    part="decode",
                    variant=variant,
                    kernel="decode",
                    window=window,
                    graphed=graphed,
                )
                named = {"tokens": length, "variant": variant, "cuda_graph": graphed}
                run.attempt("decode", named, compare)
    if run.device == "cuda":
        given = tensors(
            heads,
            kv_heads,
            queries=1,
            keys=2**14,
            dtype=run.dtype,
            columns=columns,
            device=run.device,
        )
        for splits, change in itertools.product((32, 16, 64), TILINGS):
            measure = functools.partial(_tiled, run, given, window, splits=splits, change=change)
            run.attempt("decode", {"what": "tiles", "splits": splits, **change}, measure)


def _tiled(
    run: Run, given: list[torch.Tensor], window: int, splits: int, change: dict[str, int]
) -> dict[str, Any]:
    """Milliseconds per call with other tiles, in a CUDA graph."""
    usual = decode_kernel.tiles
    with (
        mock.patch.object(decode_kernel, "SPLITS", splits),
        mock.patch.object(decode_kernel, "tiles", lambda *sizes: usual(*sizes) | change),
    ):
        return _compared(
            run,
            given,
            part="decode",
            variant="rerope",
            kernel="decode",
            window=window,
            graphed=True,
        )


def on_pages(run: Run) -> None:
    """Test the kernel on pages, replay it in a CUDA graph, and time it against torch's flash."""
    if not decode_kernel.runs_on(torch.device(run.device)):
        run.tell("paged", skipped="it needs Triton and a GPU of capability 8.0 or later")
        return
    mixed = [(1, 50), (20, 40), (1, 3), (9, 60)]
    heads = pages.Heads(heads=4, kv_heads=2, columns=16)
    trained = 16
    if not run.small:
        mixed = [(1, 3000), (700, 700), (1, 3), (300, 1500), (1, 1)]
        heads = pages.Heads(heads=32, kv_heads=8, columns=128)
        trained = 1024
    made = functools.partial(
        pages.Case, heads=heads, trained=trained, dtype=run.dtype, device=run.device
    )
    singles = [(1, tokens) for _, tokens in mixed]
    for method in pages.METHODS[:: 3 if run.small else 1]:
        for what, requests in (("mixed", mixed), ("decoding", singles)):
            named = {"what": f"exact, {what}", "method": method}
            check = functools.partial(_exact_on_pages, run, made, method, requests=requests)
            run.attempt("paged", named, check)
    if run.device == "cuda":
        replay = functools.partial(_replayed, made, singles)
        run.attempt("paged", {"what": "replayed with other lengths and padded rows"}, replay)
    lengths = (64,) if run.small else (2**13, 2**15, 2**17)
    steps = [("decode", 1, n) for n in lengths]
    steps.append(("prefill", 64, 64) if run.small else ("prefill", 2**14, 2**14))
    for what, queries, tokens in steps:
        for method in ("rerope", "self_extend")[: 1 if run.small else 2]:
            named = {"what": what, "tokens": tokens, "method": method}
            compare = functools.partial(
                _compared_on_pages, run, made, method, queries=queries, tokens=tokens
            )
            run.attempt("paged", named, compare)


def _exact_on_pages(
    run: Run, made: Callable[..., pages.Case], method: str, requests: list[tuple[int, int]]
) -> dict[str, Any]:
    case = made(method, requests=requests)
    truth = [case.plain(torch.float64)]
    (error,) = _apart([case.attend().double()], truth)
    (own,) = _apart([case.plain(run.dtype).double()], truth)
    least = 1e-5 if run.dtype == torch.float32 else 5e-4
    # Keys are rounded once more than in the dense form, when they are cached.
    return {"ok": error <= 3 * own + least, "error": error, "error_of_dense": own}


def _replayed(
    made: Callable[..., pages.Case], requests: list[tuple[int, int]], padding: int = 3
) -> dict[str, Any]:
    """Whether a captured step reads lengths when it is replayed, and leaves padded rows alone."""
    case = made("self_extend", requests=requests, padding=padding)
    with torch.inference_mode():
        replay = _captured(case.attend)
        case.batch.lengths.sub_(torch.tensor([tokens // 2 for _, tokens in requests]).cuda())
        case.out.fill_(7.0)
        replay()
        replayed = case.out.clone()
        expected = case.attend()
    same = bool((replayed[:-padding] == expected[:-padding]).all())
    return {"ok": same and bool((replayed[-padding:] == 7).all())}


def _compared_on_pages(
    run: Run, made: Callable[..., pages.Case], method: str, queries: int, tokens: int
) -> dict[str, Any]:
    case = made(method, requests=[(queries, tokens)])
    query = case.query.transpose(0, 1)[None]
    key = case.keys[0].transpose(0, 1)[None].contiguous()
    value = case.values[0].transpose(0, 1)[None].contiguous()

    def native() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=queries > 1, enable_gqa=True
        )

    repeated = 20 if queries == 1 and not run.small else 1
    calls = {NATIVE: _by_flash(run, native), method: case.attend}
    graphed = run.device == "cuda" and queries == 1  # else the launches are most of the time
    with torch.inference_mode():
        return _timed(run, calls, method, repeated=repeated, graphed=graphed)


def paths(run: Run) -> None:
    """Compare logits of a model on every path with float64, and with the model's own error.

    With and without a bias, in every dtype: prefill, padded decoding with a growing cache, and
    compiled decoding with a static cache and a mask.
    """
    dtypes = (torch.float32,) if run.small else (torch.bfloat16, torch.float16, torch.float32)
    for dtype, method in itertools.product(
        dtypes, ("rerope",) if run.small else ("rerope", "alibi")
    ):
        named = {"method": method, "dtype": str(dtype).removeprefix("torch.")}
        run.attempt("paths", named, functools.partial(_paths, run, dtype, method))


def _paths(run: Run, dtype: torch.dtype, method: str) -> dict[str, Any]:
    length, steps = (40, 3) if run.small else (500, 3)
    batch = ids_of(run, 2, length + steps, padded=True)
    real = batch["attention_mask"].bool()

    def prefill(model: nn.Module) -> torch.Tensor:
        return model(**batch, use_cache=False).logits

    def decode(model: nn.Module, cache: Any, step: nn.Module) -> torch.Tensor:
        found = []
        for first, last in itertools.pairwise((0, *range(length, length + steps + 1))):
            tokens = batch["input_ids"][:, first:last]
            mask = batch["attention_mask"]
            run_by = model
            if step is not model and first:
                run_by = step  # the same mask in all steps, for a single graph
            else:
                mask = mask[:, :last]
            out = run_by(input_ids=tokens, attention_mask=mask, past_key_values=cache)
            found.append(out.logits.clone())
        return torch.cat(found, 1)

    def error(found: torch.Tensor, truth: torch.Tensor) -> float:
        return _apart([found[real].double()], [truth[real]])[0]

    with torch.inference_mode():
        model = tiny(run).to(dtype)
        own = error(prefill(model), prefill(copy.deepcopy(model).double()))
        exact = rope_ext.patch(copy.deepcopy(model).double(), method, factor=4, kernel="reference")
        truth = prefill(exact)
        model = rope_ext.patch(model, method, factor=4)
        backend = "eager" if run.device == "cpu" else "inductor"
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        fixed = StaticCache(config=model.config, max_cache_len=length + steps)
        errors = {
            "prefill": error(prefill(model), truth),
            "decode": error(decode(model, DynamicCache(config=model.config), model), truth),
            "compiled decode": error(decode(model, fixed, compiled), truth),
        }
    least = 1e-5 if dtype == torch.float32 else 2e-3
    ok = all(one <= 2 * own + least for one in errors.values())
    return {"ok": ok, "error": errors, "error_unpatched": own}


def model_of(run: Run, layers: int) -> nn.Module:
    """Random weights with the shape of Llama 3 8B, except for the vocabulary and fewer layers."""
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "vocab_size": 32000}
    if run.small:
        shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2, "vocab_size": 64}
    return _made(run, LlamaConfig(**shape, num_hidden_layers=layers, max_position_embeddings=8192))


def tiny(run: Run, trained_length: int = 64) -> nn.Module:
    """A model with two layers and heads of 64, whose time is mostly attention."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=trained_length,
        pad_token_id=0,
    )
    return _made(run, config)


def _made(run: Run, config: LlamaConfig) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(run.device):
        return AutoModelForCausalLM.from_config(config, dtype=run.dtype).eval()


def ids_of(run: Run, rows: int, length: int, padded: bool = False) -> dict[str, torch.Tensor]:
    """Random tokens ``[rows, length]`` and their mask; ``padded``: for a quarter of one row."""
    generator = torch.Generator(run.device).manual_seed(rows)
    ids = torch.randint(3, 60, (rows, length), generator=generator, device=run.device)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, : length // 4] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@contextlib.contextmanager
def never_dense() -> Iterator[None]:
    """Fail if FlexAttention falls back to its dense form."""
    higher_order = importlib.import_module("torch._higher_order_ops.flex_attention")

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("FlexAttention ran unfused, on all logits at once")

    with mock.patch.object(higher_order, "math_attention", refuse):
        yield


def graphs(run: Run) -> None:
    """Count compilations in evaluation, generation and training; a second round needs none."""
    for method, kernel in itertools.product(("rerope", "dual_chunk"), run.options):
        model = rope_ext.patch(tiny(run), method, factor=4, kernel=kernel)

        def task(name: str, rows: int, more: int, model: nn.Module = model) -> None:
            batch = ids_of(run, rows, (60 if run.small else 600) + more, padded=rows > 1)
            if name == "train":
                model(**batch, labels=batch["input_ids"]).loss.backward()
                return
            with torch.inference_mode():
                if name == "eval":
                    model(**batch)
                else:
                    model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)

        def count(name: str, rows: int, task: Callable = task) -> dict[str, Any]:
            graphs = []
            with never_dense():
                # Another length may compile once more, with dynamic shapes; the second round must
                # find these graphs.
                for more in (0, 64, 128) * 2:
                    before = counters["stats"]["unique_graphs"]
                    task(name, rows, more)
                    graphs.append(counters["stats"]["unique_graphs"] - before)
            return {"ok": sum(graphs[3:]) == 0, "graphs": graphs}

        for name, rows in itertools.product(("eval", "generate", "train"), (1, 2)):
            named = {"method": method, "kernel": kernel, "task": name, "rows": rows}
            run.attempt("graphs", named, functools.partial(count, name, rows))


def syncs(run: Run) -> None:
    """Count device synchronizations in a decoding step; a compiled step must have none."""
    if run.device != "cuda":
        run.tell("syncs", skipped="only a GPU can be waited for")
        return
    for kernel, rows in itertools.product(run.options, (1, 2)):
        model = rope_ext.patch(tiny(run), "rerope", factor=4, kernel=kernel)
        named = {"kernel": kernel, "rows": rows}
        eager = functools.partial(_eager_syncs, run, model, rows)
        run.attempt("syncs", {**named, "cache": "dynamic"}, eager)
        compiled = functools.partial(_no_syncs, run, model, rows)
        run.attempt("syncs", {**named, "cache": "static, compiled"}, compiled)


def _eager_syncs(run: Run, model: nn.Module, rows: int) -> dict[str, Any]:
    cache = DynamicCache(config=model.config)
    batch = ids_of(run, rows, 150, padded=rows > 1)
    counts = []
    with torch.inference_mode(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(**batch, past_key_values=cache)
        for _ in range(3):
            mask = F.pad(batch["attention_mask"], (0, 1), value=1)
            batch = {"input_ids": batch["input_ids"][:, -1:], "attention_mask": mask}
            torch.cuda.set_sync_debug_mode("warn")
            before = len(seen)
            try:
                model(**batch, past_key_values=cache)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            counts.append(sum("synchroniz" in str(one.message) for one in seen[before:]))
    return {"ok": True, "syncs_per_step": counts[-1]}


def _no_syncs(run: Run, model: nn.Module, rows: int) -> dict[str, Any]:
    step, _ = _static(run, model, rows, length=150, mode="default")
    for _ in range(3):  # compilation itself waits for the device
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"ok": True}


def _static(
    run: Run, model: nn.Module, rows: int, length: int, mode: str
) -> tuple[Callable[[], torch.Tensor], StaticCache]:
    """A compiled decoding step after a prompt, with a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=length + 64)
    backend = {"backend": "eager"} if run.device == "cpu" else {"mode": mode}
    with torch.inference_mode():
        model(**ids_of(run, rows, length), past_key_values=cache, logits_to_keep=1)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, **backend)
    token = ids_of(run, rows, 1)["input_ids"]

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return compiled(token, past_key_values=cache, logits_to_keep=1).logits

    return step, cache


def timed(run: Run) -> None:
    """Time bands relative to torch's flash attention, with device events."""
    heads, kv_heads, columns, window = (4, 2, 16, 16) if run.small else (32, 8, 128, 4096)
    variants = ("rerope",) if run.small else ("rerope", "dual_chunk", "self_extend")
    lengths = (64, 128) if run.small else (2**14, 2**16, 2**17)
    for length, part in itertools.product(lengths, ("decode", "forward", "backward")):
        queries = 1 if part == "decode" else length
        given = tensors(
            heads,
            kv_heads,
            queries,
            keys=length,
            dtype=run.dtype,
            columns=columns,
            device=run.device,
        )
        given = [x.requires_grad_(part == "backward") for x in given]
        decodes = part == "decode"
        kernels = ("flash",) if decodes else run.kernels
        for graphed in (False, True) if decodes and run.device == "cuda" else (False,):
            for variant, kernel in itertools.product(variants, kernels):
                named = {"what": part, "tokens": length, "variant": variant, "kernel": kernel}
                compare = functools.partial(
                    _compared,
                    run,
                    given,
                    part,
                    variant=variant,
                    kernel=kernel,
                    window=window,
                    graphed=graphed,
                )
                run.attempt("attention", {**named, "cuda_graph": graphed}, compare)


def _compared(
    run: Run,
    given: list[torch.Tensor],
    part: str,
    variant: str,
    kernel: str,
    window: int,
    graphed: bool,
) -> dict[str, Any]:
    # One decoding call is as short as what an event can measure.
    repeated = 20 if part == "decode" and not run.small else 1
    with contextlib.ExitStack() as stack:
        kernel = stack.enter_context(using(kernel))
        calls = {
            NATIVE: _by_flash(run, bands.attend(NATIVE, *given, window)),
            variant: bands.attend(variant, *given, window, kernel),
        }
        if part == "backward":
            calls = {name: functools.partial(trained, one, given) for name, one in calls.items()}
        if part != "backward":
            stack.enter_context(torch.inference_mode())
        rounds = 3 if part == "backward" else 5
        return _timed(run, calls, variant, repeated=repeated, graphed=graphed, rounds=rounds)


def _timed(
    run: Run,
    calls: dict[str, Callable[[], Any]],
    variant: str,
    repeated: int,
    graphed: bool,
    rounds: int = 5,
) -> dict[str, Any]:
    """Time the calls in turns; the ratio is that of ``variant`` to the first."""
    if graphed:
        calls = {name: _captured(one) for name, one in calls.items()}
    if repeated > 1:
        calls = {name: functools.partial(_often, one, repeated) for name, one in calls.items()}
    run.peak()
    found = ratios(calls, rounds, run.device)
    return {
        "milliseconds": {name: 1e3 * one.seconds / repeated for name, one in found.items()},
        "ratio": found[variant].ratio,
        "peak_mib": run.peak(),
    }


def _by_flash(run: Run, one: Callable[[], Any]) -> Callable[[], Any]:
    """Compute torch's attention by its flash kernel; on Hopper cards, it would choose cuDNN."""

    def once() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if run.device == "cuda" else SDPBackend.MATH):
            return one()

    return once


def _often(one: Callable[[], object], times: int) -> None:
    for _ in range(times):
        one()


def _captured(one: Callable[[], object]) -> Callable[[], None]:
    # Warm up on a stream of its own, as torch asks for before a capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _often(one, 3)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one()
    return graph.replay


FLASH = "unpatched, torch's flash attention"
"""Measured next to torch's own choice, which on some GPUs builds a plan for each new length."""


def variants(run: Run, layers: int, encodings: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Patch one model with each variant in turn, because only one fits in memory."""
    model = model_of(run, layers)
    with rope_ext.patched(model, "rerope", factor=8):
        yield "rerope", model
    backend = SDPBackend.FLASH_ATTENTION if run.device == "cuda" else SDPBackend.MATH
    with sdpa_kernel(backend):
        yield FLASH, model
    yield "unpatched", model
    if "flex" in run.kernels:
        with rope_ext.patched(model, "rerope", factor=8, kernel="flex"):
            yield "rerope, flex", model
    if encodings:
        with rope_ext.patched(model, "alibi"):
            yield "alibi", model


def whole(run: Run) -> None:
    """Tokens per second and peak memory, eager and compiled."""
    length, layers = (64, 2) if run.small else (2**14, 16)
    for variant, model in variants(run, layers):
        for name, once in (("prefill", _prefill), ("decode", _decode), ("compiled decode", _graph)):
            named = {"what": name, "variant": variant, "tokens": length, "layers": layers}
            run.attempt("model", named, functools.partial(once, run, model, length))


def _prefill(run: Run, model: nn.Module, length: int) -> dict[str, Any]:
    ids = ids_of(run, 1, length)["input_ids"]

    def once() -> None:
        with torch.inference_mode():
            model(ids, use_cache=False, logits_to_keep=1)

    return _rate(run, once, length)


def _decode(run: Run, model: nn.Module, length: int) -> dict[str, Any]:
    cache = DynamicCache(config=model.config)
    ids = ids_of(run, 1, length)["input_ids"]
    steps = 2 if run.small else 16

    def once() -> None:
        with torch.inference_mode():
            for _ in range(steps):
                model(ids[:, -1:], past_key_values=cache, logits_to_keep=1)

    with torch.inference_mode():
        model(ids, past_key_values=cache, logits_to_keep=1)
    return _rate(run, once, steps)


def _graph(run: Run, model: nn.Module, length: int) -> dict[str, Any]:
    torch.compiler.reset()  # CUDA graphs of an earlier variant would share its memory pool
    step, _ = _static(run, model, rows=1, length=length, mode="reduce-overhead")
    _often(step, 3)
    return _rate(run, functools.partial(_often, step, 8), 8)


def _rate(run: Run, once: Callable[[], None], tokens: int) -> dict[str, Any]:
    once()
    run.peak()
    seconds = statistics.median(seconds_of(once, run.device) for _ in range(3))
    return {"tokens_per_second": tokens / seconds, "peak_mib": run.peak()}


def lora(run: Run) -> None:
    """Time a LoRA training step."""
    from peft import LoraConfig, get_peft_model  # slow to import

    length = 64 if run.small else 2**16
    for variant, model in variants(run, 4, encodings=False):
        adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        adapted.train()
        adapted.enable_input_require_grads()
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
        batch = ids_of(run, 1, length)["input_ids"]

        def once(adapted: nn.Module = adapted, batch: torch.Tensor = batch) -> None:
            # The loss of a few tokens: all logits would need more memory than the layers.
            adapted(batch, use_cache=False, logits_to_keep=64).logits.float().logsumexp(
                -1
            ).mean().backward()
            adapted.zero_grad()

        named = {"variant": variant, "tokens": length, "layers": 4}
        run.attempt("lora", named, functools.partial(_rate, run, once, length))
        # The next variant patches the same base.
        adapted.gradient_checkpointing_disable()
        adapted.unload()


def methods(run: Run) -> None:
    """Compare logits and gradients of a small model under every method with float64 on the CPU."""
    trained_length, length = (64, 150) if run.small else (128, 300)
    needed = {"longrope": {"long_factor": [4.0] * 32}, "string": {"factor": 1.9}}
    needed |= {"abf": {"base": 1e5}, "learned": {"extend": "interpolate"}}
    needed["multiplicative"] = {"length": length}
    batch = ids_of(run, 2, length, padded=True)
    base = tiny(run, trained_length)
    own = _apart(_answers(copy.deepcopy(base), batch), _answers(_twin(base), batch, "cpu"))
    for cls in (*all_methods(), *all_encodings()):
        options = {"factor": 4} if cls in all_methods() or cls.name == "learned" else {}
        options |= needed.get(cls.name, {})
        check = functools.partial(_method, base, batch, own, method=cls.name, options=options)
        run.attempt("methods", {"method": cls.name}, check)


def _twin(model: nn.Module) -> nn.Module:
    """The same weights on the CPU, in float64."""
    return copy.deepcopy(model).to("cpu", torch.float64)


def _method(
    base: nn.Module,
    batch: dict[str, torch.Tensor],
    own: list[float],
    method: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Errors under one method; ``own``: errors of the unpatched model."""
    models = copy.deepcopy(base), _twin(base)
    for model in models:
        torch.manual_seed(0)
        rope_ext.patch(model, method, **options)
    with torch.no_grad():
        # Seeds give other numbers on another device: the twin gets those of the GPU.
        for there, here in zip(*(model.parameters() for model in models), strict=True):
            here.copy_(there)
    found = _apart(_answers(models[0], batch), _answers(models[1], batch, "cpu"))
    ok = all(error <= 2 * least + 1e-4 for error, least in zip(found, own, strict=True))
    return {"ok": ok, "error": found, "error_unpatched": own}


def _answers(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    device: str | None = None,
) -> list[torch.Tensor]:
    """Logits of real tokens, also from a cache, and all gradients."""
    given = {name: x.to(device) for name, x in batch.items()}
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    real = given["attention_mask"].bool()
    before = given["input_ids"].shape[1] - 2
    with torch.no_grad():
        out = model(**{name: x[:, :before] for name, x in given.items()})
        found = [out.logits, *_continued(model, given, cache=out.past_key_values, before=before)]
    model(**given, labels=labels, use_cache=False).loss.backward()
    grads = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return [torch.cat(found, 1)[real].double().cpu(), torch.cat(grads).cpu()]


def _continued(
    model: nn.Module, given: dict[str, torch.Tensor], cache: Any, before: int
) -> Iterator[torch.Tensor]:
    for index in range(before, given["input_ids"].shape[1]):
        mask = given["attention_mask"][:, : index + 1]
        tokens = given["input_ids"][:, index : index + 1]
        yield model(input_ids=tokens, attention_mask=mask, past_key_values=cache).logits


def _apart(found: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    return [float((x - y).norm() / y.norm()) for x, y in zip(found, truth, strict=True)]


PARTS = {
    "exact": exact,
    "paths": paths,
    "graphs": graphs,
    "syncs": syncs,
    "decode": decoding,
    "paged": on_pages,
    "attention": timed,
    "model": whole,
    "lora": lora,
    "methods": methods,
}


def device_facts(device: str) -> dict[str, Any]:
    """Describe the device."""
    facts: dict[str, Any] = {"device": device}
    for name in ("torch", "transformers", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(name)
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"name": properties.name, "memory_mib": properties.total_memory // MIB}
        facts["cuda"] = torch.version.cuda
        card = cards.card(torch.device("cuda", 0))
        facts["capability"] = ".".join(map(str, card.capability))
        facts |= {"shared_memory": card.shared, "triton_and_compiler": card.compiles}
    return facts


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; returns the status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to test this command")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument(
        "--minutes", type=float, default=8.5, help="time budget in minutes for all parts"
    )
    parser.add_argument("--output", type=Path, help="also write the results to this file")
    args = parser.parse_args(arguments)
    parts = args.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; choose among {', '.join(PARTS)}")
    if args.device == "cpu" and not args.small:
        parser.error("a CPU has nothing to be measured here; add --small to test the command")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} finds no GPU; test the command by --device cpu --small"
        )
    kernels = KERNELS
    if args.device == "cpu":
        kernels = ("flash",)  # the only one
        if os.environ.get("TRITON_INTERPRET") == "1":  # of a Triton that is imported later
            decode_kernel.runs_on = lambda device: True
            decode_kernel.SPLITS = 2
            paged_attention.SPLITS = 2
    run = Run(
        device=args.device,
        small=args.small,
        minutes=args.minutes,
        output=args.output,
        kernels=kernels,
    )
    run.tell("begin", **device_facts(args.device))
    share = 0
    total = sum(SHARES[part] for part in parts)
    for part in (part for part in PARTS if part in parts):
        share += SHARES[part]
        run.until = 60 * args.minutes * share / total
        try:
            PARTS[part](run)
        except OutOfTimeError:
            run.tell(part, skipped="the rest of this part: its share of the time is used up")
        except Exception as error:  # overhead of a part before its first line
            run.tell(part, ok=False, error=f"{type(error).__name__}: {error}"[:500])
        gc.collect()  # free the models of a part that ran out of time
    run.tell("end", failed=run.failed, seconds=round(run.seconds(), 1))
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
