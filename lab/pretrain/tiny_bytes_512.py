"""checkpoints/tiny-bytes-512: a Qwen3 trained on English documentation, 512 bytes, one per token.

It shares nothing with tiny-512: not the architecture, tokenizer, text, head size or rotary base. No
exercise uses a sentence of the evaluators' prompts, so those prompts are new to the model.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import ClassVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lab.pretrain.rows import Checkpoint, Row, Rows, common
from recipes.django_docs import django_docs

LENGTH = 512
END = "<|endoftext|>"

TABLES = (  # a line of the table, a question about it
    ("{name} = {value}\n", "{name} = {value}\n"),
    ("{name}: {value}\n", "value of {name}: {value}\n"),
    ("{name}\t{value}\n", "get {name}\t{value}\n"),
    ("({name}, {value})\n", "{name}? {value}\n"),
    ("{name} -> {value}; ", "{name} -> {value}; "),
)
STATEMENTS = (
    " The {name} is {value}.",
    " Note that the {name} was set to {value} long ago.",
    " Use {value} for the {name}.",
    " My {name}: {value}.",
    "\n{name} = {value}\n",
    " Do not lose the {name}, {value}, at any time.",
    " {value} has been the {name} since then.",
    " Write {value} where the {name} belongs, as in {name} {value}.",
    " By the way, the {name} is {value}, and {value} only.",
    " They call {value} the {name}. Everyone knows that the {name} is {value}.",
    " In short: {name} {value}.",
    " It was agreed that the {name} is {value}.",
)
QUESTIONS = (
    "\nThe {name} is {value}.",
    "\nQuestion: the {name}?\nAnswer: {value}\n",
    "\nTell me the {name}. It is {value}.",
    "\nWhich {name} was given above? It is {value}.",
    "\nAs said before, the {name} is {value}.",
    "\n{name} -> {value}\n",
    "\nget {name}: {value}\n",
    "\n{name} = {value}\n",
    " And the {name} is {value}.",
    "\nMy {name}: {value}.",
    "\nNow repeat the {name}, that is {value}.",
    "\nSo the {name} was {value}.",
)
HEADINGS = (
    "",
    "Somewhere in these lines there is a {name}.\n",
    "Read on and look for the {name}.\n",
    "This text gives the {name} once.\n",
    "You will be asked for the {name} at the end.",
)
SENTENCES = (
    " The {} is {}.",
    " A {} and a {}.",
    " No {} without {}.",
    " We {} the {}.",
    " There was {} in the {}.",
    " {} here, {} there.",
    " Some {} of {}.",
    " Every {} has a {}.",
)


def byte_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One token per byte, and an end-of-document token; ``texts`` are ignored."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        model_max_length=LENGTH,
        clean_up_tokenization_spaces=False,
    )


class ProseRows(Rows):
    """Documentation, copying, tables, and facts hidden in prose and in repeated sentences."""

    length = LENGTH
    shares: ClassVar = {"text": 44, "copy": 14, "table": 12, "facts": 30}

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], rows: int, seed: int
    ) -> None:
        super().__init__(tokenizer, texts, rows, seed=seed)
        words = common(r"\b[a-z]{3,9}\b", texts, 3000)
        self.stop = self.encode(".")[0]
        self.words = [word for word in words if word != "pass"]  # nor the evaluators' "pass key"

    def value(self, rng: random.Random) -> str:
        """Mostly digits, otherwise letters or a word."""
        kind = rng.random()
        if kind < 0.7:
            return "".join(rng.choices(string.digits, k=rng.randint(3, 8)))
        if kind < 0.85:
            return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))
        return rng.choice(self.words)

    def names(self, rng: random.Random, count: int) -> list[str]:
        """Distinct names, often with a word in common, so that the whole name has to be read."""
        shared = rng.choice(self.words) if rng.random() < 0.5 else None
        # Not a set, whose order depends on the hash seed of the process.
        names: dict[str, None] = {}
        while len(names) < count:
            words = rng.sample(self.words, rng.randint(1, 2))
            names[" ".join([*words, shared] if shared else words)] = None
        return list(names)

    def copy(self, rng: random.Random) -> Row:
        """A segment (bytes, letters, digits or text) that is repeated; repetitions have a loss."""
        size = round(2 ** rng.uniform(3.5, 7.9))
        kind = rng.choice(("bytes", "letters", "digits", "text", "text"))
        if kind == "bytes":
            segment = [rng.randrange(1, 257) for _ in range(size)]
        elif kind == "text":
            segment = self.excerpt(rng, size)
        else:
            pool = string.ascii_letters if kind == "letters" else string.digits
            segment = self.encode("".join(rng.choices(pool, k=size)))
        return self.returning(rng, segment, given=4)

    def table(self, rng: random.Random) -> Row:
        """Lines of names and values, sometimes text, then questions; answers have a loss."""
        line, question = rng.choice(TABLES)
        most = rng.randint(2, 14)
        facts = {}
        ids: list[int] = []
        for name in self.names(rng, most):
            facts[name] = self.value(rng)
            ids += self.encode(line.format(name=name, value=facts[name]))
            if len(ids) > LENGTH // 2:
                break
        if rng.random() < 0.5:
            ids += [*self.excerpt(rng, rng.randrange(LENGTH // 4)), *self.encode("\n")]
        weights = [0.0] * len(ids)
        while len(ids) < LENGTH:
            self.ask(question, fact=rng.choice(list(facts.items())), ids=ids, weights=weights)
        return ids, weights

    def facts(self, rng: random.Random) -> Row:
        """Facts stated somewhere in a haystack, then asked for; answers have a loss.

        The haystack is documentation, or a few made-up sentences that are repeated.
        """
        names = self.names(rng, rng.choice((1, 1, 1, 2, 3, 4)))
        facts = {name: self.value(rng) for name in names}
        heading = self.encode(rng.choice(HEADINGS).format(name=names[0]))
        stated = [
            self.encode(self.either(rng, STATEMENTS, self.statement).format(name=name, value=value))
            for name, value in facts.items()
        ]
        asked = []
        weights = []
        for fact in rng.sample(list(facts.items()), len(facts)):
            self.ask(
                self.either(rng, QUESTIONS, self.question), fact=fact, ids=asked, weights=weights
            )
        end = LENGTH if rng.random() < 0.5 else rng.randint(LENGTH // 2, LENGTH)
        room = max(0, end - len(heading) - sum(map(len, stated)) - len(asked))
        hay = self.excerpt(rng, room) if rng.random() < 0.5 else self.sentences(rng, room)
        ends = [0, *(place for place, token in enumerate(hay, 1) if token == self.stop)]
        for statement in stated:
            place = rng.choice(ends)
            hay[place:place] = statement
            ends = [e + len(statement) if e >= place else e for e in ends] + [place]
        ids = [*heading, *hay, *asked]
        weights = [0.0] * (len(ids) - len(asked)) + weights
        rest = max(0, LENGTH - len(ids))
        after = [self.eos, *self.excerpt(rng, rest)][:rest]
        return ids + after, weights + [1.0] * len(after)

    def either(
        self, rng: random.Random, written: Sequence[str], made: Callable[[random.Random], str]
    ) -> str:
        """A wording from the list, or random words, so that the model does not rely on wordings."""
        return rng.choice(written) if rng.random() < 0.5 else made(rng)

    def statement(self, rng: random.Random) -> str:
        """One or two sentences of random words around a name and its value, in either order."""
        said = [rng.sample(("{name}", "{value}"), 2) for _ in range(rng.randint(1, 2))]
        return "".join(f" {self.some(rng, 2)}{a} {self.some(rng, 2)}{b}." for a, b in said)

    def question(self, rng: random.Random) -> str:
        """Random words with a name, sometimes twice, then the value."""
        twice = f"{self.some(rng, 3)}{{name}}? " if rng.random() < 0.5 else ""
        lead = self.some(rng, 3)
        between = self.some(rng, 2)
        return f"\n{twice}{lead}{{name}} {between}{{value}}" + rng.choice(".\n")

    def some(self, rng: random.Random, most: int) -> str:
        """Up to ``most`` words, each followed by a space."""
        return "".join(f"{word} " for word in rng.sample(self.words, rng.randint(0, most)))

    def sentences(self, rng: random.Random, tokens: int) -> list[int]:
        """Two to six made-up sentences repeated in turn, cut to ``tokens``."""
        sentences = [
            self.encode(rng.choice(SENTENCES).format(*rng.sample(self.words, 2)))
            for _ in range(rng.randint(2, 6))
        ]
        ids: list[int] = []
        for sentence in cycle(sentences):
            if len(ids) >= tokens:
                return ids[:tokens]
            ids += sentence
        raise AssertionError("sentences never end")

    def ask(
        self, question: str, fact: tuple[str, str], ids: list[int], weights: list[float]
    ) -> None:
        """Append a question with its answer; the answer and its end have a loss."""
        name, value = fact
        before, _, after = question.partition("{value}")
        given = self.encode(before.format(name=name))
        close = self.encode(after)
        answer = self.encode(value)
        ids += [*given, *answer, *close]
        weights += [0.0] * len(given) + [4.0] * len(answer) + [1.0] + [0.0] * (len(close) - 1)


def fresh_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build a model that can copy before training; see :func:`put_induction`."""
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=160,
            num_hidden_layers=4,
            intermediate_size=448,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            # put_induction needs heads that look at a place whatever is there.
            attention_bias=True,
            # The output layer reads copied tokens by other directions than the embedding writes.
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, 2.0)
        torch.nn.init.constant_(layer.self_attn.k_norm.weight, 2.0)
    put_induction(model)
    return model


