"""Made-up facts in the format of SQuAD and HotpotQA, which no model has seen in training.

Every town, its people and its river occur in only one document; numbers and names are random, so a
question can only be answered from its document.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

TRADES = (
    *("baker", "bookbinder", "brewer", "cartographer", "clockmaker", "engraver", "gardener"),
    *("glassblower", "harbour master", "judge", "librarian", "mason", "physician", "printer"),
    *("sailmaker", "schoolteacher", "surveyor", "tailor", "weaver", "zoologist"),
)
GOODS = (
    *("amber", "barley", "bells", "bricks", "candles", "cheese", "copper", "cork", "felt"),
    *("glass", "honey", "lace", "linen", "marble", "paper", "pottery", "rope", "salt", "silk"),
    *("slate", "soap", "timber", "tin", "wool"),
)
BUILDINGS = (
    *("a lighthouse", "a market hall", "a stone bridge", "a windmill", "an observatory"),
    *("a library", "a museum", "a theatre", "a clock tower", "a botanical garden"),
)


class _Names:
    """Names that are all different."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._taken = rng, set()

    def new(self, end: str = "") -> str:
        while True:  # ends: there are a million
            name = "".join(
                self._rng.choice("bdfghklmnprstvw") + self._rng.choice("aeiou") for _ in range(3)
            )
            name = name.capitalize() + end
            if name not in self._taken:
                self._taken.add(name)
                return name

    def person(self) -> str:
        return f"{self.new()} {self.new(self._rng.choice(('n', 'r', 'sen', 'ski', 't')))}"


@cache
def like_squad(articles: int = 640) -> dict[str, Any]:
    """One article per town: paragraphs with questions, in the format of SQuAD 2.0."""
    rng = random.Random("towns")
    names = _Names(rng)
    data = []
    for _ in range(articles):
        town, river = names.new(rng.choice(("ville", "berg", "ton"))), names.new()
        mayor, founder, architect = names.person(), names.person(), names.person()
        founded, opened = rng.randrange(1102, 1788), rng.randrange(1802, 1979)
        people, long = rng.randrange(2100, 98000), rng.randrange(31, 790)
        goods, building = rng.sample(GOODS, 2), rng.choice(BUILDINGS)
        trade, other = rng.sample(TRADES, 2)
        paragraphs = [
            (
                f"{town} is a town on the river {river}. It was founded in {founded} by the "
                f"{trade} {founder}, who had come down the river with eleven boats. At the last "
                f"count it had {people} inhabitants.",
                (f"In which year was {town} founded?", str(founded)),
                (f"Who founded {town}?", founder),
                (f"How many inhabitants does {town} have?", str(people)),
            ),
            (
                f"The river {river} is {long} kilometres long. Below the town it is wide enough "
                f"for barges, which once carried {goods[0]} and {goods[1]} to the coast. Of these "
                f"only {goods[1]} is still traded there.",
                (f"How many kilometres long is the river {river}?", str(long)),
                (f"What is still traded on the river {river}?", goods[1]),
            ),
            (
                f"The best known building of {town} is {building}, which was opened in {opened}. "
                f"It was designed by {architect}. The present mayor, {mayor}, was a {other} "
                f"before the election and has an office in it.",
                (f"Who designed the best known building of {town}?", architect),
                (f"In which year was the best known building of {town} opened?", str(opened)),
                (f"Who is the mayor of {town}?", mayor),
            ),
        ]
        data.append({"title": town, "paragraphs": [_paragraph(*one) for one in paragraphs]})
    rng.shuffle(data)
    return {"data": data}


def _paragraph(context: str, *questions: tuple[str, str]) -> dict[str, Any]:
    qas = [
        {"question": question, "answers": [{"text": answer}], "is_impossible": False}
        for question, answer in questions
    ]
    return {"context": context, "qas": qas}


@cache
def like_hotpotqa(questions: int = 640) -> list[dict[str, Any]]:
    """Questions that need two of ten documents, in the format of HotpotQA's distractor setting."""
    rng = random.Random("people")
    names = _Names(rng)
    hops, documents = [], []
    for _ in range(questions):
        person, town, river = names.person(), names.new("ville"), names.new()
        band, year, trade = names.new(), rng.randrange(1871, 1994), rng.choice(TRADES)
        founded, goods = rng.randrange(1102, 1788), rng.choice(GOODS)
        one = (
            f"{person}",
            [
                f"{person} (born {year}) is a {trade}.",
                f" After an apprenticeship of four years {person.split()[0]} settled in {town},",
                " and has lived there ever since.",
            ],
        )
        two = (
            town,
            [
                f"{town} lies on the river {river}.",
                f" It was founded in {founded} and is known for its {goods},",
                f" and for the festival {band} that is held every summer.",
            ],
        )
        ask = rng.choice(
            (
                (f"On which river does the town lie in which {person} settled?", river),
                (f"In which year was the town founded in which {person} settled?", str(founded)),
                (f"Which festival is held in the town in which {person} settled?", band),
                (f"What is the town known for in which {person} settled?", goods),
            )
        )
        hops.append(ask)
        documents.append((one, two))
    data = []
    for index, (question, answer) in enumerate(hops):
        others = rng.sample([other for other in range(questions) if other != index], 8)
        context = [*documents[index], *(rng.choice(documents[other]) for other in others)]
        rng.shuffle(context)
        data.append({"question": question, "answer": answer, "context": context})
    return data
