"""Synthetic facts in the format of SQuAD and HotpotQA, which no model has seen in training.

Every town, its people and its river occur in the documents about it alone; numbers and names are
random, so a question can only be answered from its document.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

GOODS = (
    *("amber", "barley", "bells", "bricks", "candles", "cheese", "copper", "cork", "felt"),
    *("glass", "honey", "lace", "linen", "marble", "paper", "pottery", "rope", "salt", "silk"),
    *("slate", "soap", "timber", "tin", "wool"),
)
PARAGRAPH = (
    "{town} is a town on the river {river}. It was founded in {founded} by {founder}, who had come "
    "down the river with eleven boats, and at the last count it had {people} inhabitants. The best "
    "known building of {town} was designed by {architect}. The present mayor, {mayor}, has an "
    "office in it."
)
PERSON = (
    "{founder} is a surveyor. After an apprenticeship of four years {founder} settled in {town}, "
    "and has lived there ever since."
)
PLACE = (
    "{town} lies on the river {river}. It was founded in {founded}, is known for its {goods}, and "
    "has the mayor {mayor}."
)
QUESTIONS = (
    ("In which year was {town} founded?", "founded"),
    ("Who founded {town}?", "founder"),
    ("How many inhabitants does {town} have?", "people"),
    ("Who designed the best known building of {town}?", "architect"),
    ("Who is the mayor of {town}?", "mayor"),
)
HOPS = (
    ("On which river does the town lie in which {founder} settled?", "river"),
    ("In which year was the town founded in which {founder} settled?", "founded"),
    ("Who is the mayor of the town in which {founder} settled?", "mayor"),
    ("What is the town known for in which {founder} settled?", "goods"),
)


@cache
def _towns(count: int) -> list[dict[str, str]]:
    rng, names = random.Random("towns"), dict[str, None]()

    def name(end: str = "") -> str:
        before = len(names)
        while len(names) == before:  # ends: there are hundreds of thousands
            syllables = (rng.choice("bdfghklmnprstvw") + rng.choice("aeiou") for _ in range(3))
            names["".join(syllables).capitalize() + end] = None
        return next(reversed(names))

    def town() -> dict[str, str]:
        made = {role: f"{name()} {name('n')}" for role in ("mayor", "founder", "architect")}
        made |= {"town": name(rng.choice(("ville", "berg", "ton"))), "river": name()}
        numbers = {"founded": str(rng.randrange(1102, 1788)), "goods": rng.choice(GOODS)}
        return made | numbers | {"people": str(rng.randrange(2100, 98000))}

    return [town() for _ in range(count)]


def like_squad(articles: int = 1500) -> list[dict[str, Any]]:
    """Return an article of one paragraph and one question per town, in the format of SQuAD 2.0."""
    data = []
    for index, town in enumerate(_towns(articles)):
        question, answer = QUESTIONS[index % len(QUESTIONS)]
        asked = {"question": question.format(**town), "answers": [{"text": town[answer]}]}
        paragraph = {"context": PARAGRAPH.format(**town), "qas": [asked]}
        data.append({"title": town["town"], "paragraphs": [paragraph]})
    return data


def like_hotpotqa(questions: int = 640) -> list[dict[str, Any]]:
    """Return questions that need two of ten documents, in HotpotQA's distractor format."""
    rng, towns, data = random.Random("people"), _towns(questions), []

    def documents(town: dict[str, str]) -> list[tuple[str, list[str]]]:
        texts = {"founder": PERSON, "town": PLACE}
        return [(town[title], [text.format(**town)]) for title, text in texts.items()]

    for index, town in enumerate(towns):
        question, answer = rng.choice(HOPS)
        others = rng.sample([other for at, other in enumerate(towns) if at != index], 8)
        context = [*documents(town), *(rng.choice(documents(other)) for other in others)]
        rng.shuffle(context)
        asked = {"question": question.format(**town), "answer": town[answer]}
        data.append({**asked, "context": context})
    return data