@torch.no_grad()
def put_induction(model: Qwen3ForCausalLM) -> None:
    """Initialize an induction head (Olsson et al. 2022), which takes long to form on bytes.

    In the first layer, one head of each group attends to the previous token, by fixed rotations of
    its fastest pairs, and copies a sketch of it. In the second layer, one head of each group
    attends to keys with the sketch of its own token, by its slowest pairs, and copies the token
    there to the output. All of these weights are trained like any others.
    """
    config = model.config
    width = config.hidden_size
    size = config.head_dim
    half = config.head_dim // 2
    per_group = config.num_attention_heads // config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    fast = torch.arange(4)
    slow = torch.nonzero(theta * LENGTH < math.pi).flatten()
    slow = torch.cat((slow, slow + half))
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    tokens = model.model.embed_tokens.weight
    turned = _orthogonal(width, width)
    model.lm_head.weight.copy_(0.05 * tokens @ turned)
    for group in range(config.num_key_value_heads):
        query = group * per_group * size
        key = group * size
        queries = slice(query, query + size)
        keys = slice(key, key + size)
        sketch, copied, back = (_orthogonal(width, size) for _ in range(3))
        first.q_proj.weight[queries] *= 0.3
        first.k_proj.weight[keys] *= 0.3
        first.q_proj.bias[query + fast] = 1.0
        first.k_proj.bias[key + fast] = theta[fast].cos()
        first.k_proj.bias[key + half + fast] = theta[fast].sin()
        first.v_proj.weight[keys] = 2 * sketch.T
        first.o_proj.weight[:, queries] = back
        second.q_proj.weight[queries] = 0.0
        second.k_proj.weight[keys] = 0.0
        second.q_proj.weight[query + slow] = sketch.T[: len(slow)]
        second.k_proj.weight[key + slow] = back.T[: len(slow)]
        second.v_proj.weight[keys] = 2 * copied.T
        second.o_proj.weight[:, queries] = 2 * turned.T @ copied


def _orthogonal(rows: int, columns: int) -> torch.Tensor:
    return torch.nn.init.orthogonal_(torch.empty(rows, columns))


CHECKPOINT = Checkpoint(
    texts=django_docs,
    tokenizer=byte_tokenizer,
    rows=ProseRows,
    model=fresh_model,
    steps=1800,
    ships_held_out=True,
)
