"""What is asked of a checkpoint: its documents and prompts as tokens, in one file.

The file is all that measuring needs besides the weights, so a machine without a network can do it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rope_eval.cases import digest
from rope_eval.data.prompts import Frame, beginning, encode
from rope_eval.evidence.texts import MANUALS, read_manuals
from rope_eval.tasks.passkey import INTRO, Passkey

TASKS = ("passkey", "needle")
DEPTHS = 5
HIDDEN = "My favorite fruit is the {fruit}. Remember it. The {fruit} is my favorite fruit."
ASK, LEAD = "\nWhat is my favorite fruit?", " Your favorite fruit is the"
FRUITS = (
    *("apple", "banana", "cherry", "fig", "grape", "kiwi", "lemon", "lime"),
    *("mango", "melon", "orange", "papaya", "peach", "pear", "plum"),
)


@dataclass(frozen=True)
class Prompt:
    """A prompt with its answer.

    Args:
        ids: tokens; the last ``count`` of them are the answer.
        count: tokens of the answer.
        depth: place of the needle, 0 at the start and 1 at the end.
    """

    ids: np.ndarray
    count: int
    depth: float


@dataclass(frozen=True)
class Questions:
    """Documents and prompts as tokens of one model.

    Args:
        documents: token ids by name, each as long as the longest text that is measured.
        prompts: by task and length.
        digest: of all of them.
    """

    documents: dict[str, np.ndarray]
    prompts: dict[tuple[str, int], list[Prompt]]
    digest: str

    @classmethod
    def read(cls, path: Path) -> Questions:
        """Read what :func:`write` wrote."""
        with np.load(path) as file:
            index = json.loads(str(file["index"]))
            documents = {name: file[name] for name in index["documents"]}
            prompts = {
                (task, length): [Prompt(file[name], count, depth) for name, count, depth in rows]
                for task, length, rows in index["prompts"]
            }
        return cls(documents, prompts, index["digest"])


def write(
    path: Path,
    tokenizer: Any,
    longest: int,
    lengths: Sequence[int],
    trials: int,
    cache: Path,
    seed: int = 0,
) -> None:
    """Write the documents and prompts for one tokenizer.

    Args:
        path: the file.
        tokenizer: of the model.
        longest: tokens of each document.
        lengths: of the prompts, tokens.
        trials: prompts of each task, length and depth.
        cache: directory of the downloaded manuals.
        seed: of keys, values and places.

    Raises:
        MeasureError: a manual cannot be downloaded.
    """
    texts = read_manuals(MANUALS, cache)
    bos = beginning(tokenizer)
    arrays: dict[str, np.ndarray] = {}
    for manual, text in zip(MANUALS, texts, strict=True):
        # Six characters a token are more than any of the manuals has.
        ids = [*bos, *encode(tokenizer, text[: 6 * longest])][:longest]
        arrays[manual.package] = np.array(ids, dtype=np.uint32)
    index: dict[str, Any] = {"documents": list(arrays), "prompts": []}
    frame = Frame.from_tokenizer(tokenizer)
    for length in lengths:
        for task, cases in _cases(frame, length, texts[-1], trials, seed).items():
            rows = []
            for number, (ids, count, depth) in enumerate(cases):
                name = f"{task}.{length}.{number}"
                arrays[name] = np.array(ids, dtype=np.uint32)
                rows.append((name, count, depth))
            index["prompts"].append((task, length, rows))
    index["digest"] = digest([(name, ids.tolist()) for name, ids in arrays.items()])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, index=np.array(json.dumps(index)), **arrays)


def _cases(
    frame: Frame, length: int, text: str, trials: int, seed: int
) -> dict[str, list[tuple[Sequence[int], int, float]]]:
    """Easy prompts: a key of three digits in repeated sentences, and a fruit hidden in a manual."""
    passkey = Passkey(trials=trials, depths=DEPTHS, digits=3, prompt="inline")
    words = text.split()
    rng = random.Random(f"needle:{seed}:{length}")
    places = [(bin + rng.random()) / DEPTHS for bin in range(DEPTHS) for _ in range(trials)]
    return {
        "passkey": [
            (case.ids, case.count, case.depth or 0.0)
            for case in passkey.questions(frame, [length], seed).cases
        ],
        "needle": [
            (*_needle(frame, length, words, place, rng.choice(FRUITS), rng), place)
            for place in places
        ],
    }


def _needle(
    frame: Frame, length: int, words: Sequence[str], depth: float, fruit: str, rng: random.Random
) -> tuple[Sequence[int], int]:
    """The text from a random word on, with the sentence in it, and the tokens of the answer."""
    start = rng.randrange(len(words))
    turned = [*words[start:], *words[:start]]

    def build(count: int) -> tuple[Sequence[int], int]:
        hay = turned[:count]
        cut = round(depth * len(hay))
        content = [INTRO + "\n", *hay[:cut], HIDDEN.format(fruit=fruit), *hay[cut:]]
        return frame.whole(" ".join(content) + ASK, LEAD, fruit)

    # A few tokens less than asked for are no matter, and a prompt of 65536 takes a while to build.
    count = length // 2
    while True:
        ids, answer = build(count)
        if 0.99 * length <= len(ids) <= length:
            return ids, answer
        count = int(count * 0.995 * length / len(ids))
