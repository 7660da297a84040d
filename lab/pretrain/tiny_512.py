"""checkpoints/tiny-512: a Llama trained on Python code, 512 tokens of byte-level BPE."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lab.pretrain.rows import Checkpoint, Row, Rows, common
from rope_eval.data.text import python_library
from rope_eval.tasks.passkey import FILLER, INTRO, NEEDLE, QUESTION, PasskeyPrompts

LENGTH = 512
VOCABULARY = 2048


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with one token per digit, so that keys are spelled out, not memorized."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    frame = INTRO + "".join(FILLER) + NEEDLE + QUESTION
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The frame is repeated so that its words become tokens, because 512 tokens are few.
    tokenizer.train_from_iterator([*texts, *[frame] * 400], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        model_max_length=LENGTH,
        clean_up_tokenization_spaces=False,
    )


class CodeRows(Rows):
    """Python code, copying, look-up, and the passkeys of the evaluator."""

    length = LENGTH
    shares: ClassVar = {"text": 56, "copy": 16, "look_up": 12, "passkey": 16}

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], rows: int, seed: int
    ) -> None:
        super().__init__(tokenizer, texts, rows, seed=seed)
        words = common(r"\b[a-z][a-z_]{2,9}\b", texts, 1500)
        self.names = [self.encode(f" {word}") for word in words]
        self.digits = [self.encode(str(digit))[0] for digit in range(10)]
        self.equals = self.encode(" =")
        self.newline = self.encode("\n")
        self.get = self.encode("get")
        self.arrow = self.encode(" ->")
        self.intro = self.encode(INTRO)
        self.question = self.encode(QUESTION)
        self.space = self.encode(" ")
        self.prompts = PasskeyPrompts(tokenizer)

    def copy(self, rng: random.Random) -> Row:
        """A segment (random tokens or text) that is repeated; repetitions have a loss."""
        size = round(2 ** rng.uniform(3, 7.9))
        noise = rng.random() < 0.6
        if noise:
            segment = [rng.randrange(2, VOCABULARY) for _ in range(size)]
        else:
            segment = self.excerpt(rng, size)
        return self.returning(rng, segment, given=2)

    def look_up(self, rng: random.Random) -> Row:
        """Lines `name = digits`, then questions `get name -> digits`; answers have a loss."""
        pairs = rng.randint(2, 26)
        width = rng.randint(1, 6)
        names = rng.sample(self.names, pairs)
        table = {tuple(name): rng.choices(self.digits, k=width) for name in names}
        ids = list(self.head)
        for name, value in table.items():
            ids += [*name, *self.equals, *self.space, *value, *self.newline]
            if rng.random() < 0.1:
                ids += self.excerpt(rng, rng.randrange(40))
        if rng.random() < 0.5:
            room = LENGTH - 20 - len(ids)
            ids += self.excerpt(rng, rng.randrange(room) if room > 20 else 0)
        weights = [0.0] * len(ids)
        while len(ids) < LENGTH:
            name = rng.choice(list(table))
            ids += [*self.get, *name, *self.arrow, *self.space, *table[name], *self.newline]
            weights += [0.0] * (len(ids) - len(weights) - width - 1) + [3.0] * width + [0.0]
        return ids, weights

    def passkey(self, rng: random.Random) -> Row:
        """The evaluator's prompt, or the same with code as filler; the key has a loss."""
        digits = rng.randint(4, 8)
        if rng.random() < 0.6:
            length = rng.randint(self.prompts.minimum_length(8) + 40, LENGTH)
            case = self.prompts.forward_case(
                length, depth=rng.random(), seed=rng.randrange(2**40), digits=digits
            )
            ids = list(case.ids)
            key = [self.digits[int(digit)] for digit in case.key]
        else:
            key = rng.choices(self.digits, k=digits)
            text = NEEDLE.format(key="".join(str(self.digits.index(token)) for token in key))
            needle = self.encode(text)
            frame = 1 + len(self.intro) + len(needle) + len(self.question) + 1 + digits
            filler = self.excerpt(rng, rng.randint(20, LENGTH - frame))
            cut = rng.randint(0, len(filler))
            ids = [*self.head, *self.intro, *filler[:cut], *needle, *filler[cut:]]
            ids += [*self.question, *self.space, *key]
        weights = [0.0] * len(ids)
        weights[-digits:] = [6.0] * digits
        for end in range(digits, len(ids) - digits):  # the second occurrence, in the needle
            if ids[end - digits : end] == key:
                weights[end - digits : end] = [1.0] * digits
        return ids, weights


def fresh_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            num_hidden_layers=4,
            intermediate_size=512,
            num_attention_heads=3,
            head_dim=64,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


CHECKPOINT = Checkpoint(
    texts=python_library, tokenizer=train_tokenizer, rows=CodeRows, model=fresh_model, steps=1950
)
