"""BABILong without a download: facts from short stories, hidden in long text, and a question.

The five tasks of the authors' leaderboard (arXiv 2406.10149, github.com/booydar/babilong): one,
two or three supporting facts, and relations of two or three. Prompts and scoring are those of
their ``prompts.py`` and ``metrics.py``. The stories are simulated here with the sentences of bAbI
(arXiv 1502.05698) instead of read from its files, and the text around them is Python's
documentation or a text of yours instead of the books of PG-19.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rope_eval.settings import Settings
from rope_eval.tasks.base import Kind, Task, answer_tokens, named_parts, option, register
from rope_eval.tasks.story import Story, Stream, Told, among, noise, stock

PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
PEOPLE = ("Mary", "John", "Daniel", "Sandra")
GIVERS = ("Mary", "Fred", "Bill", "Jeff")
LABELS: dict[str, tuple[str, ...]] = dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), PLACES)
LABELS["qa5"] = ("Bill", "Fred", "Jeff", "Mary", *THINGS)
"""What can be an answer, by task, as the authors score it."""

_MOVES = ("moved to", "went to", "journeyed to", "travelled to", "went back to")
_TAKES = ("got", "took", "grabbed", "picked up")
_DROPS = ("dropped", "left", "discarded", "put down")
_GIVES = ("gave", "handed", "passed")
_OPPOSITE = ("north", "south", "east", "west")

TEMPLATE = (
    "{instruction}\n\n{examples}\n\n{format}\n\n<context>\n{context}\n</context>\n\n"
    "Question: {question}"
)
_CARRIED = (
    "You need to answer the question based only on the information from the facts.\n"
    "If a person got an item in the first location and travelled to the second location the item "
    "is also in the second location. If a person dropped an item in the first location and moved "
    "to the second location the item remains in the first location."
)
_ITEMS = (
    "I give you context with the facts about locations and actions of different persons hidden in "
    "some random text and a question."
)


def _examples(*pairs: tuple[str, str], between: str = "\n") -> str:
    return between.join(f"<example>\n{q}\nAnswer: {a}\n</example>" for q, a in pairs)


PROMPTS = {
    "qa1": (
        "I will give you context with the facts about positions of different persons hidden in "
        "some random text and a question. You need to answer the question based only on the "
        "information from the facts. If a person was in different locations, use the latest "
        "location to answer the question.",
        _examples(
            (
                "Charlie went to the hallway. Judith come back to the kitchen. Charlie travelled "
                "to balcony. Where is Charlie?",
                "The most recent location of Charlie is balcony.",
            ),
            (
                "Alan moved to the garage. Charlie went to the beach. Alan went to the shop. "
                "Rouse travelled to balcony. Where is Alan?",
                "The most recent location of Alan is shop.",
            ),
            between="\n\n",
        ),
        "Always return your answer in the following format: The most recent location of "
        "\u2019person\u2019 is \u2019location\u2019. Do not write anything else after that.",
    ),
    "qa2": (
        _ITEMS + _CARRIED,
        _examples(
            (
                "Charlie went to the kitchen. Charlie got a bottle. Charlie moved to the balcony. "
                "Where is the bottle?",
                "The bottle is in the balcony.",
            ),
            (
                "Alan moved to the garage. Alan got a screw driver. Alan moved to the kitchen. "
                "Where is the screw driver?",
                "The screw driver is in the kitchen.",
            ),
        ),
        "Always return your answer in the following format: The \u2019item\u2019 is in "
        "\u2019location\u2019. Do not write anything else after that.",
    ),
    "qa3": (
        f"{_ITEMS} {_CARRIED}",
        _examples(
            (
                "John journeyed to the bedroom. Mary grabbed the apple. Mary went back to the "
                "bathroom. Daniel journeyed to the bedroom. Daniel moved to the garden. Mary "
                "travelled to the kitchen. Where was the apple before the kitchen?",
                "Before the kitchen the apple was in the bathroom.",
            ),
            (
                "John went back to the bedroom. John went back to the garden. John went back to "
                "the kitchen. Sandra took the football. Sandra travelled to the garden. Sandra "
                "journeyed to the bedroom. Where was the football before the bedroom?",
                "Before the bedroom the football was in the garden.",
            ),
        ),
        "Always return your answer in the following format: Before the $location_1$ the $item$ "
        "was in the $location_2$. Do not write anything else after that.",
    ),
    "qa4": (
        "I will give you context with the facts about different people, their location and "
        "actions, hidden in some random text and a question. You need to answer the question "
        "based only on the information from the facts.",
        _examples(
            (
                "The hallway is south of the kitchen. The bedroom is north of the kitchen. What is "
                "the kitchen south of?",
                "bedroom",
            ),
            (
                "The garden is west of the bedroom. The bedroom is west of the kitchen. What is "
                "west of the bedroom?",
                "garden",
            ),
        ),
        "Your answer should contain only one word - location. Do not write anything else after "
        "that.",
    ),
    "qa5": (
        "I will give you context with the facts about locations and their relations hidden in "
        "some random text and a question. You need to answer the question based only on the "
        "information from the facts.",
        _examples(
            (
                "Mary picked up the apple there. Mary gave the apple to Fred. Mary moved to the "
                "bedroom. Bill took the milk there. Who did Mary give the apple to?",
                "Fred",
            ),
            (
                "Jeff took the football there. Jeff passed the football to Fred. Jeff got the "
                "milk there. Bill travelled to the bedroom. Who gave the football?",
                "Jeff",
            ),
            (
                "Fred picked up the apple there. Fred handed the apple to Bill. Bill journeyed to "
                "the bedroom. Jeff went back to the garden. What did Fred give to Bill?",
                "apple",
            ),
        ),
        "Your answer should contain only one word. Do not write anything else after that. Do not "
        "explain your answer.",
    ),
}
"""Instruction, examples and format of the answer, by task: the authors' ``DEFAULT_PROMPTS``."""


