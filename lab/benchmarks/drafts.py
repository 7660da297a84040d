"""Measures how many drafts a patched model accepts: of a draft model, and of prompt lookup.

The draft model is the target with weights rounded to a few bits, unpatched and patched like the
target or with ``--draft-method``, inside and beyond the trained length. Generation is greedy, so
drafts only change speed.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext
from rope_ext.version import __version__

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny-bytes-512"
TEXT = CHECKPOINT / "held_out.jsonl"
DRAFTED = 5  # tokens per draft


@dataclass(frozen=True)
class Accepted:
    """Drafts that a model accepted in one setting."""

    method: str
    draft: str
    prompt: int  # tokens
    texts: int
    new: int  # tokens
    forwards: int  # of the target

    @property
    def per_forward(self) -> float:
        """Tokens per forward of the target; 1 without drafts, at most 1 + DRAFTED."""
        return self.new / self.forwards


class Counted:
    """Counts forwards of a model inside a ``with`` block."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.count = 0

    def __enter__(self) -> Counted:
        self.handle = self.model.register_forward_hook(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _add(self, *_: object) -> None:
        self.count += 1


def rounded(model: nn.Module, bits: int) -> nn.Module:
    """Return a copy with every weight matrix rounded to ``bits`` bits per row."""
    draft = copy.deepcopy(model)
    levels = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.ndim == 2 and name.endswith("_proj.weight"):
                step = weight.abs().amax(1, keepdim=True) / levels
                weight.copy_((weight / step).round() * step)
    # Constant: generate would adapt the length of drafts to how many are accepted.
    config: Any = draft.generation_config
    config.num_assistant_tokens = DRAFTED
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return draft


def texts(length: int, count: int) -> list[torch.Tensor]:
    """Return the beginnings of ``count`` held-out texts, ``[1, length]`` each."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    found = []
    for line in TEXT.read_text(encoding="utf-8").splitlines():
        ids = tokenizer(json.loads(line)["text"], return_tensors="pt")["input_ids"]
        if ids.shape[1] >= length:
            found.append(ids[:, :length])
    if len(found) < count:
        raise SystemExit(f"only {len(found)} texts have {length} tokens; give fewer --texts")
    return found[:count]


def measure(
    method: str,
    factor: float,
    lengths: Sequence[int],
    count: int,
    new: int,
    bits: int,
    draft_method: str | None = None,
) -> Iterator[Accepted]:
    """Yield what a patched model accepts of each kind of draft, at each prompt length in tokens.

    ``count`` is the number of prompts, ``new`` that of tokens after each, and ``bits`` are those of
    a weight of the draft model. ``draft_method``: None patches the draft model like the target.
    """
    followed = draft_method or method
    plain = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    target = rope_ext.patch(copy.deepcopy(plain), method, factor=factor)
    drafts: dict[str, dict[str, Any]] = {
        "none": {},
        "draft model, unpatched": {"assistant_model": rounded(plain, bits)},
        f"draft model, {followed}": {
            "assistant_model": rope_ext.patch(rounded(plain, bits), followed, factor=factor)
        },
        "prompt lookup": {"prompt_lookup_num_tokens": DRAFTED},
    }
    for length in lengths:
        prompts = texts(length, count)
        wanted: list[list[int]] = []
        for name, given in drafts.items():
            written = []
            with Counted(target) as forwards:
                for ids in prompts:
                    out: Any = target.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=new,
                        # As many tokens in every setting, which a forward is divided by.
                        min_new_tokens=new,
                        do_sample=False,
                        **given,
                    )
                    written.append(out[0, length:].tolist())
            wanted = wanted or written
            if written != wanted:  # may happen at a tie only, since drafts are verified
                print(f"note: {name} wrote another text after {length} tokens")
            yield Accepted(
                method=method,
                draft=name,
                prompt=length,
                texts=count,
                new=count * new,
                forwards=forwards.count,
            )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--methods", default="yarn,self_extend")
    add("--draft-method", help="method of the patched draft model; default: that of the target")
    add("--factor", type=float, default=4)
    add("--lengths", default="256,1500", help="prompt lengths in tokens")
    add("--texts", type=int, default=6)
    add("--new", type=int, default=64, help="tokens to generate after each prompt")
    add("--bits", type=int, default=4, help="bits of the draft model's weights")
    args = parser.parse_args(given)
    lengths = [int(length) for length in args.lengths.split(",")]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, rope_ext", end=" ")
    print(f"{__version__}; {CHECKPOINT.name}, factor {args.factor:g}, {args.bits} bits, no seed")
    for method in args.methods.split(","):
        for found in measure(
            method,
            args.factor,
            lengths,
            count=args.texts,
            new=args.new,
            bits=args.bits,
            draft_method=args.draft_method,
        ):
            print(json.dumps(asdict(found) | {"per_forward": round(found.per_forward, 2)}))


if __name__ == "__main__":
    main()
