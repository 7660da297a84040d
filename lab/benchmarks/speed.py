"""Measure the time that a patch costs, relative to the unpatched model.

    python -m lab.benchmarks.speed

Models: prefill, decoding and training steps under at least one method of each kind, relative to
the unpatched model (``--model``, ``--lengths``, ``--method``). Decoding: a model with many layers
under position methods, eager and compiled. Attention: position methods relative to rotary embedding
plus torch's own attention (``--attention-lengths``). Variants alternate, so that other load on the
machine affects all of them. A ratio is the median over rounds of the ratio within a round, with the
lower and upper quartile; 1.00 means that patching is free. Processors with bfloat16 units are also
measured in bfloat16. Writes ``speed.json`` and ``speed.md`` after each part.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

import rope_ext
from lab.benchmarks import attention, decoding, measuring
from lab.benchmarks.measuring import NATIVE, Measured
from rope_eval.cases import dump, require_positive
from rope_eval.folder import Folder
from rope_eval.versions import versions
from rope_ext.command.arguments import parse_length, parse_lengths, split
from rope_ext.command.method_options import checked_methods
from rope_ext.command.terminal import clean_errors, quiet, stoppable, tell
from rope_ext.errors import OptionError
from rope_ext.methods import build_method
from rope_ext.saving import checkpoints as models

MODEL = "checkpoints/tiny-512"
EACH_KIND = {
    "yarn": {"method": "yarn"},
    "yarn, float64 angles": {"method": "yarn", "precise": True},
    "dynamic_ntk": {"method": "dynamic_ntk"},
    "rerope": {"method": "rerope"},
    "self_extend": {"method": "self_extend"},
    "dual_chunk": {"method": "dual_chunk"},
    "string": {"method": "string", "factor": 1.0},
    "nope": {"method": "nope"},
    "alibi": {"method": "alibi"},
    "t5": {"method": "t5"},
    "kerple_log": {"method": "kerple_log"},
}
PARTS = ("models", "decoding", "attention")
KINDS = {
    "frequency": "fixed frequencies",
    "dynamic": "frequencies that depend on the sequence length",
    "position": "mapped positions, computed by rope_ext's attention",
    "encoding": "an encoding that replaces the rotation",
}


def kind(method: str, precise: bool | None = None, **options: Any) -> str:
    """One of ``KINDS``, for keyword arguments of ``rope_ext.patch``."""
    built: Any = build_method(method, **options)
    if built.is_dynamic:
        return "dynamic"
    return "encoding" if built.kind == "rotation" else built.kind


@torch.inference_mode()
def prefill(model: nn.Module, ids: torch.Tensor) -> None:
    model(ids, use_cache=False, logits_to_keep=1)


@torch.inference_mode()
def decode(model: nn.Module, ids: torch.Tensor, cache: DynamicCache) -> None:
    """Decode eight tokens after those in the cache, which is left as it was."""
    start = cache.get_seq_length()
    for _ in range(8):
        model(ids[:, -1:], past_key_values=cache, logits_to_keep=1)
    # A negative number removes tokens at the end: every run starts at the same length.
    cache.crop(start - cache.get_seq_length())


def train(model: nn.Module, ids: torch.Tensor) -> None:
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()


def measure(
    models: Mapping[str, nn.Module], ids: torch.Tensor, rounds: int
) -> dict[str, dict[str, Measured]]:
    """``{task: {variant: measured}}`` on ids ``[rows, tokens]``; variants alternate."""
    runs: dict[str, dict[str, Callable[[], None]]]
    runs = {"prefill": {}, "decode": {}, "training step": {}}
    for variant, patched in models.items():
        cache = DynamicCache(config=patched.config)
        with torch.inference_mode():
            patched(ids, past_key_values=cache, logits_to_keep=1)
        runs["prefill"][variant] = partial(prefill, patched, ids)
        runs["decode"][variant] = partial(decode, patched, ids, cache)
        runs["training step"][variant] = partial(train, patched, ids)
    return {task: measuring.ratios(of, rounds, ids.device.type) for task, of in runs.items()}


def measure_attention(
    lengths: Sequence[int], window: int, dtype: torch.dtype, rounds: int
) -> Iterator[dict[str, dict[str, Measured]]]:
    """``{column: {variant: measured}}`` of :mod:`benchmarks.attention`; one step at the longest."""
    for name, backward in (("forward", False), ("with backward", True)):
        for length in lengths:
            attends = {
                variant: partial(attention.attend, variant, window=window)
                for variant in (NATIVE, *attention.VARIANTS)
            }
            column = f"{name}, {length}"
            tell(f"attention alone: {column}, {rounds} rounds")
            heads = attention.HEADS
            yield {
                column: measuring.prefill(
                    attends, heads, length, dtype=dtype, backward=backward, rounds=rounds
                )
            }
    for kv_heads in (attention.HEADS, attention.HEADS // 4):
        column = f"decode at {max(lengths)}, {kv_heads} key heads"
        tell(f"attention alone: {column}, {5 * rounds} rounds")
        yield {
            column: attention.decode(
                max(lengths), kv_heads=kv_heads, window=window, dtype=dtype, rounds=5 * rounds
            )
        }


def patch_seconds(model: nn.Module, rounds: int, factor: float) -> float:
    """Median seconds of ``rope_ext.patch`` with YaRN."""
    values = []
    for _ in range(rounds):
        start = time.perf_counter()
        rope_ext.patch(model, "yarn", factor=factor)
        values.append(time.perf_counter() - start)
        rope_ext.unpatch(model)
    return statistics.median(values)


def evaluate(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield all results so far as JSON after each part.

    Raises:
        RopeExtError: a method or option is unknown, nothing can be measured, or the model cannot be
            loaded.
    """
    if args.small:
        args.lengths = "64"
        args.attention_lengths = "128"
        args.window = 32
        args.rounds = 2
    variants = _variants(args)
    kinds = {variant: kind(**more) for variant, more in variants.items()}
    on_cpu = models.resolve_device(args.device) == "cpu"
    parts = _parts(args, kinds, on_cpu=on_cpu)
    lengths = parse_lengths(args.lengths)
    of_attention = parse_lengths(args.attention_lengths)
    shortest = min(*lengths, *of_attention)
    require_positive(rounds=args.rounds, length=shortest, window=args.window)
    machine = measuring.machine()
    results: dict[str, Any] = {
        "machine": machine,
        "model": args.model,
        "rounds": args.rounds,
        "window": args.window,
        "small": args.small,
        "variants": variants,
        "kinds": kinds,
        "models": {},
        "decoding": {},
        "attention": {},
        "versions": versions(),
    }
    dtypes = _dtypes(args.dtype, on_cpu=on_cpu, units=machine["bfloat16"])
    exact = ["float32" if dtype == "auto" else dtype for dtype in dtypes]
    add_models = partial(_add_models, results, args, lengths=lengths)
    add_decoding = partial(_add_decoding, results, args)
    add_attention = partial(_add_attention, results, args, lengths=of_attention)
    # Lazy: a part is measured when its turn comes.
    steps = {
        "models": map(add_models, dtypes),
        "decoding": map(add_decoding, exact),
        "attention": map(add_attention, exact),
    }
    for part in parts:
        for _ in chain.from_iterable(steps[part]):
            yield results


