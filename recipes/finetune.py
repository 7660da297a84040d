"""Fine-tune a model for a longer context: a patch of rope_ext, LoRA or all weights, long rows.

    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/finetune.py \
        --config recipes/llama3_8b_yarn_lora.yaml --learning_rate 1e-5

Settings come from the file and, over it, from the command line: those of `Recipe` below and all
of transformers' TrainingArguments. What Trainer, accelerate, peft and datasets do is theirs.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
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
from recipes.parallel import check_parallelism, context_parallel_size
from rope_ext.errors import OptionError, RopeExtError, nearest
from rope_ext.measure.models import load_config, load_tokenizer
from rope_ext.methods.base import build_method

NONE = "none"
SETTINGS = "recipe.json"
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
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"],
        metadata={"help": "Names of linear layers."},
    )
    train_embeddings_and_norms: bool = _option(False, "Besides LoRA, as LongLoRA does.")
    loraplus_ratio: float | None = _option(None, "LoRA+: learning rate of B over that of A.")
    quantize: bool = _option(False, "QLoRA: base weights in 4 bits (needs bitsandbytes).")
    chunked_loss: bool = _option(True, "Cross entropy without all logits at once (torch 2.13).")


@dataclass(frozen=True)
class Plan:
    """A recipe that is checked.

    Args:
        config: of the model.
        tokenizer: of the model.
        target: context after training, tokens.
    """

    config: Any
    tokenizer: Any
    target: int


def parse(argv: Sequence[str]) -> tuple[Recipe, TrainingArguments]:
    """Settings of ``--config FILE`` with those of the command line over them.

    Raises:
        OptionError: the file cannot be read, or a setting is unknown.
    """
    parser = HfArgumentParser((Recipe, TrainingArguments), allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with any of these settings.")
    names = {action.dest for action in parser._actions} - {"help", "config"}
    known, _ = parser.parse_known_args(argv)
    words = [] if known.config is None else _words(known.config, names)
    recipe, args, _, unknown = parser.parse_args_into_dataclasses(
        [*words, *argv], return_remaining_strings=True
    )
    for word in unknown:
        name = word.lstrip("-").partition("=")[0]
        raise OptionError(f"unknown setting {word!r}{nearest(name, names) or ';'} see --help")
    return recipe, args


def _words(file: str, names: set[str]) -> list[str]:
    """A YAML file as a command line."""
    try:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"cannot read --config {file}: {error}") from None
    if not isinstance(values, dict):
        raise OptionError(f"--config {file} must hold lines of the form `name: value`")
    words = []
    for name, value in values.items():
        if name not in names:
            near = nearest(str(name), names) or "; see --help"
            raise OptionError(f"{file}: unknown setting {name!r}{near}")
        many = value if isinstance(value, list) else [value]
        shown = [json.dumps(v) if isinstance(v, dict) else str(v) for v in many]
        words += [] if value is None else [f"--{name}", *shown]
    return words


def check(recipe: Recipe, args: TrainingArguments) -> Plan:
    """Everything that can be checked without weights and without data.

    Raises:
        RopeExtError: something is missing, unknown or does not go together.
    """
    for name in ("model", "dataset", "length"):
        if getattr(recipe, name) is None:
            raise OptionError(f"--{name} is missing; give it in the recipe or on the command line")
    method = _method(recipe)
    _check_together(recipe, args, method)
    _check_output(recipe, args)
    config = load_config(recipe.model)
    check_parallelism(
        method,
        config,
        cp_size=context_parallel_size(args.parallelism_config),
        attn_implementation=recipe.attn,
        document_masking=recipe.document_masking,
        length=recipe.length,
    )
    trained, target = lengths(recipe, _bare(recipe, config, meta=True))
    if recipe.pose_chunks and recipe.length >= target:
        raise OptionError(
            f"--length {recipe.length} leaves PoSE nothing to skip: the target is {target} tokens; "
            f"give a shorter --length, such as the trained {trained}, or --pose_chunks 0"
        )
    if not recipe.pose_chunks and not trained < recipe.length <= target:
        raise OptionError(
            f"--length {recipe.length} must be longer than the trained {trained} tokens and at "
            f"most the target of {target}; give --pose_chunks 2 to train on short rows, or "
            f"another --length or --factor"
        )
    model = build(recipe, config, meta=True)  # what can be refused without weights is refused
    if recipe.chunked_loss:
        # Some operators do not run without weights; then the first training step tells.
        with contextlib.suppress(RuntimeError):
            ids = torch.zeros((1, 4), dtype=torch.long, device="meta")
            model(input_ids=ids, labels=ids)
    return Plan(config, load_tokenizer(recipe.model), target)


def _method(recipe: Recipe) -> Any:
    if not recipe.factor > 1:
        raise OptionError(
            f"--factor {recipe.factor:g} makes the target no longer than what the model was "
            f"trained on; give a number above 1"
        )
    try:
        more = json.loads(recipe.method_options or "{}")
        if not isinstance(more, dict):
            raise ValueError("it holds no names")
    except ValueError as error:
        raise OptionError(
            f"--method_options {recipe.method_options!r} is not valid ({error}); give JSON such as "
            f"'{{\"beta_fast\": 16}}'"
        ) from None
    if recipe.method != NONE:
        return build_method(recipe.method, factor=recipe.factor, **more)
    if more:
        raise OptionError("--method_options go with a method, and --method is none; leave them out")
    return None


def _check_together(recipe: Recipe, args: TrainingArguments, method: Any) -> None:
    lora_only = ("quantize", "train_embeddings_and_norms", "loraplus_ratio")
    for name in lora_only if recipe.lora_r == 0 else ():
        if getattr(recipe, name):
            raise OptionError(f"--{name} needs LoRA; give --lora_r 8, or leave it out")
    if recipe.dtype not in ("float32", "bfloat16"):
        raise OptionError(f"--dtype {recipe.dtype!r} is not valid; give float32 or bfloat16")
    if recipe.dtype == "bfloat16" and recipe.lora_r and not args.bf16:
        raise OptionError(
            "--dtype bfloat16 holds frozen weights in bfloat16 and trained ones in float32, which "
            "only go together under autocast; give --bf16 true as well, or --dtype float32"
        )
    if recipe.quantize and importlib.util.find_spec("bitsandbytes") is None:
        raise OptionError(
            "--quantize needs bitsandbytes, which is not installed; install it with: pip install "
            "bitsandbytes, or give --quantize false"
        )
    if recipe.streaming and args.max_steps < 1:
        raise OptionError("--streaming has no end, so --max_steps is needed; give it")
    if recipe.pose_chunks and not 2 <= recipe.pose_chunks <= recipe.length:
        raise OptionError(
            f"--pose_chunks {recipe.pose_chunks} is not valid; give 0 (no PoSE), or from 2 to "
            f"--length {recipe.length}"
        )
    if recipe.pose_chunks and recipe.document_masking:
        raise OptionError(
            "--document_masking tells documents apart by positions that --pose_chunks changes; "
            "leave one of them out"
        )
    if getattr(method, "mode", None) == "growing":
        raise OptionError(
            f"{method.name} with mode='growing' changes with the order of the rows it is trained "
            f"on; give --method_options mode 'fixed'"
        )
    if recipe.document_masking and method is not None and method.adapts:
        raise OptionError(
            f"{method.name} chooses the frequencies of a whole row, and with --document_masking "
            f"its documents have lengths of their own; give --method_options a fixed 'length', "
            f"or leave --document_masking out"
        )
    if recipe.chunked_loss and (args.use_liger_kernel or args.label_smoothing_factor):
        raise OptionError(
            "--chunked_loss is the loss already, without label smoothing; leave "
            "--use_liger_kernel and --label_smoothing_factor out, or give --chunked_loss false"
        )


def _decisive(recipe: Recipe, args: TrainingArguments) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in _DECISIVE}
    return json.loads(json.dumps({**asdict(recipe), **values}, default=str))


def _check_output(recipe: Recipe, args: TrainingArguments) -> None:
    folder, asked = Path(args.output_dir), args.resume_from_checkpoint
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    if asked is None or asked.lower() == "false":
        args.resume_from_checkpoint = None
        if last is not None or any(folder.glob("*.safetensors")):
            cure = "another --output_dir"
            if last is not None:
                cure += f", or --resume_from_checkpoint true to go on from {Path(last).name}"
            raise OptionError(f"{folder} holds the results of a run; give {cure}")
        return
    if asked.lower() == "true":
        args.resume_from_checkpoint = last
    if args.resume_from_checkpoint is None or not Path(args.resume_from_checkpoint).is_dir():
        raise OptionError(
            f"there is no checkpoint to go on from ({folder if last is None else asked}); leave "
            f"--resume_from_checkpoint out, or give a folder such as {folder}/checkpoint-100"
        )
    if (folder / SETTINGS).exists():
        before = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        now = _decisive(recipe, args)
        changed = [f"{k} {before.get(k)!r} -> {now[k]!r}" for k in now if before.get(k) != now[k]]
        if changed:
            raise OptionError(
                f"{folder} belongs to a run with other settings ({', '.join(changed)}); give the "
                f"same ones to resume it, or another --output_dir"
            )


def _bare(recipe: Recipe, config: Any, meta: bool) -> Any:
    options: dict[str, Any] = {"dtype": recipe.dtype}
    if recipe.attn is not None:
        options["attn_implementation"] = recipe.attn
    if meta:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    if recipe.quantize:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=recipe.dtype,
            bnb_4bit_quant_storage=recipe.dtype,  # that of the other weights, for FSDP
        )
    return AutoModelForCausalLM.from_pretrained(recipe.model, **options)


def lengths(recipe: Recipe, model: Any) -> tuple[int, int]:
    """Trained and target length, of a model that is not patched yet."""
    trained = recipe.original_max_position_embeddings or rope_ext.describe(model).length
    return trained, math.ceil(round(recipe.factor * trained, 6))


def build(recipe: Recipe, config: Any, meta: bool = False) -> Any:
    """The model as it is trained: patched, with LoRA, its loss in the output layer.

    With ``meta`` it has no weights, and a position method is left out, which takes some.
    """
    model = _bare(recipe, config, meta)
    method = _method(recipe)
    if method is None:
        text = model.config.get_text_config(decoder=True)
        text.max_position_embeddings = lengths(recipe, model)[1]
    elif not (meta and isinstance(method, rope_ext.PositionMethod)):
        rope_ext.patch(
            model,
            method,
            sliding_layers=recipe.sliding_layers,
            compose=recipe.compose,
            original_max_position_embeddings=recipe.original_max_position_embeddings,
        )
    whole = with_lora(model, recipe) if recipe.lora_r else model
    if recipe.chunked_loss:
        ChunkedLoss(model)
    return whole


def with_lora(model: Any, recipe: Recipe) -> Any:
    """LoRA on ``model``; what is trained is held in float32, whatever the rest is.

    Raises:
        OptionError: there are no such layers.
    """
    extra = embeddings_and_norms(model) if recipe.train_embeddings_and_norms else None
    tied = model.config.get_text_config(decoder=True).tie_word_embeddings
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=recipe.lora_target,
        modules_to_save=extra,
        ensure_weight_tying=bool(extra and tied),
    )
    try:
        model = peft.get_peft_model(model, settings)
    except ValueError as error:
        linear = {
            n.rsplit(".", 1)[-1] for n, m in model.named_modules() if hasattr(m, "in_features")
        }
        raise OptionError(
            f"LoRA cannot be put on this model ({str(error).splitlines()[0]}); give --lora_target "
            f"some of {', '.join(sorted(linear))}"
        ) from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def embeddings_and_norms(model: Any) -> list[str]:
    """Paths of the input embedding and of all norms: layers with nothing but vectors of weights."""
    embedding = model.get_input_embeddings()
    paths = []
    for path, module in model.named_modules():
        own = [parameter.ndim for parameter in module.parameters()]
        norm = "norm" in type(module).__name__.lower() and own and set(own) == {1}
        if module is embedding or norm:
            paths.append(path)
    return paths


class LongTrainer(Trainer):
    """Trainer with LoRA+ where ``loraplus_ratio`` is set."""

    loraplus_ratio: float | None = None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.loraplus_ratio is None or self.optimizer is not None:
            return super().create_optimizer(model)
        cls, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = peft.optimizers.create_loraplus_optimizer(
            self.model if model is None else model,
            cls,
            loraplus_lr_ratio=self.loraplus_ratio,
            loraplus_weight_decay=self.args.weight_decay,
            **options,
        )
        return self.optimizer


class Companion(TrainerCallback):
    """Writes the patch beside every adapter, and tells the collator the epoch."""

    def __init__(self, model: Any, collator: data.Collator, sidecar: bool) -> None:
        self.model, self.collator, self.sidecar = model, collator, sidecar

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.collator.epoch = int(state.epoch)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.save(Path(args.output_dir) / f"checkpoint-{state.global_step}", args)

    def save(self, folder: Path, args: TrainingArguments) -> None:
        if self.sidecar and args.should_save:
            rope_ext.save_sidecar(self.model, folder)


def main(argv: Sequence[str] | None = None) -> None:
    recipe, args = parse(sys.argv[1:] if argv is None else argv)
    plan = check(recipe, args)
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
            plan.tokenizer,
            length=recipe.length,
            minimum=recipe.minimum_document,
            masking=recipe.document_masking,
            seed=args.seed,
        )
    set_seed(args.seed)
    model = build(recipe, plan.config)
    collator = data.Collator(recipe.pose_chunks, plan.target, args.seed)
    companion = Companion(model, collator, recipe.method != NONE and recipe.lora_r > 0)
    plan.tokenizer.model_max_length = plan.target
    args.remove_unused_columns = False  # the collator needs the index of the row
    trainer = LongTrainer(
        model,
        args,
        data_collator=collator,
        train_dataset=rows,
        processing_class=plan.tokenizer,
        callbacks=[companion],
    )
    trainer.loraplus_ratio = recipe.loraplus_ratio
    folder = Path(args.output_dir)
    if args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_decisive(recipe, args), indent=1) + "\n"
        (folder / SETTINGS).write_text(text, encoding="utf-8")
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    companion.save(folder, args)


if __name__ == "__main__":
    try:
        main()
    except RopeExtError as error:
        sys.exit(f"error: {error}")
