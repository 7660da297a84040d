r"""Show how a pretrained model fails beyond its trained length, and the line that fixes it.

    python -m lab.demo

SmolLM2-135M-Instruct, trained on 8192 tokens, reads a manual of 12288 tokens in which a pass key is
hidden, and has to repeat it: unpatched, and with each method. One forward each yields the
perplexity by position and the answer. Weights (93 MB) and text are downloaded with pip.
"""

from __future__ import annotations

import argparse
import time
import timeit
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import rope_ext
from checkpoints import pretrained
from lab.evidence.questions import MANUALS, hide
from rope_eval.data.prompts import Frame
from rope_eval.forward import score
from rope_eval.plots import style
from rope_eval.tasks.passkey import ASK, LEAD, NEEDLE

TRAINED, FACTOR, WINDOW = 8192, 2, 1024
KEY, DEPTH = "482", 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="yarn,self_extend", help="comma between")
    parser.add_argument("--length", type=int, help="tokens; default: 12288, 11264 in float32")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="for the picture")
    args = parser.parse_args(arguments)
    style.require_matplotlib()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    start = time.monotonic()
    gguf = pretrained.smollm2()
    manual = next(manual for manual in MANUALS if manual.package == "flask")
    text = manual.read(args.output)
    dtype = min((torch.bfloat16, torch.float32), key=seconds_of_products)
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
    ends = range(WINDOW, length + WINDOW, WINDOW)
    print(f"\nperplexity by position, in windows of {WINDOW} tokens up to")
    print(f"{'':11}" + "".join(f"{min(end, len(ids)):>7}" for end in ends) + "  pass key")
    axes = (figure := style.figure_of(7, 3.4)).subplots()
    for index, method in enumerate(("unpatched", *args.methods.split(","))):
        patch: Any = rope_ext.patched(model, method, factor=FACTOR) if index else nullcontext()
        with patch:
            losses, hits = score(model, [list(ids)], len(ids) - 1)
        windows = [part.mean().exp().item() for part in losses[0].split(WINDOW)]
        found = bool(hits[0, -answer:].all())
        shown = "".join(f"{value:7.1f}" for value in windows)
        print(f"{method:11}{shown}  {'found' if found else 'not found'}", flush=True)
        look = style.style_of(index - 1) if index else style.UNPATCHED_STYLE
        axes.plot(ends[: len(windows)], windows, label=method, **look)
    axes.set_yscale("log")
    axes.set_xlabel("position, tokens")
    axes.set_ylabel("perplexity")
    style.bare(axes)
    style.mark_trained(axes, [TRAINED], ends[-1])
    axes.legend(frameon=False)
    path = args.output / "demo.png"
    figure.savefig(path, dpi=style.DPI)
    print(
        f"\nThe line: rope_ext.patch(model, method={method!r}, factor={FACTOR})"
        f"\nThe picture: {path} ({time.monotonic() - start:.0f} s)"
    )


def seconds_of_products(dtype: torch.dtype) -> float:
    """Return the time of matrix products with this dtype on this machine."""
    one = torch.ones(1024, 1024, dtype=dtype)
    return min(timeit.repeat(lambda: one @ one, number=4, repeat=2))


if __name__ == "__main__":
    main()
