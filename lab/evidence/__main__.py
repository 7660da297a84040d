r"""Measure every method on pretrained checkpoints, without fine-tuning.

    python -m lab.evidence smollm2 --minutes 60
    python -m lab.evidence gemma3 --device cuda
    python -m lab.evidence embeddinggemma
    python -m lab.evidence pages  # put docs/evidence/*.jsonl into the pages and into recommend

SmolLM2-135M-Instruct (trained on 8192 tokens) at up to 4 times its length, Gemma 3 270M (32768) at
up to 2 times: losses by position on eight manuals; passkeys of three digits, a fruit hidden in a
manual, and one of two people's keys, all decoded. EmbeddingGemma 300M (2048) at up to 4 times: 50
questions about 25 parts of manuals, each with two facts hidden in it. Weights and texts are
downloaded with pip. An interrupted run resumes where it stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from checkpoints.pretrained import embeddinggemma, gemma3, smollm2
from lab.evidence import pages, questions
from lab.evidence.measure import Measurement
from lab.evidence.retrieval import CUT, Retrievals
from rope_eval.embedder import Embedder, Recipe
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
    "smollm2": Checkpoint(
        name="SmolLM2-135M-Instruct",
        trained=8192,
        lengths=(8192, 12288, 16384, 32768),
        trials=4,
        weights=smollm2,
    ),
    "gemma3": Checkpoint(
        name="gemma-3-270m", trained=32768, lengths=(32768, 65536), trials=2, weights=gemma3
    ),
}


EMBEDDER = "embeddinggemma-300m"
EMBEDDER_LENGTH = 2048


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", choices=[*CHECKPOINTS, "embeddinggemma", "pages"])
    parser.add_argument("--output", type=Path, help="JSON lines, appended to")
    names = ["unpatched", CUT, *(cls.name for cls in all_methods())]
    parser.add_argument("--methods", nargs="+", default=[], choices=names, metavar="METHOD")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin no cell after that; 0: only download"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    if args.checkpoint == "pages":
        pages.write(Path(__file__).parents[2])
        return
    until = time.monotonic() + 60 * args.minutes
    folder = Path("runs/evidence")
    output = args.output or folder / f"{args.checkpoint}.jsonl"
    texts = [manual.read(folder / "manuals") for manual in questions.MANUALS]
    in_blocks()
    if args.checkpoint == "embeddinggemma":
        measurement = _embedder(texts, args.device, output, until=until, methods=args.methods)
    else:
        measurement = _language_model(
            CHECKPOINTS[args.checkpoint],
            texts=texts,
            device=args.device,
            output=output,
            until=until,
            methods=args.methods,
        )
    finished = measurement.run()
    print(f"{output}: {'nothing is left to measure' if finished else 'run it again to go on'}")


def _embedder(
    texts: Sequence[str], device: str, output: Path, until: float, methods: Sequence[str]
) -> Retrievals:
    place = str(embeddinggemma())
    model = AutoModel.from_pretrained(place, dtype=torch.bfloat16).to(device).eval()
    return Retrievals(
        name=EMBEDDER,
        embedder=Embedder(model, Recipe.from_files(place)),
        tokenizer=AutoTokenizer.from_pretrained(place),
        texts=texts,
        trained=EMBEDDER_LENGTH,
        output=output,
        until=until,
        methods=methods,
    )


def _language_model(
    chosen: Checkpoint,
    texts: Sequence[str],
    device: str,
    output: Path,
    until: float,
    methods: Sequence[str],
) -> Measurement:
    folder_of, weights = gguf_source.split(chosen.weights())
    tokenizer = AutoTokenizer.from_pretrained(folder_of, **weights)
    read = questions.Questions.made(tokenizer, chosen.lengths, chosen.trials, texts)
    model = AutoModelForCausalLM.from_pretrained(folder_of, dtype=torch.bfloat16, **weights)
    model.to(device).eval()
    return Measurement(
        name=chosen.name,
        model=model,
        tokenizer=tokenizer,
        questions=read,
        trained=chosen.trained,
        output=output,
        until=until,
        methods=methods,
    )


if __name__ == "__main__":
    main()
