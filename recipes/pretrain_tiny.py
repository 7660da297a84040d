"""Train the small Llama that ships with rope_ext, from scratch, on what every machine has.

    python recipes/pretrain_tiny.py --output checkpoints/tiny-512

The text is Python's own standard library (sources and documentation strings). One file in
twenty, chosen by a hash of its name, is held out for evaluation. Exercises (copying,
key-value look-up, passkeys) are mixed in, because retrieval does not form from this much
text alone. Every row is a function of (seed, index): a killed run continues with --resume
exactly where its last checkpoint stood.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from rope_ext.measure.tasks.passkey import FILLER, INTRO, NEEDLE, QUESTION, PasskeyPrompts
from rope_ext.measure.text import python_library

LENGTH = 512  # trained context, tokens
VOCABULARY = 2048


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with one token per digit, so that a key is spelled, not remembered."""
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
    # The frame is repeated so that its words become tokens: 512 tokens is a short context.
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


class Mixture(torch.utils.data.Dataset):
    """Rows of LENGTH tokens with a loss weight per token; row i depends on (seed, i) only."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, texts: list[str], rows: int, seed: int
    ) -> None:
        self.tokenizer, self.rows, self.seed = tokenizer, rows, seed
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        self.stream = [token for ids in encoded for token in [*ids, self.eos]]
        words = Counter(w for t in texts for w in re.findall(r"\b[a-z][a-z_]{2,9}\b", t))
        self.names = [self.encode(f" {word}") for word, _ in words.most_common(1500)]
        self.digits = [self.encode(str(digit))[0] for digit in range(10)]
        self.equals, self.newline = self.encode(" ="), self.encode("\n")
        self.get, self.arrow = self.encode("get"), self.encode(" ->")
        self.intro, self.question = self.encode(INTRO), self.encode(QUESTION)
        self.space = self.encode(" ")
        self.prompts = PasskeyPrompts(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def __len__(self) -> int:
        return self.rows

    def excerpt(self, rng: random.Random, tokens: int) -> list[int]:
        start = rng.randrange(len(self.stream) - tokens)
        return self.stream[start : start + tokens]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = random.Random(f"{self.seed}:{index}")
        kind = rng.choices((self.text, self.copy, self.look_up, self.passkey), (56, 16, 12, 16))[0]
        ids, weights = kind(rng)
        ids, weights = ids[:LENGTH], weights[:LENGTH]
        missing = LENGTH - len(ids)
        return {
            "input_ids": torch.tensor(ids + [self.eos] * missing),
            "weights": torch.tensor(weights + [0.0] * missing),
        }

    def text(self, rng: random.Random) -> tuple[list[int], list[float]]:
        return [self.bos, *self.excerpt(rng, LENGTH - 1)], [0.0] + [1.0] * (LENGTH - 1)

    def copy(self, rng: random.Random) -> tuple[list[int], list[float]]:
        """A segment (random tokens or text) that returns several times; returns are scored."""
        size = round(2 ** rng.uniform(3, 7.9))
        noise = rng.random() < 0.6
        if noise:
            segment = [rng.randrange(2, VOCABULARY) for _ in range(size)]
        else:
            segment = self.excerpt(rng, size)
        ids, weights = [self.bos, *segment], [0.0] * (size + 1)
        while len(ids) < LENGTH:
            gap = rng.choice((0, rng.randrange(LENGTH // 2)))
            start = rng.randrange(max(1, size // 2))
            ids += self.excerpt(rng, gap) + segment[start:]
            # The first two tokens of a return only say where to look.
            weights += [0.0] * (gap + 2) + [1.0] * (size - start - 2)
        return ids, weights

    def look_up(self, rng: random.Random) -> tuple[list[int], list[float]]:
        """Lines `name = digits`, then questions `get name -> digits`; answers are scored."""
        pairs = rng.randint(2, 26)
        width = rng.randint(1, 6)
        names = rng.sample(self.names, pairs)
        table = {tuple(name): rng.choices(self.digits, k=width) for name in names}
        ids = [self.bos]
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

    def passkey(self, rng: random.Random) -> tuple[list[int], list[float]]:
        """The evaluator's prompt, or the same with code for a haystack; the key is scored."""
        digits = rng.randint(4, 8)
        if rng.random() < 0.6:
            length = rng.randint(self.prompts.minimum_length(8) + 40, LENGTH)
            case = self.prompts.case(length, rng.random(), rng.randrange(2**40), digits)
            ids, key = list(case.ids), [self.digits[int(digit)] for digit in case.key]
        else:
            key = rng.choices(self.digits, k=digits)
            text = NEEDLE.format(key="".join(str(self.digits.index(token)) for token in key))
            needle = self.encode(text)
            frame = 1 + len(self.intro) + len(needle) + len(self.question) + 1 + digits
            filler = self.excerpt(rng, rng.randint(20, LENGTH - frame))
            cut = rng.randint(0, len(filler))
            ids = [self.bos, *self.intro, *filler[:cut], *needle, *filler[cut:]]
            ids += [*self.question, *self.space, *key]
        weights = [0.0] * len(ids)
        weights[-digits:] = [6.0] * digits
        for end in range(digits, len(ids) - digits):  # its second mention, in the needle
            if ids[end - digits : end] == key:
                weights[end - digits : end] = [1.0] * digits
        return ids, weights


