r"""Measure every method on two pretrained checkpoints, without fine-tuning.

    python -m lab.evidence smollm2 --minutes 60
    python -m lab.evidence gemma3 --device cuda
    python -m lab.evidence pages  # put docs/evidence/*.jsonl into the pages and into recommend

SmolLM2-135M-Instruct (trained on 8192 tokens) at up to 4 times its length, Gemma 3 270M (32768) at
up to 2 times: losses by position on eight manuals; passkeys of three digits, a word hidden in a
text and two keys in one text, all decoded. Weights and texts are downloaded with pip. An
interrupted run resumes where it stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints.pretrained import gemma3, smollm2
from lab.evidence import pages, questions
from lab.evidence.measure import Measurement
from rope_eval.sliding import in_blocks
from rope_ext.methods import all_methods
from rope_ext.saving import gguf_source


class Checkpoint(NamedTuple):
    """A pretrained checkpoint; lengths in tokens, trials for each task, length and depth."""

    name: str
    trained: int
    lengths: tuple[int, ...]
    trials: int
    weights: Callable[[], Path]


CHECKPOINTS = {
    "smollm2": Checkpoint("SmolLM2-135M-Instruct", 8192, (8192, 12288, 16384, 32768), 4, smollm2),
    "gemma3": Checkpoint("gemma-3-270m", 32768, (32768, 65536), 2, gemma3),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", choices=[*CHECKPOINTS, "pages"])
    parser.add_argument("--output", type=Path, help="JSON lines, appended to")
    names = ["unpatched", *(cls.name for cls in all_methods())]
    parser.add_argument("--methods", nargs="+", default=[], choices=names, metavar="METHOD")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin no cell after that; 0: only download"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    if args.checkpoint == "pages":
        pages.write(Path(__file__).parents[2])
        return
    chosen = CHECKPOINTS[args.checkpoint]
    until = time.monotonic() + 60 * args.minutes
    folder = Path("runs/evidence")
    folder_of, weights = gguf_source.split(chosen.weights())
    texts = [manual.read(folder / "manuals") for manual in questions.MANUALS]
    tokenizer = AutoTokenizer.from_pretrained(folder_of, **weights)
    read = questions.Questions.made(tokenizer, chosen.lengths, chosen.trials, texts)
    in_blocks()
    output = args.output or folder / f"{args.checkpoint}.jsonl"
    model = AutoModelForCausalLM.from_pretrained(folder_of, dtype=torch.bfloat16, **weights)
    model.to(args.device).eval()
    measurement = Measurement(
        name=chosen.name,
        model=model,
        tokenizer=tokenizer,
        questions=read,
        trained=chosen.trained,
        output=output,
        until=until,
        methods=args.methods,
    )
    finished = measurement.run()
    print(f"{output}: {'nothing is left to measure' if finished else 'run it again to go on'}")


if __name__ == "__main__":
    main()