def _parts(args: argparse.Namespace, kinds: Mapping[str, str], on_cpu: bool) -> list[str]:
    """Return the parts asked for that can be measured, in order.

    Raises:
        OptionError: a part is unknown, or none can be measured.
    """
    asked = split(args.parts)
    if not asked or set(asked) - set(PARTS):
        raise OptionError(f"--parts {args.parts!r} is not valid; parts: {', '.join(PARTS)}")
    possible = {"models"}
    if on_cpu:  # lab.benchmarks.gpu measures the others on a GPU
        possible.add("attention")
    if on_cpu and "position" in kinds.values():
        possible.add("decoding")
    parts = [part for part in PARTS if part in asked and part in possible]
    if not parts:
        raise OptionError(
            f"--parts {args.parts} measures nothing here: decoding and attention need a CPU, and "
            f"decoding a position method; give --parts models, --device cpu or --method rerope"
        )
    return parts


def _dtypes(asked: str, on_cpu: bool, units: bool) -> list[str]:
    """Return the dtypes to measure; ``units``: whether the processor has units for bfloat16."""
    if asked != "auto" or not on_cpu:
        return [asked]
    return ["float32", "bfloat16"] if units else ["float32"]


def _variants(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return arguments of ``patch`` by variant: the methods asked for, or one of each kind."""
    names = split(args.method)
    if names:
        methods = checked_methods(names, args.factor, {})
        return {method: {"method": method, **more} for method, more in methods.items()}
    return {variant: {"factor": args.factor, **more} for variant, more in EACH_KIND.items()}


def _add_models(
    results: dict[str, Any], args: argparse.Namespace, dtype: str, lengths: Sequence[int]
) -> Iterator[None]:
    """Measure whole models in a dtype; yields after each length, in tokens."""
    model = models.load_model(args.model, dtype, args.device)
    patched = {NATIVE: model}
    for variant, more in results["variants"].items():
        patched[variant] = rope_ext.patch(measuring.of_same_weights(model), **more)
    generator = torch.Generator().manual_seed(0)
    by_length: dict[int, Any] = {}
    results["models"][f"{str(model.dtype).removeprefix('torch.')} on {model.device}"] = by_length
    for length in lengths:
        ids = torch.randint(3, model.config.vocab_size, (1, length), generator=generator)
        tell(f"models: {len(patched)} variants, {length} tokens, {args.rounds} rounds")
        by_length[length] = _plain(measure(patched, ids.to(model.device), args.rounds))
        yield
    results["patch_seconds"] = patch_seconds(model, 20, args.factor)
    yield


def _add_decoding(results: dict[str, Any], args: argparse.Namespace, dtype: str) -> Iterator[None]:
    """Measure decoding with position methods in a dtype; yields after each size."""
    kinds = results["kinds"]
    positions = {
        variant: more
        for variant, more in results["variants"].items()
        if kinds[variant] == "position"
    }
    results["decoding"][dtype] = {}
    size = decoding.size(args.small)
    for found in decoding.measure(
        positions, of=size, dtype=getattr(torch, dtype), rounds=args.rounds
    ):
        results["decoding"][dtype] |= _plain(found)
        yield


def _add_attention(
    results: dict[str, Any], args: argparse.Namespace, dtype: str, lengths: Sequence[int]
) -> Iterator[None]:
    """Measure attention alone in a dtype; yields after each part."""
    few = max(1, args.rounds // 5)  # half a minute each at 16k
    results["attention"][dtype] = {}
    for found in measure_attention(
        lengths, window=args.window, dtype=getattr(torch, dtype), rounds=few
    ):
        results["attention"][dtype] |= _plain(found)
        yield


def _plain(found: Mapping[str, Mapping[str, Measured]]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        task: {variant: cell._asdict() for variant, cell in cells.items()}
        for task, cells in found.items()
    }


def tables(data: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, dict[str, Measured]]]]:
    """Title and columns of every table, one per kind and dtype."""
    for dtype, lengths in data["models"].items():
        for one, words in KINDS.items():
            chosen = [variant for variant, its in data["kinds"].items() if its == one]
            columns = {
                f"{task}, {length}": {v: Measured(**cells[v]) for v in chosen}
                for length, tasks in lengths.items()
                for task, cells in tasks.items()
            }
            if chosen:
                yield f"{one}: {words}; {data['model']}, {dtype}", columns
    shape = f"{attention.HEADS} heads of {measuring.COLUMNS}, window {data['window']}"
    for part, title in (
        ("decoding", f"decoding, {decoding.size(data['small'])}"),
        ("attention", f"attention alone, {shape}"),
    ):
        for dtype, found in data[part].items():
            columns = {
                column: {v: Measured(**cell) for v, cell in cells.items() if v != NATIVE}
                for column, cells in found.items()
            }
            yield f"{title}, {dtype}", columns


def page(data: Mapping[str, Any]) -> str:
    """The machine and all tables in Markdown, for the documentation."""
    known = data["machine"]
    units = "with" if known["bfloat16"] else "without"
    lines = [
        f"{known['processor']}, {known['cores']} cores, {known['threads']} threads, {units} "
        f"bfloat16 units; torch {known['torch']}, transformers {known['transformers']}; "
        f"{data['rounds']} rounds. Ratios: the median, with the lower and upper quartile."
    ]
    if "patch_seconds" in data:
        lines += ["", f"`rope_ext.patch` itself: {data['patch_seconds'] * 1e3:.1f} ms."]
    for title, columns in tables(data):
        lines += ["", f"**{title[:1].upper()}{title[1:]}**", "", measuring.markdown(columns)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=MODEL, help="directory or Hub ID")
    add("--method", default="", help="comma-separated names; default: one of each kind")
    add("--factor", type=float, default=4.0)
    add("--lengths", default="2k", help="comma-separated lengths in tokens, such as 2k,8k")
    add("--attention-lengths", default="8k,16k", help="the same, for attention alone")
    add("--window", type=parse_length, default=1024, help="window for attention alone, tokens")
    add("--rounds", type=int, default=15, help="rounds; a fifth of them for attention")
    add("--parts", default=",".join(PARTS), help="comma-separated, from %(default)s")
    add("--small", action="store_true", help="few tokens and rounds, to test the command")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--output", type=Path, default=Path("runs/speed"), help="directory for the results")
    args = parser.parse_args(arguments)
    with clean_errors(), stoppable("run the same command to measure again"):
        quiet()
        folder = Folder(args.output)
        data = {}
        with folder.lock():
            for data in evaluate(args):
                pages = {"speed.json": dump(data), "speed.md": page(data)}
                folder.write({name: text.encode() for name, text in pages.items()})
        print(page(data))


if __name__ == "__main__":
    main()