@dataclass(frozen=True)
class OnlyLabel:
    """1 if the answer is the only label in the first sentence, excluding those in the question.

    Args:
        answer: the right label.
        question: labels that occur in it are ignored.
        labels: all labels.
    """

    answer: str
    question: str
    labels: tuple[str, ...]

    def __call__(self, written: str) -> float:
        text = written.lower()
        for end in (".", "<context>", "<example>"):
            text = text.split(end)[0]
        known = {label.lower() for label in self.labels}
        found = {one for one in known if one in text and one not in self.question.lower()}
        return float(found == {self.answer.lower()})


@dataclass(frozen=True)
class Tale:
    """Facts in order, and a question about them."""

    facts: Sequence[str]
    question: str
    answer: str


class _World:
    """People who move between places and carry things; every event becomes a fact."""

    def __init__(self, rng: random.Random, people: Sequence[str]) -> None:
        self.rng, self.people = rng, people
        self.facts: list[str] = []
        self.at: dict[str, str] = {}
        self.held: dict[str, str] = {}  # by thing
        self.lies = {thing: rng.choice(PLACES) for thing in THINGS}
        self.been: dict[str, list[str]] = {}  # where a thing is known to have been, in order

    def move(self, who: str | None = None, place: str | None = None) -> None:
        who = who or self.rng.choice(self.people)
        others = [one for one in PLACES if one != self.at.get(who)]
        self.at[who] = place or self.rng.choice(others)
        self.facts.append(f"{who} {self.rng.choice(_MOVES)} the {self.at[who]}.")
        for thing in [thing for thing, holder in self.held.items() if holder == who]:
            self._see(thing, self.at[who])

    def take(self, thing: str, who: str | None = None) -> str:
        """Someone goes where the thing lies, unless there already, and takes it."""
        here = [one for one in self.people if self.at.get(one) == self.lies[thing]]
        who = who or self.rng.choice(here or self.people)
        if self.at.get(who) != self.lies[thing]:
            self.move(who, self.lies[thing])
        self.held[thing] = who
        self.facts.append(f"{who} {self.rng.choice(_TAKES)} the {thing} there.")
        self._see(thing, self.at[who])
        return who

    def drop(self, thing: str) -> None:
        who = self.held.pop(thing)
        self.lies[thing] = self.at[who]
        self.facts.append(f"{who} {self.rng.choice(_DROPS)} the {thing} there.")

    def act(self) -> None:
        """Anything: mostly someone moves."""
        thing = self.rng.choice(THINGS)
        if self.rng.random() < 0.6:
            self.move()
        elif thing in self.held:
            self.drop(thing)
        else:
            self.take(thing)

    def _see(self, thing: str, place: str) -> None:
        been = self.been.setdefault(thing, [])
        if been[-1:] != [place]:
            been.append(place)


def _moves(rng: random.Random) -> Tale:
    world = _World(rng, PEOPLE)
    for _ in range(rng.randint(2, 10)):
        world.move()
    who = rng.choice(sorted(world.at))
    return Tale(world.facts, f"Where is {who}?", world.at[who])


def _carried(rng: random.Random) -> Tale:
    world = _World(rng, PEOPLE)
    thing = rng.choice(THINGS)
    for _ in range(rng.randint(0, 4)):
        world.act()
    if thing not in world.held:
        world.take(thing)
    world.move(world.held[thing])
    for _ in range(rng.randint(0, 4)):
        world.act()
    return Tale(world.facts, f"Where is the {thing}?", world.been[thing][-1])


