"""Tokenizers whose tokens depend on the context, and a very fast one."""

from __future__ import annotations

from array import array
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as bpe
from transformers import PreTrainedTokenizerFast

from rope_eval.tasks.passkey import ASK, FILLER, INTRO, LEAD, NEEDLE

# Split as Llama 3 does: line breaks belong to the full stop before them, three digits together.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [f"{INTRO}\n{''.join(FILLER)}\n{NEEDLE}{ASK}{LEAD} 12345.\n"] * 3


@cache
def merging() -> PreTrainedTokenizerFast:
    r"""One token for ``".\n"``."""
    made = Tokenizer(bpe.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(made, ["<s>", "</s>"], initial_alphabet=alphabet)
    return _wrapped(made)


@cache
def spacing() -> PreTrainedTokenizerFast:
    """Adds a leading space, like SentencePiece; splits digits."""
    made = Tokenizer(bpe.BPE(unk_token="<unk>", fuse_unk=True))
    both = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(both)
    made.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁\n0-9.?!,:]+|."), "isolated")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _train(made, ["<s>", "</s>", "<unk>"], initial_alphabet=["▁", "\n", *map(chr, range(33, 127))])
    return _wrapped(made)


def _train(made: Tokenizer, special: list[str], **more: Any) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, show_progress=False, **more
    )
    made.train_from_iterator(CORPUS, trainer)


def _wrapped(made: Tokenizer) -> PreTrainedTokenizerFast:
    """Puts ``<s>`` before a text."""
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


class Characters:
    """One token for each character: fast for long prompts."""

    chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, array]:
        return {"input_ids": array("i", text.encode("utf-32-le"))}

    def decode(self, ids: Any, **options: Any) -> str:
        return "".join(map(chr, ids))
