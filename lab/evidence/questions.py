"""A checkpoint's documents and prompts as tokens.

Documents are manuals: long English text that pip can download anywhere. Each is the manual in the
source release of one package, its chapters joined in the order of their names. Their licenses allow
redistribution.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rope_eval.cases import digest
from rope_eval.data.prompts import Frame, beginning, blanks, encode
from rope_eval.tasks.passkey import ASK, FILLER, INTRO, LEAD, NEEDLE
from rope_ext.errors import MeasureError, first_line

TASKS = ("passkey", "needle")
DEPTHS = 5
HIDDEN = "My favorite fruit is the {fruit}. Remember it. The {fruit} is my favorite fruit."
FRUIT_ASK, FRUIT_LEAD = "\nWhat is my favorite fruit?", " Your favorite fruit is the"
FRUITS = (
    *("apple", "banana", "cherry", "fig", "grape", "kiwi", "lemon", "lime"),
    *("mango", "melon", "orange", "papaya", "peach", "pear", "plum"),
)


class Manual(NamedTuple):
    """The documentation in a source release on PyPI: some directories of it, in order."""

    package: str
    version: str
    sha256: str
    chapters: tuple[str, ...]

    def read(self, cache: Path) -> str:
        """Return the whole text; download the archive with pip if it is not in ``cache``."""
        path = cache / f"{self.package}-{self.version}.tar.gz"
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            pip += ["--disable-pip-version-check", "--no-binary", self.package]
            pip += ["--dest", str(cache), f"{self.package}=={self.version}"]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip() or "pip failed").splitlines()[-1]
                raise MeasureError(f"cannot download {path.name}: {reason}; check the network")
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise MeasureError(f"cannot read {path}: {first_line(error)}") from None
        if found != self.sha256:
            raise MeasureError(
                f"{path} has the SHA-256 {found}, expected {self.sha256}; remove the file"
            )
        texts: dict[tuple[int, str], str] = {}
        with tarfile.open(path) as files:
            for file in files:
                name = file.name.partition("/")[2]
                order = next((n for n, c in enumerate(self.chapters) if name.startswith(c)), None)
                content = files.extractfile(file) if name.endswith((".rst", ".txt")) else None
                if order is not None and content is not None:
                    texts[order, name] = content.read().decode()
        return "\n\n".join(texts[key].strip() for key in sorted(texts))


_RELEASES = """
django 5.2.5 docs/topics/
0745b25681b129a77aae3d4f6549b62d3913d74407831abaa0d9021a03954bae
docutils 0.21.2 docs/user/ docs/ref/rst/
3a6b18732edf182daa3cd12775bbb338cf5691468f91eeeb109deff6ebfa986f
celery 5.5.3 docs/userguide/ docs/getting-started/
6c972ae7968c2b5281227f01c3a3f984037d21c5129d07bf3550cc2afc6b10a5
pyramid 2.0.2 docs/narr/
372138a738e4216535cc76dcce6eddd5a1aaca95130f2354fb834264c06f18de
pytest 8.4.1 doc/en/how-to/ doc/en/explanation/ doc/en/reference/
7c67fd69174877359ed9371ec3af8a3d2b04741818c51e5e99cc1742251fa93c
scrapy 2.13.3 docs/topics/
bf17588c10e46a9d70c49a05380b749e3c7fba58204a367a5747ce6da2bd204d
sphinx 8.2.3 doc/usage/ doc/tutorial/
398ad29dee7f63a75888314e9424d40f52ce5a6a87ae88e7071e80af296ec348
flask 3.1.2 docs/tutorial/ docs/patterns/ docs/
bf656c15c80190ed628ad08cdfd3aaa35beb087855e2f494910aa3774cc4fd87
"""
_LINES = _RELEASES.split("\n")[1:-1]
MANUALS = tuple(
    Manual(package, version, sha256, tuple(chapters))
    for line, sha256 in zip(_LINES[::2], _LINES[1::2], strict=True)
    for package, version, *chapters in [line.split()]
)


class Prompt(NamedTuple):
    """A prompt: tokens, number of answer tokens at the end, and position of the needle."""

    ids: Sequence[int]
    count: int
    depth: float


class Questions(NamedTuple):
    """Documents by name and prompts by task and length, as tokens for one model."""

    documents: dict[str, list[int]]
    prompts: dict[tuple[str, int], list[Prompt]]

    def digest(self, task: str, length: int, document: str | None = None) -> str | None:
        """A short name for tokens of a document, or of prompts; None if there are none."""
        if document is None:
            asked = [prompt.ids for prompt in self.prompts.get((task, length), [])]
        else:
            asked = self.documents.get(document, [])[:length]
        return digest(asked) if asked else None

    @classmethod
    def made(
        cls, tokenizer: Any, lengths: Sequence[int], trials: int, texts: Sequence[str]
    ) -> Questions:
        """Return documents of the longest length from the texts of ``MANUALS``, and prompts."""
        bos, documents, longest = beginning(tokenizer), {}, max(lengths)
        for manual, text in zip(MANUALS, texts, strict=True):
            # No manual has six characters per token.
            ids = [*bos, *encode(tokenizer, text[: 6 * longest])][:longest]
            documents[manual.package] = ids
        frame, prompts = Frame.from_tokenizer(tokenizer), {}
        for length in lengths:
            for task, made in _prompts(frame, length, texts[-1], trials).items():
                prompts[task, length] = made
        return cls(documents, prompts)


def _prompts(frame: Frame, length: int, text: str, trials: int) -> dict[str, list[Prompt]]:
    """Easy prompts: a key of three digits in repeated sentences, and a fruit hidden in a manual."""
    rng = random.Random(f"0:{length}")
    words = text.split()
    made: dict[str, list[Prompt]] = {task: [] for task in TASKS}
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
) -> Prompt:
    """Build the start of the hay with the needle: at most ``length`` tokens, slightly fewer."""
    spelled = encode(frame.tokenizer, f" {answer}")
    most, count = length - len(spelled), length // 3
    for attempt in itertools.count(1):
        cut = round(depth * count)
        content = f"{INTRO}\n{''.join(hay[:cut])} {needle}{''.join(hay[cut:count])}{ask}"
        ids, _ = frame.whole(content, lead)
        if (1 - attempt / 100) * most <= len(ids) <= most:
            break
        count = int(count * 0.995 * most / len(ids))
    answer_tokens = len(spelled) - blanks(frame.tokenizer, spelled, len(spelled))
    return Prompt([*ids, *spelled], answer_tokens, depth)
