"""Train a bundled checkpoint from scratch, on data that every machine has or can download.

    python lab/pretrain/train.py tiny-512
    python lab/pretrain/train.py tiny-bytes-512

The text, tokenizer, exercises and model of each checkpoint are in a separate file next to this one.
With --resume, a killed run continues exactly at its last checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from lab.pretrain import tiny_512, tiny_bytes_512
from recipes.checks import POSITIVE, SEED, at_least, out_of_range
from recipes.django_docs import as_jsonl
from rope_ext.command.terminal import stoppable
from rope_ext.errors import Mistakes, RopeExtError

CHECKPOINTS = {
    "tiny-512": tiny_512.CHECKPOINT,
    "tiny-bytes-512": tiny_bytes_512.CHECKPOINT,
}


class MuonAdamW(torch.optim.Optimizer):
    """Muon (Jordan 2024) for the matrices of the layers, AdamW for everything else.

    Parameters of encodings (``rope_ext_...``) use AdamW, because a table is not a linear map; their
    rate is ``encoding`` times the one that AdamW uses by default.

    torch.optim.Muon orthogonalizes in bfloat16, which is about thirty times slower than float32 on
    a CPU without bfloat16 units. This is the same update in float32, as a single optimizer that
    Trainer can save and resume.
    """

    def __init__(
        self, model: torch.nn.Module, lr: float, model_rate: float = 1.0, encoding_rate: float = 1.0
    ) -> None:
        matrix = []
        others = []
        encoding = []
        for name, p in model.named_parameters():
            if "rope_ext_" in name:
                encoding.append(p)
            else:
                (matrix if p.ndim == 2 and ".layers." in name else others).append(p)
        groups = [
            {"params": matrix, "muon": True, "lr": lr * model_rate},
            {"params": others, "muon": False, "lr": lr * model_rate / 6},
            {"params": encoding, "muon": False, "lr": lr * encoding_rate / 6},
        ]
        super().__init__([group for group in groups if group["params"]], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(p)
                    state["square"] = torch.zeros(()) if group["muon"] else torch.zeros_like(p)
                state["step"] += 1
                if group["muon"]:
                    state["momentum"].lerp_(p.grad, 0.05)
                    update = orthogonalize(p.grad.lerp(state["momentum"], 0.95))
                    # As in Jordan's code, with its factors of momentum; only matrices decay.
                    update *= max(1, p.shape[0] / p.shape[1]) ** 0.5
                    p.mul_(1 - group["lr"] * 0.05)
                else:
                    state["momentum"].lerp_(p.grad, 0.1)
                    state["square"].lerp_(p.grad.square(), 0.05)
                    mean = state["momentum"] / (1 - 0.9 ** state["step"])
                    square = state["square"] / (1 - 0.95 ** state["step"])
                    update = mean / (square.sqrt() + 1e-10)
                p.add_(update, alpha=-group["lr"])


def orthogonalize(g: torch.Tensor) -> torch.Tensor:
    """Approximate the nearest (semi-)orthogonal matrix by Newton-Schulz iteration."""
    wide = g if g.shape[0] <= g.shape[1] else g.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if g.shape[0] <= g.shape[1] else x.T


def weighted_loss(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next tokens, averaged over their weights, nats.

    Args:
        logits: ``[rows, tokens, vocabulary]``.
        ids: ``[rows, tokens]``.
        weights: of ``ids``, same shape; those of the first tokens have no effect.
    """
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    counts = weights[:, 1:].flatten()
    return (losses * counts).sum() / counts.sum()


class WeightedTrainer(Trainer):
    """Cross entropy with a weight per token, averaged over the weights of the batch."""

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=inputs["input_ids"]).logits
        loss = weighted_loss(logits, inputs["input_ids"], inputs["weights"])
        return (loss, logits[:, :-1]) if return_outputs else loss


def schedule(step: int, steps: int) -> float:
    """Warm-up over 60 steps, constant, linear to zero over the last third (WSD)."""
    return min(1.0, (step + 1) / 60, max(0.0, (steps - step) / (steps / 3)))


_RULES = {
    **dict.fromkeys(("steps", "batch_size", "save_steps"), at_least(1)),
    "learning_rate": POSITIVE,
    "seed": SEED,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=CHECKPOINTS)
    parser.add_argument("--output", type=Path, help="default: checkpoints/NAME")
    parser.add_argument("--work", type=Path, help="default: runs/pretrain/NAME")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --work, if there is one"
    )
    parser.add_argument("--save-steps", type=int, default=100)
    args = parser.parse_args()
    mistakes = Mistakes()
    mistakes.add_all(out_of_range(vars(args), _RULES, separator="-").values())
    mistakes.report()
    recipe = CHECKPOINTS[args.name]
    output = args.output or Path("checkpoints") / args.name
    work = args.work or Path("runs/pretrain") / args.name
    steps = args.steps or recipe.steps
    batch_size = args.batch_size or recipe.batch_size

    # Of the weights; rows have their own generators.
    torch.manual_seed(args.seed)
    texts = recipe.texts("train")
    tokenizer = recipe.tokenizer(texts)
    data = recipe.rows(tokenizer, texts, steps * batch_size, args.seed)
    print(f"{len(texts)} files, {len(data.stream):,} tokens of text", file=sys.stderr)
    model = recipe.model(tokenizer)
    optimizer = MuonAdamW(model, args.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    trainer = WeightedTrainer(
        model,
        TrainingArguments(
            output_dir=str(work),
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            remove_unused_columns=False,
            # Rows are random by their index: resumed, training goes on with the next one.
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
    begun = any(work.glob("checkpoint-*"))
    # Trainer raises an error if there is no checkpoint to resume from.
    trainer.train(resume_from_checkpoint=args.resume and begun)
    model.config.use_cache = True  # Trainer turns it off
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    if recipe.ships_held_out:
        (output / "held_out.jsonl").write_text(as_jsonl(recipe.texts("held_out")), encoding="utf-8")


if __name__ == "__main__":
    try:
        with stoppable():
            main()
    except RopeExtError as error:
        sys.exit(f"error: {error}")
