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
PARAGRAPHS = (  # with their questions, and which value answers each
    (
        "{town} is a town on the river {river}. It was founded in {founded} by the {trade} "
        "{founder}, who had come down the river with eleven boats. At the last count it had "
        "{people} inhabitants.",
        ("In which year was {town} founded?", "founded"),
        ("Who founded {town}?", "founder"),
        ("How many inhabitants does {town} have?", "people"),
    ),
    (
        "The river {river} is {long} kilometres long. Below the town it is wide enough for barges, "
        "which once carried {other_goods} and {goods} to the coast. Of these only {goods} is still "
        "traded there.",
        ("How many kilometres long is the river {river}?", "long"),
        ("What is still traded on the river {river}?", "goods"),
    ),
    (
        "The best known building of {town} is {building}, which was opened in {opened}. It was "
        "designed by {architect}. The present mayor, {mayor}, was a {other_trade} before the "
        "election and has an office in it.",
        ("Who designed the best known building of {town}?", "architect"),
        ("In which year was the best known building of {town} opened?", "opened"),
        ("Who is the mayor of {town}?", "mayor"),
    ),
)
HOPS = (
    ("On which river does the town lie in which {founder} settled?", "river"),
    ("In which year was the town founded in which {founder} settled?", "founded"),
    ("Who is the mayor of the town in which {founder} settled?", "mayor"),
    ("What is the town known for in which {founder} settled?", "goods"),
)


@cache
def _towns(count: int) -> list[dict[str, str]]:
    """Towns, with all that is said about them: names that are all different, and numbers."""
    rng = random.Random("towns")
    taken: set[str] = set()

    def name(end: str = "") -> str:
        while True:  # ends: there are a million
            letters = "".join(rng.choice("bdfghklmnprstvw") + rng.choice("aeiou") for _ in range(3))
            made = letters.capitalize() + end
            if made not in taken:
                taken.add(made)
                return made

    towns = []
    for _ in range(count):
        people = ("mayor", "founder", "architect")
        ends = ("n", "r", "sen", "ski", "t")
        made = {role: f"{name()} {name(rng.choice(ends))}" for role in people}
        made |= {"town": name(rng.choice(("ville", "berg", "ton"))), "river": name()}
        made |= dict(zip(("goods", "other_goods"), rng.sample(GOODS, 2), strict=True))
        made |= dict(zip(("trade", "other_trade"), rng.sample(TRADES, 2), strict=True))
        made["building"] = rng.choice(BUILDINGS)
        numbers = {"founded": (1102, 1788), "opened": (1802, 1979), "long": (31, 790)}
        numbers |= {"people": (2100, 98000)}
        made |= {what: str(rng.randrange(*span)) for what, span in numbers.items()}
        towns.append(made)
    return towns


def like_squad(articles: int = 640) -> dict[str, Any]:
    """One article per town: paragraphs with questions, in the format of SQuAD 2.0."""
    data = []
    for town in _towns(articles):
        paragraphs = [
            {
                "context": text.format(**town),
                "qas": [
                    {"question": question.format(**town), "answers": [{"text": town[answer]}]}
                    for question, answer in questions
                ],
            }
            for text, *questions in PARAGRAPHS
        ]
        data.append({"title": town["town"], "paragraphs": paragraphs})
    return {"data": data}


def like_hotpotqa(questions: int = 640) -> list[dict[str, Any]]:
    """Questions that need two of ten documents, in the format of HotpotQA's distractor setting."""
    rng, towns, data = random.Random("people"), _towns(questions), []

    def documents(town: dict[str, str]) -> tuple[tuple[str, list[str]], ...]:
        person = (
            "{founder} is a {trade}. After an apprenticeship of four years {founder} settled in "
            "{town}, and has lived there ever since."
        )
        place = (
            "{town} lies on the river {river}. It was founded in {founded}, is known for its "
            "{goods}, and has the mayor {mayor}."
        )
        titles = zip(("founder", "town"), (person, place), strict=True)
        return tuple((town[title], [text.format(**town)]) for title, text in titles)

    for index, town in enumerate(towns):
        question, answer = rng.choice(HOPS)
        others = rng.sample([other for at, other in enumerate(towns) if at != index], 8)
        context = [*documents(town), *(rng.choice(documents(other)) for other in others)]
        rng.shuffle(context)
        asked = {"question": question.format(**town), "answer": town[answer]}
        data.append({**asked, "context": context})
    return data