def _before(rng: random.Random) -> Tale:
    world = _World(rng, PEOPLE)
    thing = rng.choice(THINGS)
    world.take(thing)
    for _ in range(rng.randint(1, 3)):
        world.move(world.held[thing])
        for _ in range(rng.randint(0, 2)):
            world.move(rng.choice([who for who in PEOPLE if who != world.held[thing]]))
    been = world.been[thing]  # four places at most
    if been.count(been[-1]) > 1:  # before which time? It goes on to where it has not been
        new = [place for place in PLACES if place not in been]
        world.move(world.held[thing], rng.choice(new))
    return Tale(world.facts, f"Where was the {thing} before the {been[-1]}?", been[-2])


def _directions(rng: random.Random) -> Tale:
    first, middle, last = rng.sample(PLACES, 3)
    side = rng.choice(_OPPOSITE)
    facts = [f"The {first} is {side} of the {middle}.", f"The {middle} is {side} of the {last}."]
    rng.shuffle(facts)
    if rng.random() < 0.5:
        return Tale(facts, f"What is {side} of the {middle}?", first)
    return Tale(facts, f"What is the {middle} {side} of?", last)


def _gifts(rng: random.Random) -> Tale:
    world = _World(rng, GIVERS)
    gifts = []
    for thing in rng.sample(THINGS, rng.randint(1, 3)):
        giver = world.take(thing)
        for _ in range(rng.randint(0, 2)):
            world.move()
        other = rng.choice([one for one in GIVERS if one != giver])
        world.facts.append(f"{giver} {rng.choice(_GIVES)} the {thing} to {other}.")
        world.held[thing] = other
        gifts.append((giver, thing, other))
    giver, thing, other = rng.choice(gifts)
    asked = [
        (f"Who gave the {thing} to {other}?", giver),
        (f"Who gave the {thing}?", giver),
        (f"Who received the {thing}?", other),
        (f"Who did {giver} give the {thing} to?", other),
    ]
    if [(one, two) for one, _, two in gifts].count((giver, other)) == 1:
        asked.append((f"What did {giver} give to {other}?", thing))
    return Tale(world.facts, *rng.choice(asked))


TALES: dict[str, Callable[[random.Random], Tale]] = {
    "qa1": _moves,
    "qa2": _carried,
    "qa3": _before,
    "qa4": _directions,
    "qa5": _gifts,
}


@dataclass(frozen=True)
class Facts(Told):
    """One task.

    Args:
        task: its name among ``TALES``.
        text: sentences around the facts; None uses Python's documentation.
    """

    task: str = "qa1"
    text: Sequence[str] | None = None

    @property
    def about(self) -> str:
        """What is measured, for a reader of the results."""
        return f"share of questions of BABILong's {self.task} with the answer as the only label"

    def story(self, rng: random.Random, chat: bool) -> Story:
        """Facts in text, in BABILong's words."""
        tale = TALES[self.task](rng)
        stream = Stream(noise(rng, self.text))
        places = [rng.random() for _ in tale.facts]
        instruction, examples, format_ = PROMPTS[self.task]

        def compose(words: int) -> str:
            context = " ".join(among(stream.take(words), tale.facts, places))
            return TEMPLATE.format(
                instruction=instruction,
                examples=examples,
                format=format_,
                context=context,
                question=tale.question,
            )

        judge = OnlyLabel(tale.answer, tale.question, LABELS[self.task])
        return Story(compose, (tale.answer,), judge)


@register
@dataclass(frozen=True)
class Babilong(Task):
    """BABILong: all of its tasks, or some.

    Args:
        babilong_tasks: comma-separated names, or ``all``.
        trials: prompts for each task and length.
        haystack: files, folders or data sets; by default Python's documentation.
        new_tokens: maximum answer length in tokens; None uses the authors' 20.
    """

    name: ClassVar[str] = "babilong"
    kind: ClassVar[Kind] = "rate"

    babilong_tasks: str = option("all", f"comma-separated: {', '.join(TALES)}; or all")
    trials: int = option(20, "prompts for each task and length")
    haystack: tuple[str, ...] = option((), "text for the haystacks; repeatable")
    new_tokens: int | None = answer_tokens("as in the benchmark")

    def parts(self, settings: Settings) -> Sequence[Task]:
        """The tasks that are named.

        Raises:
            OptionError: there is no such task.
            MeasureError: a text is missing or empty.
        """
        names = named_parts(self.babilong_tasks, TALES)
        text = stock(self.haystack)
        tokens = 20 if self.new_tokens is None else self.new_tokens
        return [Facts(f"{self.name}_{name}", self.trials, tokens, name, text) for name in names]
