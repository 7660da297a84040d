"""Fine-tune a model for a longer context: a patch of rope_ext, LoRA or all weights, long rows.

    accelerate launch --config_file recipes/accelerate/single.yaml recipes/finetune.py \
        --config recipes/tiny_512_yarn_pose.yaml --learning_rate 1e-4

Settings come from the file and, over it, from the command line: those of `Recipe` below and all
of transformers' TrainingArguments. What Trainer, accelerate, peft and datasets do is theirs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import yaml
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import rope_ext
from recipes import data
from recipes.loss import ChunkedLoss
from rope_ext.errors import OptionError, RopeExtError, nearest
from rope_ext.measure.models import load_config, load_tokenizer, trained_length
from rope_ext.methods.base import build_method

NONE = "none"
SETTINGS = "recipe.json"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# What decides the numbers of a run, besides the recipe: a resumed one must have the same.
_DECISIVE = (
    *("seed", "data_seed", "max_steps", "num_train_epochs", "world_size"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
    *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "fp16"),
)


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class Recipe:
    """What is trained, on what; lengths are in tokens."""

    model: str | None = _option(None, "Folder or Hub id.")
    method: str = _option("yarn", "Of rope_ext.methods(), or none: RoPE stays as it is.")
    factor: float = _option(4.0, "How many times the trained length the context becomes.")
    method_options: str | None = _option(None, "More options of the method, as JSON.")
    original_max_position_embeddings: int | None = _option(
        None, "Trained length, if the model's configuration does not say it rightly."
    )
    sliding_layers: str = _option("auto", "auto, keep or scale; see rope_ext.patch.")
    compose: bool = _option(False, "Patch on top of the checkpoint's own scaling.")
    dtype: str = _option("float32", "In which weights are held: float32 or bfloat16.")
    attn: str | None = _option(None, "Attention implementation of transformers.")

    dataset: str | None = _option(
        None, f"File, folder, Hub id or {data.PYTHON_LIBRARY}; see recipes/data.py."
    )
    dataset_config: str | None = _option(None, "Configuration of a data set of the Hub.")
    dataset_split: str = _option("train", "Split of a data set of the Hub.")
    text_column: str = _option("text", "Column with the text.")
    streaming: bool = _option(False, "Read while training; needs max_steps.")
    length: int | None = _option(None, "Of every training row.")
    minimum_document: int = _option(0, "Shorter documents are left out.")
    document_masking: bool = _option(False, "Tokens see their own document only.")
    pose_chunks: int = _option(0, "PoSE with that many chunks, 2 or more; 0: full length.")

    lora_r: int = _option(8, "Rank of LoRA; 0 trains all weights.")
    lora_alpha: int = _option(16, "The change is multiplied by lora_alpha / lora_r.")
    lora_dropout: float = _option(0.0, "Dropout before LoRA.")
    lora_target: list[str] = field(
        default_factory=lambda: list(_ATTENTION), metadata={"help": "Names of linear layers."}
    )
    train_embeddings_and_norms: bool = _option(False, "Besides LoRA, as LongLoRA does.")
    loraplus_ratio: float | None = _option(None, "LoRA+: learning rate of B over that of A.")
    quantize: bool = _option(False, "QLoRA: base weights in 4 bits (needs bitsandbytes).")
    chunked_loss: bool = _option(True, "Cross entropy without all logits at once (torch 2.13).")


def parse(argv: Sequence[str]) -> tuple[Recipe, TrainingArguments]:
    """Settings of ``--config FILE`` with those of the command line over them.

    Raises:
        OptionError: the file cannot be read, or a setting is unknown.
    """
    parser = HfArgumentParser((Recipe, TrainingArguments), allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with any of these settings.")
    known, _ = parser.parse_known_args(argv)
    names = {action.dest for action in parser._actions} - {"help", "config"}
    words = [] if known.config is None else _words(known.config, names)
    recipe, args, _, unknown = parser.parse_args_into_dataclasses(
        [*words, *argv], return_remaining_strings=True
    )
    for word in unknown:
        name = word.lstrip("-").partition("=")[0]
        raise OptionError(f"unknown setting {word!r}{nearest(name, names)} See --help")
    return recipe, args


def _words(file: str, names: set[str]) -> list[str]:
    """A YAML file as a command line."""
    try:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise OptionError(f"cannot read --config {file}: {error}") from None
    if not isinstance(values, dict):
        raise OptionError(f"--config {file} must hold lines of the form `name: value`")
    words = []
    for name, value in values.items():
        if name not in names:
            raise OptionError(f"{file}: unknown setting {name!r}{nearest(str(name), names)}")
        if value is None:
            continue
        many = value if isinstance(value, list) else [value]
        shown = [json.dumps(v) if isinstance(v, dict) else str(v) for v in many]
        words += [f"--{name}", *shown]
    return words


def check(recipe: Recipe, args: TrainingArguments) -> tuple[Any, Any, int]:
    """Everything that can be checked without weights and without data.

    Returns:
        Configuration and tokenizer of the model, and the target length in tokens.

    Raises:
        RopeExtError: something is missing, unknown or does not go together.
    """
    for name in ("model", "dataset", "length"):
        if getattr(recipe, name) is None:
            raise OptionError(f"--{name} is missing; give it in the recipe or on the command line")
    config = load_config(recipe.model)
    if recipe.original_max_position_embeddings is None:
        trained = trained_length(config)
    else:
        trained = recipe.original_max_position_embeddings
    if not recipe.factor > 1:
        raise OptionError(
            f"--factor {recipe.factor:g} makes the target no longer than the {trained} tokens "
            f"that {recipe.model} is trained on; give a number above 1"
        )
    skeleton = build(recipe, config, meta=True)
    if recipe.method == NONE:
        target = round(recipe.factor * trained)
    else:
        target = rope_ext.describe(skeleton).target_length
    if recipe.pose_chunks:
        _check_pose(recipe, trained, target)
    elif not trained < recipe.length <= target:
        raise OptionError(
            f"--length {recipe.length} must be longer than the trained {trained} tokens and at "
            f"most the target of {target}; give --pose_chunks 2 to train on short rows, or "
            f"another --length or --factor"
        )
    _check_output(recipe, args)
    return config, load_tokenizer(recipe.model), target


def _check_pose(recipe: Recipe, trained: int, target: int) -> None:
    if not 2 <= recipe.pose_chunks <= recipe.length:
        raise OptionError(
            f"--pose_chunks {recipe.pose_chunks} must be 0 (no PoSE), or from 2 to --length"
        )
    if recipe.length >= target:
        raise OptionError(
            f"--length {recipe.length} leaves PoSE nothing to skip: the target is {target} tokens; "
            f"give a shorter --length, such as the trained {trained}, or --pose_chunks 0"
        )
    if recipe.document_masking:
        raise OptionError(
            "--document_masking tells documents apart by positions that PoSE changes; leave one "
            "of them out"
        )


def _decisive(recipe: Recipe, args: TrainingArguments) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in _DECISIVE}
    return json.loads(json.dumps({**asdict(recipe), **values}, default=str))


def _check_output(recipe: Recipe, args: TrainingArguments) -> None:
    folder = Path(args.output_dir)
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    if args.resume_from_checkpoint in (None, "False", "false"):
        if last is not None:
            raise OptionError(
                f"{folder} holds checkpoints of a run; give --resume_from_checkpoint true to go "
                f"on from {Path(last).name}, or another --output_dir"
            )
        return
    if args.resume_from_checkpoint in ("True", "true"):
        if last is None:
            raise OptionError(
                f"{folder} holds no checkpoint to go on from; leave --resume_from_checkpoint out"
            )
        args.resume_from_checkpoint = last
    if not (folder / SETTINGS).exists():
        return
    before = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    now = _decisive(recipe, args)
    changed = [f"{k}: {before.get(k)!r} -> {now[k]!r}" for k in now if before.get(k) != now[k]]
    if changed:
        raise OptionError(
            f"{folder} belongs to a run with other settings ({'; '.join(changed)}); give the same "
            f"ones to resume it, or another --output_dir"
        )


def build(recipe: Recipe, config: Any, meta: bool = False) -> Any:
    """The model as it is trained: patched, with LoRA, its loss in the output layer.

    With ``meta`` it has no weights: what can be refused is refused before they are loaded.
    """
    options: dict[str, Any] = {"dtype": recipe.dtype}
    if recipe.attn is not None:
        options["attn_implementation"] = recipe.attn
    if meta:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **options)
    else:
        if recipe.quantize:
            options["quantization_config"] = transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=recipe.dtype,
                bnb_4bit_quant_storage=recipe.dtype,  # that of all weights, for FSDP
            )
        model = AutoModelForCausalLM.from_pretrained(recipe.model, **options)
    if recipe.method == NONE:
        text = model.config.get_text_config(decoder=True)
        trained = recipe.original_max_position_embeddings or trained_length(model.config)
        text.max_position_embeddings = round(recipe.factor * trained)
    else:
        more = json.loads(recipe.method_options or "{}")
        rope_ext.patch(
            model,
            build_method(recipe.method, factor=recipe.factor, **more),
            sliding_layers=recipe.sliding_layers,
            compose=recipe.compose,
            original_max_position_embeddings=recipe.original_max_position_embeddings,
        )
    trained_model = with_lora(model, recipe) if recipe.lora_r else model
    if recipe.chunked_loss:
        ChunkedLoss(model)
    return trained_model


def with_lora(model: Any, recipe: Recipe) -> Any:
    """LoRA on ``model``; trained weights in float32, whatever the others are."""
    saved = []
    tied = False
    if recipe.train_embeddings_and_norms:
        saved = _embeddings_and_norms(model)
        tied = bool(model.config.get_text_config(decoder=True).tie_word_embeddings)
    model = peft.get_peft_model(
        model,
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=recipe.lora_r,
            lora_alpha=recipe.lora_alpha,
            lora_dropout=recipe.lora_dropout,
            target_modules=recipe.lora_target,
            modules_to_save=saved or None,
            ensure_weight_tying=tied,
        ),
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def _embeddings_and_norms(model: Any) -> list[str]:
    """Names of the input embedding and of all norms: layers with one vector of weights."""
    embedding = model.get_input_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if module is embedding
        or (
            "norm" in type(module).__name__.lower()
            and [parameter.ndim for parameter in module.parameters(recurse=False)] in ([1], [1, 1])
        )
    ]


class LongTrainer(Trainer):
    """Trainer with LoRA+ where the recipe asks for it."""

    loraplus_ratio: float | None = None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.loraplus_ratio is None or self.optimizer is not None:
            return super().create_optimizer(model)
        cls, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = peft.optimizers.create_loraplus_optimizer(
            model or self.model,
            cls,
            loraplus_lr_ratio=self.loraplus_ratio,
            loraplus_weight_decay=self.args.weight_decay,
            **options,
        )
        return self.optimizer


class Companion(TrainerCallback):
    """Writes the patch beside every checkpoint, and tells the collator the epoch."""

    def __init__(self, model: Any, collator: data.Collator, patched: bool) -> None:
        self.model, self.collator, self.patched = model, collator, patched

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.collator.epoch = int(state.epoch)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.save(Path(args.output_dir) / f"checkpoint-{state.global_step}", args)

    def save(self, folder: Path, args: TrainingArguments) -> None:
        if self.patched and args.should_save and hasattr(rope_ext, "save_sidecar"):
            rope_ext.save_sidecar(self.model, folder)


def main(argv: Sequence[str] | None = None) -> None:
    recipe, args = parse(sys.argv[1:] if argv is None else argv)
    config, tokenizer, target = check(recipe, args)
    with args.main_process_first(desc="reading the data"):
        texts = data.documents(
            recipe.dataset,
            config=recipe.dataset_config,
            split=recipe.dataset_split,
            column=recipe.text_column,
            streaming=recipe.streaming,
        )
        rows = data.rows(
            texts,
            tokenizer,
            length=recipe.length,
            minimum=recipe.minimum_document,
            masking=recipe.document_masking,
            seed=args.seed,
        )
    args.remove_unused_columns = False  # the collator needs the index
    set_seed(args.seed)
    model = build(recipe, config)
    collator = data.Collator(recipe.pose_chunks, target, args.seed)
    tokenizer.model_max_length = target
    companion = Companion(model, collator, recipe.method != NONE)
    trainer = LongTrainer(
        model,
        args,
        data_collator=collator,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[companion],
    )
    trainer.loraplus_ratio = recipe.loraplus_ratio
    if args.should_save:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        text = json.dumps(_decisive(recipe, args), indent=1) + "\n"
        (Path(args.output_dir) / SETTINGS).write_text(text, encoding="utf-8")
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    companion.save(Path(args.output_dir), args)


if __name__ == "__main__":
    try:
        main()
    except RopeExtError as error:
        sys.exit(f"error: {error}")
