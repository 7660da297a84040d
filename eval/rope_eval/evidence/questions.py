"""What is asked of a checkpoint: its documents and prompts as tokens, in one file.

The file is all that measuring needs besides the weights, so a machine without a network can do it.
"""

from __future__ import annotations

import itertools
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
from rope_eval.tasks.passkey import ASK, FILLER, INTRO, LEAD, NEEDLE

TASKS = ("passkey", "needle")
DEPTHS = 5
HIDDEN = "My favorite fruit is the {fruit}. Remember it. The {fruit} is my favorite fruit."
FRUIT_ASK, FRUIT_LEAD = "\nWhat is my favorite fruit?", " Your favorite fruit is the"
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
        for task, made in _prompts(frame, length, texts[-1], trials, seed).items():
            rows = []
            for number, (ids, count, depth) in enumerate(made):
                name = f"{task}.{length}.{number}"
                arrays[name] = np.array(ids, dtype=np.uint32)
                rows.append((name, count, depth))
            index["prompts"].append((task, length, rows))
    index["digest"] = digest([(name, ids.tolist()) for name, ids in arrays.items()])
    path.parent.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {"index": np.array(json.dumps(index)), **arrays}
    np.savez_compressed(path, **values)


def _prompts(
    frame: Frame, length: int, text: str, trials: int, seed: int
) -> dict[str, list[tuple[Sequence[int], int, float]]]:
    """Easy prompts: a key of three digits in repeated sentences, and a fruit hidden in a manual."""
    rng = random.Random(f"{seed}:{length}")
    words = text.split()
    made: dict[str, list[tuple[Sequence[int], int, float]]] = {task: [] for task in TASKS}
    for number in range(DEPTHS * trials):
        depth = (number // trials + rng.random()) / DEPTHS
        key = "".join(rng.choice("0123456789") for _ in range(3))
        passkey = (NEEDLE.format(key=key).strip(), ASK, LEAD, key)
        made["passkey"].append(hide(frame, length, [*FILLER] * length, depth, *passkey))
        fruit, start = rng.choice(FRUITS), rng.randrange(len(words))
        turned = [f" {word}" for word in (*words[start:], *words[:start])]
        needle = (HIDDEN.format(fruit=fruit), FRUIT_ASK, FRUIT_LEAD, fruit)
        made["needle"].append(hide(frame, length, turned, depth, *needle))
    return made


def hide(
    frame: Frame,
    length: int,
    hay: Sequence[str],
    depth: float,
    needle: str,
    ask: str,
    lead: str,
    answer: str,
) -> tuple[Sequence[int], int, float]:
    """The beginning of the hay with the needle in it; tokens, those of the answer, the depth.

    At most ``length`` tokens and hardly fewer.
    """
    spelled = encode(frame.tokenizer, f" {answer}")
    given = 0  # where digits stand alone, the space before them is a token of its own
    while not frame.tokenizer.decode([spelled[given]]).strip():
        given += 1
    most, count = length - len(spelled), length // 3
    for attempt in itertools.count(1):
        cut = round(depth * count)
        content = f"{INTRO}\n{''.join(hay[:cut])} {needle}{''.join(hay[cut:count])}{ask}"
        ids, _ = frame.whole(content, lead)
        if (1 - attempt / 100) * most <= len(ids) <= most:
            break
        count = int(count * 0.995 * most / len(ids))
    return [*ids, *spelled], len(spelled) - given, depth
