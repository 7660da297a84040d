"""Retrieval by embeddings: the right one of many long documents must be the nearest to a question.

``embedding_passkey`` and ``embedding_needle`` are the synthetic tasks of LongEmbed (arXiv
2404.12096, section 3.2; dwzhu-pku/LongEmbed): for each length 50 questions and 100 candidate
documents, all of that length, and the score is the share of questions whose document has the most
similar embedding. In the first, a document is a repeated filler with the pass key of one person; in
the second, a text with one sentence about something else. What differs: the names and facts are our
own, the text is Python's documentation, and documents are as long as the length allows.

``embedding_documents`` hides one such fact in each of your own documents.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle, islice, zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rope_eval.cases import Candidates, Case, Questions
from rope_eval.data.prompts import Frame, longest
from rope_eval.data.text import python_documentation, read_texts, sentences
from rope_eval.settings import Settings
from rope_eval.tasks.base import Task, option, register
from rope_eval.tasks.haystack import boundary, insert
from rope_eval.tasks.passkey import FILLER
from rope_ext.errors import OptionError

if TYPE_CHECKING:
    from rope_eval.embedder import Recipe

BINS = 5
"""Depth bins: facts are spread evenly over the documents."""
KEY = "{name}'s pass key is {key}. Remember it. {key} is the pass key for {name}."
ASK_KEY = "What is the pass key for {name}?"
FIRST_NAMES = tuple(
    name
    for line in (
        "Ada Amir Anna Boris Carla Cyrus Dana Diego Edith Emil Fatima Felix Greta Hana Hugo Ines",
        "Ivan Jonas Judith Kenji Lara Leon Maya Milo Nadia Noah Olga Oscar Petra Quentin Rosa",
        "Samir Selma Tariq Tessa Ulric Vera Viktor Wanda Yusuf",
    )
    for name in line.split()
)
LAST_NAMES = tuple(
    name
    for line in (
        "Abbott Becker Castillo Dalton Eriksen Farrow Goodwin Hartley Ibsen Jarvis Keller Lindgren",
        "Marlowe Novak Okafor Pereira Quigley Ramsey Sandoval Thorne Underhill Vasquez Whitlock",
        "Yamada Zeller",
    )
    for name in line.split()
)


class Fact(NamedTuple):
    """A sentence to hide in a document, and the question that it answers."""

    sentence: str
    question: str


_FACTS = {
    ("The capital of {} is {}.", "What is the capital of {}?"): (
        "Peru=Lima, Kenya=Nairobi, Norway=Oslo, Vietnam=Hanoi, Jordan=Amman, Cuba=Havana, "
        "Ghana=Accra, Nepal=Kathmandu, Portugal=Lisbon, Iraq=Baghdad, Chile=Santiago, "
        "Hungary=Budapest, Mongolia=Ulaanbaatar, Qatar=Doha, Senegal=Dakar, Ukraine=Kyiv, "
        "Ecuador=Quito, Finland=Helsinki, Laos=Vientiane, Malta=Valletta"
    ),
    ("The novel {} was written by {}.", "Who wrote the novel {}?"): (
        "Middlemarch=George Eliot, Ulysses=James Joyce, Emma=Jane Austen, Nostromo=Joseph Conrad, "
        "Moby-Dick=Herman Melville, Dracula=Bram Stoker, Frankenstein=Mary Shelley, "
        "The Trial=Franz Kafka, Anna Karenina=Leo Tolstoy, Oliver Twist=Charles Dickens, "
        "Madame Bovary=Gustave Flaubert, The Magic Mountain=Thomas Mann, Kim=Rudyard Kipling, "
        "Jane Eyre=Charlotte Bronte, The Idiot=Fyodor Dostoevsky, Siddhartha=Hermann Hesse, "
        "Germinal=Emile Zola, Fathers and Sons=Ivan Turgenev, Treasure Island=Robert Stevenson, "
        "The Time Machine=H. G. Wells"
    ),
    ("The chemical symbol of {} is {}.", "What is the chemical symbol of {}?"): (
        "gold=Au, silver=Ag, iron=Fe, tin=Sn, lead=Pb, copper=Cu, sodium=Na, potassium=K, "
        "mercury=Hg, tungsten=W, antimony=Sb, helium=He, neon=Ne, zinc=Zn, nickel=Ni, cobalt=Co, "
        "chlorine=Cl, calcium=Ca, silicon=Si, uranium=U"
    ),
    ("The painting {} is by {}.", "Who painted {}?"): (
        "the Mona Lisa=Leonardo da Vinci, Guernica=Pablo Picasso, The Starry Night=Vincent van "
        "Gogh, The Night Watch=Rembrandt, The Scream=Edvard Munch, Las Meninas=Diego Velazquez, "
        "The Birth of Venus=Sandro Botticelli, The Kiss=Gustav Klimt, Olympia=Edouard Manet, "
        "The Milkmaid=Johannes Vermeer, The Hay Wain=John Constable, Nighthawks=Edward Hopper, "
        "The School of Athens=Raphael, Water Lilies=Claude Monet, The Third of May 1808=Francisco "
        "Goya, The Raft of the Medusa=Theodore Gericault"
    ),
    ("The opera {} was composed by {}.", "Who composed the opera {}?"): (
        "Tosca=Giacomo Puccini, Carmen=Georges Bizet, Fidelio=Ludwig van Beethoven, Aida=Giuseppe "
        "Verdi, Parsifal=Richard Wagner, Don Giovanni=Wolfgang Amadeus Mozart, Eugene Onegin=Pyotr "
        "Tchaikovsky, Salome=Richard Strauss, Norma=Vincenzo Bellini, Wozzeck=Alban Berg, "
        "Rusalka=Antonin Dvorak, Peter Grimes=Benjamin Britten, Xerxes=George Frideric Handel, "
        "Faust=Charles Gounod, Boris Godunov=Modest Mussorgsky, Orfeo=Claudio Monteverdi"
    ),
    ("{} was fought in {}.", "When was {} fought?"): (
        "The Battle of Hastings=1066, The Battle of Agincourt=1415, The Battle of Lepanto=1571, "
        "The Battle of Blenheim=1704, The Battle of Trafalgar=1805, The Battle of Austerlitz=the "
        "winter of 1805, The Battle of Waterloo=1815, The Battle of Gettysburg=1863, The Battle of "
        "Tsushima=1905, The Battle of Jutland=1916, The Battle of Marathon=490 BC, The Battle of "
        "Cannae=216 BC"
    ),
}


def facts(rng: random.Random) -> list[Fact]:
    """Return all facts, in random order; no two answer the same question."""
    found = []
    for (sentence, question), pairs in _FACTS.items():
        for pair in pairs.split(", "):
            thing, answer = pair.split("=")
            found.append(Fact(sentence.format(thing, answer), question.format(thing)))
    rng.shuffle(found)
    return found


def pass_keys(rng: random.Random) -> list[Fact]:
    """Return a pass key for every name, in random order."""
    names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    rng.shuffle(names)
    return [
        Fact(KEY.format(name=name, key=rng.randint(1, 50000)), ASK_KEY.format(name=name))
        for name in names
    ]


@dataclass(frozen=True)
class Retrieval(Task):
    """One of the tasks: a hay for every candidate, and facts to hide there.

    ``texts`` are the hays of ``embedding_documents``, None for those that are made here.
    """

    name: str = "embedding_needle"
    queries: int = 50
    candidates: int = 100
    facts: int = 1
    texts: tuple[str, ...] | None = None
    source: str = ""
    suite: ClassVar[str] = "embedding"
    embeds: ClassVar[bool] = True

    @cached_property
    def _parts(self) -> list[list[str]]:
        """The sentences of every hay; one hay if all candidates share it."""
        if self.name == "embedding_passkey":
            return [[one.strip() for one in FILLER]]
        texts = [python_documentation()] if self.texts is None else self.texts
        return [sentences(text) for text in texts]

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """Build the questions of each length, with their candidates."""
        from rope_eval.embedder import Recipe  # imports torch

        recipe = Recipe.from_files(frame.model)
        cases: list[Case] = []
        sizes = []
        for length in lengths:
            rng = random.Random(f"{self.name}:{seed}:{length}")
            found = self._cases(frame, recipe, length, rng=rng)
            sizes.append(len(found[0].candidates.documents) if found[0].candidates else 0)
            cases += found
        where = {"embedding_passkey": "repeated filler", "embedding_needle": "Python's manual"}
        each = f"{self.facts} facts" if self.facts > 1 else "one fact"
        of = " or ".join(str(size) for size in dict.fromkeys(sizes))
        return Questions(
            cases,
            f"share of {len(cases) // len(lengths)} questions whose document is the nearest of "
            f"{of}, each with {each} in {where.get(self.name, self.source)}; cosine similarity, a "
            f"tie is not found; {recipe.about}; exact intervals",
            tuple(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        if self.facts > 1:
            yield (
                f"{self.name}: {self.facts} questions are about the same document; intervals take "
                f"them as independent and are too narrow"
            )

    def _cases(self, frame: Frame, recipe: Recipe, length: int, rng: random.Random) -> list[Case]:
        """Build the candidates of one length, and a case for every question about them."""
        known_facts = pass_keys(rng) if self.name == "embedding_passkey" else facts(rng)
        hays = self._hays(frame, length)
        count = min(self.candidates, len(hays))
        if count * self.facts > len(known_facts):
            raise OptionError(
                f"{count} documents with {self.facts} facts each need {count * self.facts} facts, "
                f"and {self.name} has {len(known_facts)}; give fewer --candidates or --facts"
            )
        places = [
            (document, slot, (slot + (number + rng.random()) / BINS) / self.facts)
            for document in range(count)
            for slot in range(self.facts)
            # Bins in turn, so that all depths have as many facts.
            for number in [(document + slot) % BINS]
        ]
        documents = []
        for document in range(count):
            own = [
                (at, known_facts[n].sentence)
                for n, (d, _, at) in enumerate(places)
                if d == document
            ]
            documents.append(self._document(frame, recipe, length, hay=hays[document], own=own))
        candidates = Candidates(tuple(documents), closing(frame.tokenizer))
        chosen = spread([int(depth * BINS) for _, _, depth in places], self.queries, rng)
        bins = {number: int(places[number][2] * BINS) for number in chosen}
        # The number of own documents depends on the length, and a plot needs every bin everywhere.
        binned = self.texts is None and len(set(bins.values())) == BINS
        return [
            Case(
                task=self.name,
                length=length,
                seed=number,
                mode="rank",
                count=1,
                ids=tokens(frame.tokenizer, recipe.query + known_facts[number].question),
                answers=(known_facts[number].sentence,),
                depth=places[number][2],
                bin=bins[number] if binned else None,
                candidates=candidates,
                right=places[number][0],
            )
            for number in chosen
        ]

    def _hays(self, frame: Frame, length: int) -> list[list[str]]:
        """Return the hay of each candidate; own documents that are too short are left out."""
        if self.texts is None:
            return self._parts * self.candidates
        long = [
            hay
            for hay, text in zip(self._parts, self.texts, strict=True)
            if len(tokens(frame.tokenizer, text)) >= length
        ]
        if len(long) < 2:
            raise OptionError(
                f"--documents has {len(long)} documents of at least {length} tokens, and choosing "
                f"needs 2; add longer ones, or give shorter --lengths"
            )
        return long

    def _document(
        self,
        frame: Frame,
        recipe: Recipe,
        length: int,
        hay: Sequence[str],
        own: Sequence[tuple[float, str]],
    ) -> array:
        """Return the longest document that fits: sentences of a hay, and facts at their depths."""

        def build(count: int) -> array:
            pieces = list(islice(cycle(hay), count))
            places = [boundary(pieces, depth) for depth, _ in own]
            text = " ".join(insert(pieces, [sentence for _, sentence in own], places))
            return tokens(frame.tokenizer, recipe.document + text)

        most = None if self.texts is None else len(hay)
        _, ids = longest(build, length, most=most)
        if len(ids) > length:
            raise OptionError(
                f"a document of {self.name} needs at least {len(ids)} tokens with this tokenizer, "
                f"got length {length}; give longer --lengths"
            )
        return ids


def spread(bins: Sequence[int], count: int, rng: random.Random) -> list[int]:
    """Choose ``count`` indices at random, or all, from every bin as equally as possible."""
    groups = [[at for at, bin in enumerate(bins) if bin == one] for one in sorted(set(bins))]
    for group in groups:
        rng.shuffle(group)
    turns = [at for row in zip_longest(*groups) for at in row if at is not None]
    return sorted(turns[:count])


def tokens(tokenizer: Any, text: str) -> array:
    """Tokenize a text for an embedder, with special tokens."""
    return array("i", tokenizer(text, verbose=False)["input_ids"])


def closing(tokenizer: Any) -> int:
    """Return how many special tokens the tokenizer puts after a text."""
    plain = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    whole = tokenizer("a", verbose=False)["input_ids"]
    starts = range(len(whole) - len(plain) + 1)
    start = next(at for at in starts if whole[at : at + len(plain)] == plain)
    return len(whole) - start - len(plain)


@register
@dataclass(frozen=True)
class Embedding(Task):
    """LongEmbed's synthetic tasks, or facts in your own documents; for embedders."""

    name: ClassVar[str] = "embedding"
    embeds: ClassVar[bool] = True

    queries: int = option(50, "questions for each length")
    candidates: int = option(100, "documents for each length, from which the right one is chosen")
    facts: int = option(1, "facts in each document: fewer documents suffice for the same queries")
    documents: tuple[str, ...] = option(
        (),
        "file, folder or hf:ID/CONFIG:SPLIT of long documents in which to hide facts; repeatable. "
        "Default: generated ones",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates < 2:
            raise OptionError(f"candidates={self.candidates} is not valid; it must be at least 2")

    def parts(self, settings: Settings) -> Sequence[Task]:
        retrieval = partial(
            Retrieval, queries=self.queries, candidates=self.candidates, facts=self.facts
        )
        if self.documents:
            texts = tuple(read_texts(self.documents, "--documents"))
            source = ", ".join(self.documents)
            return [retrieval("embedding_documents", texts=texts, source=source)]
        return [retrieval(f"embedding_{kind}") for kind in ("passkey", "needle")]
