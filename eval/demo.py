r"""Show a pretrained model that breaks beyond its length, and the line that cures it.

    python -m eval.demo

SmolLM2-135M-Instruct, trained on 8192 tokens, reads a manual of 12288 tokens in which a pass key is
hidden, and is asked for it: unpatched, and under each method. One forward for each gives the
perplexity by position and the answer. Weights (93 MB) and text are downloaded with pip.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import rope_ext
from checkpoints import pretrained
from rope_eval.data.prompts import Frame
from rope_eval.evidence.questions import MANUALS, hide
from rope_eval.forward import score
from rope_eval.plots.style import (
    UNPATCHED_STYLE,
    bare,
    figure_of,
    mark_trained,
    require_matplotlib,
    save,
    style_of,
)
from rope_eval.tasks.passkey import ASK, LEAD, NEEDLE

TRAINED, FACTOR, WINDOW = 8192, 2, 1024
KEY, DEPTH = "482", 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="yarn,rerope", help="comma between")
    parser.add_argument("--length", type=int, help="tokens; default: 12288, 11264 in float32")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="for the picture")
    args = parser.parse_args(arguments)
    require_matplotlib()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    start = time.monotonic()
    gguf = pretrained.smollm2()
    manual = next(manual for manual in MANUALS if manual.package == "flask")
    text = manual.read(args.output)
    dtype = faster_dtype()
    length = args.length or (12288 if dtype == torch.bfloat16 else 11264)
    print(
        f"SmolLM2-135M-Instruct was trained on {TRAINED} tokens. It reads {length} tokens of the "
        f"manual of {manual.package} {manual.version}\nwith the pass key {KEY} in the middle, and "
        f"is asked for the key at the end ({str(dtype).removeprefix('torch.')}).",
        flush=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
    hay = [f" {word}" for word in text.split()]
    needle = (NEEDLE.format(key=KEY).strip(), ASK, LEAD, KEY)
    ids, answer, _ = hide(Frame.from_tokenizer(tokenizer), length, hay, DEPTH, *needle)
    edges = range(WINDOW, length + WINDOW, WINDOW)
    print(f"\nperplexity by position, in windows of {WINDOW} tokens up to")
    print(f"{'':10}" + "".join(f"{min(edge, len(ids)):>7}" for edge in edges) + "  pass key")
    numbers = []
    for method in ("unpatched", *args.methods.split(",")):
        patch: Any = nullcontext()
        if method != "unpatched":
            patch = rope_ext.patched(model, method, factor=FACTOR)
        with patch:
            losses, hits = score(model, [list(ids)], len(ids) - 1)
        windows = [part.mean().exp().item() for part in losses[0].split(WINDOW)]
        found = bool(hits[0, -answer:].all())
        shown = "".join(f"{value:7.1f}" for value in windows)
        print(f"{method:10}{shown}  {'found' if found else 'not found'}", flush=True)
        numbers.append({"method": method, "perplexity": windows, "found": found})
    path = args.output / "demo.png"
    _draw(path, numbers)
    print(
        f"\nThe line: rope_ext.patch(model, method={numbers[-1]['method']!r}, factor={FACTOR})"
        f"\nThe picture: {path} ({time.monotonic() - start:.0f} s)"
    )


def faster_dtype() -> torch.dtype:
    """Return bfloat16 where this machine multiplies it faster than float32."""
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        one = torch.ones(1024, 1024, dtype=dtype)
        one @ one
        start = time.perf_counter()
        for _ in range(4):
            one @ one
        seconds[dtype] = time.perf_counter() - start
    return min(seconds, key=seconds.__getitem__)


def _draw(path: Path, numbers: Sequence[dict[str, Any]]) -> None:
    figure = figure_of(7, 3.4)
    axes = figure.subplots()
    last = 0
    for index, line in enumerate(numbers):
        ends = [WINDOW * (place + 1) for place in range(len(line["perplexity"]))]
        last = ends[-1]
        style = style_of(index - 1) if index else UNPATCHED_STYLE
        axes.plot(ends, line["perplexity"], label=line["method"], **style)
    axes.set_yscale("log")
    axes.set_xlabel("position, tokens")
    axes.set_ylabel("perplexity")
    bare(axes)
    mark_trained(axes, [TRAINED], last)
    axes.legend(frameon=False)
    save(figure, path, numbers)


if __name__ == "__main__":
    main()