class MuonAdamW(torch.optim.Optimizer):
    """Muon (Jordan 2024) for the matrices of the layers, AdamW for everything else.

    torch.optim.Muon orthogonalises in bfloat16, which a CPU without bfloat16 units does some
    thirty times slower than float32; this is the same update in float32, in one optimizer, so
    that Trainer can save and resume it.
    """

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        named = list(model.named_parameters())
        matrix = [p for n, p in named if p.ndim == 2 and ".layers." in n]
        others = [p for n, p in named if p.ndim != 2 or ".layers." not in n]
        groups = [{"params": matrix, "muon": True}, {"params": others, "muon": False, "lr": lr / 6}]
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(p)
                    state["square"] = torch.zeros(()) if group["muon"] else torch.zeros_like(p)
                state["step"] += 1
                if group["muon"]:
                    state["momentum"].lerp_(p.grad, 0.05)
                    update = orthogonalise(p.grad.lerp(state["momentum"], 0.95))
                    update *= max(1, p.shape[0] / p.shape[1]) ** 0.5
                    p.mul_(1 - group["lr"] * 0.05)
                else:
                    state["momentum"].lerp_(p.grad, 0.1)
                    state["square"].lerp_(p.grad.square(), 0.05)
                    mean = state["momentum"] / (1 - 0.9 ** state["step"])
                    square = state["square"] / (1 - 0.95 ** state["step"])
                    update = mean / (square.sqrt() + 1e-10)
                p.add_(update, alpha=-group["lr"])


def orthogonalise(g: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration: the nearest (semi-)orthogonal matrix, roughly."""
    wide = g if g.shape[0] <= g.shape[1] else g.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if g.shape[0] <= g.shape[1] else x.T


class WeightedTrainer(Trainer):
    """Cross entropy with a weight per token, averaged over the weights of the batch."""

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), inputs["input_ids"][:, 1:].flatten(), reduction="none"
        )
        weights = inputs["weights"][:, 1:].flatten()
        loss = (losses * weights).sum() / weights.sum()
        return (loss, logits) if return_outputs else loss


def schedule(step: int, steps: int) -> float:
    """Warm-up over 60 steps, constant, linear to zero over the last third (WSD)."""
    return min(1.0, (step + 1) / 60, max(0.0, (steps - step) / (steps / 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("checkpoints/tiny-512"))
    parser.add_argument("--work", type=Path, default=Path("runs/pretrain_tiny"))
    parser.add_argument("--steps", type=int, default=1950)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from --work, if it was begun")
    parser.add_argument("--save-steps", type=int, default=100)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    texts = python_library("train")
    tokenizer = train_tokenizer(texts)
    data = Mixture(tokenizer, texts, args.steps * args.batch_size, args.seed)
    print(f"{len(texts)} files, {len(data.stream):,} tokens of text", file=sys.stderr)
    model = LlamaForCausalLM(
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
    optimizer = MuonAdamW(model, args.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: schedule(s, args.steps))
    trainer = WeightedTrainer(
        model,
        TrainingArguments(
            output_dir=str(args.work),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
            logging_steps=20,
            save_steps=args.save_steps,
            save_total_limit=2,
            max_grad_norm=1.0,
            seed=args.seed,
            report_to="none",
        ),
        train_dataset=data,
        optimizers=(optimizer, scheduler),
    )
    begun = any(args.work.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=args.resume and begun)
    model.config.use_cache = True  # which Trainer switches off
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
