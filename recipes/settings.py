"""The settings of recipes/finetune.py: where they come from, and which are refused."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from recipes.data import PYTHON_LIBRARY
from rope_ext.errors import OptionError, nearest
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
        None, f"File, folder, Hub id or {PYTHON_LIBRARY}; see recipes/data.py."
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


def method_of(recipe: Recipe) -> Any:
    """The method object; None: RoPE stays as it is.

    Raises:
        RopeExtError: there is no such method, or an option is not valid.
    """
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


def check_together(recipe: Recipe, args: TrainingArguments) -> None:
    """Raise OptionError where settings are missing or do not go together."""
    for name in ("model", "dataset", "length"):
        if getattr(recipe, name) is None:
            raise OptionError(f"--{name} is missing; give it in the recipe or on the command line")
    method = method_of(recipe)
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
    if args.eval_strategy != "no":
        raise OptionError(
            "--eval_strategy has nothing to evaluate on here; leave it out, and measure what was "
            "saved with python -m eval.report --adapter FOLDER --method adapter"
        )
    if recipe.chunked_loss and (args.use_liger_kernel or args.label_smoothing_factor):
        raise OptionError(
            "--chunked_loss is the loss already, without label smoothing; leave "
            "--use_liger_kernel and --label_smoothing_factor out, or give --chunked_loss false"
        )


def decisive(recipe: Recipe, args: TrainingArguments) -> dict[str, Any]:
    """What decides the numbers of a run, as JSON."""
    values = {name: getattr(args, name) for name in _DECISIVE}
    return json.loads(json.dumps({**asdict(recipe), **values}, default=str))


def check_output(recipe: Recipe, args: TrainingArguments) -> None:
    """Settle where to resume; raise OptionError if another run's results are in the way."""
    folder, asked = Path(args.output_dir), args.resume_from_checkpoint
    last = _last_checkpoint(folder)
    if asked is None or asked.lower() == "false":
        args.resume_from_checkpoint = None
        if last is not None or any(folder.glob("*.safetensors")):
            cure = "another --output_dir"
            if last is not None:
                cure += f", or --resume_from_checkpoint true to go on from {last.name}"
            raise OptionError(f"{folder} holds the results of a run; give {cure}")
        return
    if asked.lower() == "true":
        args.resume_from_checkpoint = None if last is None else str(last)
    if args.resume_from_checkpoint is None or not Path(args.resume_from_checkpoint).is_dir():
        where = f"in {folder}" if asked.lower() == "true" else asked
        raise OptionError(
            f"there is no checkpoint to go on from ({where}); leave --resume_from_checkpoint out, "
            f"or give a folder such as {folder}/checkpoint-100"
        )
    if (folder / SETTINGS).exists():
        before = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        now = decisive(recipe, args)
        changed = [f"{k} {before.get(k)!r} -> {now[k]!r}" for k in now if before.get(k) != now[k]]
        if changed:
            raise OptionError(
                f"{folder} belongs to a run with other settings ({', '.join(changed)}); give the "
                f"same ones to resume it, or another --output_dir"
            )


def _last_checkpoint(folder: Path) -> Path | None:
    """The last one that is whole: a run that is killed may leave a beginning of one behind."""
    for found in sorted(folder.glob("checkpoint-*"), key=lambda c: -int(c.name.split("-")[1])):
        with contextlib.suppress(OSError, ValueError):
            json.loads((found / TRAINER_STATE_NAME).read_text(encoding="utf-8"))  # written last
            return found
    return None
