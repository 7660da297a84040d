"""Reads and validates the settings of recipes/finetune.py."""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import DataClassType
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.trainer import TRAINER_STATE_NAME

from recipes.checks import (
    missing,
    not_installed,
    out_of_range,
    unsupported,
    unusable_optimizer,
)
from recipes.data import PYTHON_LIBRARY
from recipes.parallel import context_parallel_size, sharded_by
from recipes.shapes import config_of
from rope_eval.plots.style import require_matplotlib
from rope_eval.reports.calibration import Calibration
from rope_eval.tune.fitting import can_fit, supported
from rope_ext.command.arguments import UNPATCHED, read_json
from rope_ext.config.record import method_to_json
from rope_ext.encodings import Encoding, InputEncoding
from rope_ext.errors import Mistakes, OptionError, first_line, nearest
from rope_ext.methods import FrequencyMethod, build_method, method_class
from rope_ext.methods.checked import not_none
from rope_ext.methods.rope import factor_to
from rope_ext.methods.temperature import SSMax
from rope_ext.saving.checkpoints import trained_length
from rope_ext.saving.drafts import draft_of

NONE = "none"
ALL_LINEAR = "all-linear"
SKIP = "skip"
STOP = "stop"
TEXT = "text"
CHAT = "chat"
FORMATS = (TEXT, CHAT)
MIXED_ROWS = ("chunked", "bookended")
ROWS = ("packed", "document", *MIXED_ROWS)
INITS = ("default", "model")
POSITIONS = (
    *("consecutive", "pose", "pose_released", "random"),
    *("cream", "random_floats", "mixed_windows"),
)
LONG_ROWS = ("consecutive", "mixed_windows")
"""Schemes for rows longer than the trained length; the others use short rows."""
_LONGEST_ROW = 8192
"""Tokens of a row if only ``target_length`` is given: PoSE needs no more."""
_MOST_BYTES = 2**20  # of a recipe
_READING = 24 * 60 * 60  # seconds that processes wait while the first one reads the data
# A byte per pair of tokens: torch's masks are bool.
_LARGEST_MASK = 2**30  # bytes; the mask of a row of 32768 tokens
SETTINGS = "recipe.json"
DIGESTS = "data_digests"
"""Field of recipe.json with a hash of each dataset."""
TEMPLATE = "chat_template_digest"
"""Field of recipe.json with a hash of the chat template, of a run on conversations."""
STREAM = "stream.json"
"""File in a checkpoint with the state of the data stream (recipes/stream.py)."""
# Training arguments that affect the results of a run; a resumed run must use the same values.
_DECISIVE = (
    *("seed", "data_seed", "max_steps", "num_train_epochs", "world_size"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
    *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "fp16"),
    *("label_smoothing_factor", "neftune_noise_alpha"),
    "eval_strategy",  # evaluation rows are not trained on
    *("train_sampling_strategy", "dataloader_drop_last"),  # which rows are in a step
)
_OF_TOKENIZERS = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja")

_OF_MODELS = ("*.safetensors", "*.bin", "*config.json")
# Files in a checkpoint that are only needed to resume.
_RESUME_FILES = (
    *("optimizer", "scheduler", "scaler", "rng_state", "trainer_state"),
    *("pytorch_model_fsdp", "latest", "zero_to_fp32", STREAM),
)


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class Recipe:
    """What to train and on which data; lengths are in tokens."""

    model: str | None = _option(None, "Model directory or Hub ID.")
    method: str = _option("yarn", "Name of a rope_ext method, or unpatched (none): plain RoPE.")
    factor: float = _option(4.0, "Extension factor: target length / trained length.")
    target_length: int | None = _option(
        None,
        "Target context length instead of factor. Sets factor and, unless given, length (the "
        "trained length, at most 8192) and minimum_document (half a row).",
    )
    method_options: str | None = _option(
        None, "Options of the method: JSON, or a calibration.json of rope-ext calibrate."
    )
    init: str = _option(
        "default",
        "Initial parameters of an encoding: default, or model, which fits them to the original "
        "RoPE on training rows; see rope_ext.fit.",
    )
    original_max_position_embeddings: int | None = _option(
        None, "Override the trained length in the config."
    )
    sliding_layers: str = _option("auto", "auto, keep or scale; see rope_ext.patch.")
    layers: str | None = _option(None, 'Layers to patch, such as "every 4th".')
    compose: bool = _option(False, "Apply on top of existing RoPE scaling.")
    dtype: str = _option("float32", "Dtype of the weights: float32 or bfloat16.")
    attn: str | None = _option(None, "Attention implementation of transformers.")

    dataset: str | None = _option(
        None, f"File, directory, Hub ID or {PYTHON_LIBRARY}; see recipes/data.py."
    )
    dataset_config: str | None = _option(None, "Configuration of a Hub dataset.")
    dataset_split: str = _option("train", "Split of a Hub dataset.")
    text_column: str = _option("text", "Column with the text.")
    format: str = _option(
        TEXT,
        "text, or chat: rows of messages, ShareGPT's conversations, prompt and completion, or "
        "instruction and output, with a loss on the answers only; see recipes/chat.py.",
    )
    bad_files: str = _option(
        SKIP,
        "Local files, rows of them, or conversations of any dataset that cannot be read: skip, "
        "which names them and goes on without them, or stop, which ends the run.",
    )
    rows_per_step: int | None = _option(
        None,
        "Rows per optimizer step on all devices together, instead of gradient_accumulation_steps.",
    )
    datasets: list[str] = field(
        default_factory=list,
        metadata={
            "help": "A mixture instead of dataset: JSON entries with dataset and weight, and "
            "optionally config, split, column, format, rows, minimum_document. Weights are shares "
            "of rows."
        },
    )
    streaming: bool = _option(False, "Read the data during training; needs max_steps.")
    length: int | None = _option(None, "Length of each training row in tokens.")
    rows: str = _option(
        "packed",
        "packed: concatenated documents; chunked: spans of a single document, without its "
        "remainder and without documents shorter than a row; bookended: packed, with a start and "
        "an end token in every row; document: the beginning of one document.",
    )
    minimum_document: int = _option(0, "Drop documents with fewer tokens.")
    document_masking: bool = _option(False, "Mask attention between documents.")
    positions: str = _option(
        "consecutive",
        "consecutive; pose: chunks that skip positions; pose_released: two chunks that also skip "
        "text, as in PoSE's code; random: sorted random positions below the target; random_floats: "
        "the same, real numbers; cream: a head, a tail at the target and a middle in between; "
        "mixed_windows: long rows, some of them in windows of the trained length.",
    )
    short_share: float = _option(
        0.3, "Share of the rows in windows of the trained length, for positions: mixed_windows."
    )
    pose_chunks: int = _option(0, "Number of PoSE chunks; 2 or more implies positions: pose.")

    retrieval_share: float = _option(
        0.0,
        "Share of the rows that state facts and ask for them, so that training keeps retrieval; 0 "
        "disables it.",
    )

    restoration: float = _option(
        0.0,
        "Weight of a loss on rows of the trained length that keeps hidden states close to those of "
        "the original model (needs LoRA); 0 disables it.",
    )

    eval_dataset: str | None = _option(
        None, "Evaluation data, as for dataset; default: hold out the first documents of dataset."
    )
    eval_split: str = _option("train", "Split of eval_dataset; python-library has held_out.")
    eval_rows: int = _option(8, "Number of evaluation rows.")
    eval_length: int | None = _option(
        None, "Length of evaluation rows and passkeys; default: the target length."
    )
    eval_passkeys: int = _option(10, "Number of passkeys to evaluate; 0 disables them.")

    lora_r: int = _option(8, "Rank of LoRA; 0 trains all weights, in float32.")
    lora_alpha: int = _option(16, "LoRA scaling: the update is multiplied by lora_alpha / lora_r.")
    lora_dropout: float = _option(0.0, "Dropout before LoRA.")
    lora_target: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"],
        metadata={
            "help": "Names of linear layers, all-linear, or one regular expression for whole "
            "paths. none: no LoRA, train only the method's own parameters, such as those of "
            "temperature ssmax."
        },
    )
    lora_options: str | None = _option(
        None,
        "More options of peft.LoraConfig, as JSON: use_dora, use_rslora, init_lora_weights, "
        "rank_pattern, exclude_modules and so on.",
    )
    train_embeddings_and_norms: bool = _option(
        False, "Also train embeddings and norms, as LongLoRA does."
    )
    temperature_lr: float = _option(
        0.1, "Learning rate of the scales of temperature ssmax, instead of learning_rate."
    )
    loraplus_ratio: float | None = _option(None, "LoRA+: ratio of the learning rates of B and A.")
    quantize: bool = _option(False, "QLoRA: quantized base weights (needs bitsandbytes).")
    quantize_bits: int = _option(4, "Bits of quantized weights: 4 (NF4) or 8 (LLM.int8).")
    chunked_loss: bool = _option(
        True, "Compute cross entropy in chunks, without all logits in memory (torch 2.13)."
    )


class _Parser(HfArgumentParser):
    """Raises an error where argparse would print all options and exit."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see --help")


def parse(argv: Sequence[str]) -> tuple[Recipe, TrainingArguments]:
    """Read ``--config FILE`` and override it with the command line.

    Raises:
        OptionError: the file cannot be read, or settings are unknown or out of range.
    """
    mistakes = Mistakes()
    recipe, args = read_settings(argv, mistakes)
    mistakes.report()
    return recipe, args


def read_settings(argv: Sequence[str], mistakes: Mistakes) -> tuple[Recipe, Any]:
    """Like :func:`parse`, but record invalid values in ``mistakes`` instead of raising an error.

    Returns:
        The recipe, and TrainingArguments or, if transformers rejects them, their plain values.

    Raises:
        OptionError: the file cannot be read, or a value has the wrong type.
    """
    kinds = [DataClassType(kind) for kind in (Recipe, TrainingArguments)]
    parser = _Parser(kinds, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with any of these settings.")
    parser.set_defaults(ddp_timeout=_READING)
    names = {action.dest for action in parser._actions} - {"help", "config"}
    # A first pass for --config alone; the second one reads its words before those of the command
    # line, which therefore win.
    known, _ = parser.parse_known_args(argv)
    words = [] if known.config is None else _words(known.config, names, mistakes)
    found, unknown = parser.parse_known_args([*words, *argv])
    named = False
    for word in unknown:
        if named and not word.startswith("--"):
            continue  # the value of an unknown setting
        named = word.startswith("--")
        name = word.lstrip("-").partition("=")[0]
        mistakes.add(f"unknown setting {word!r}{nearest(name, names) or ';'} see --help")
    values = vars(found)
    mistakes.add_all(out_of_range(values).values())
    file, line = (
        {word[2:].partition("=")[0] for word in given if word.startswith("--")}
        for given in (words, argv)
    )
    # A target on the command line replaces the factor of the file, and does not contradict it.
    file -= {"factor"} if "target_length" in line else set()
    mistakes.check(derive, values, file | line)
    recipe = Recipe(**{option.name: values[option.name] for option in fields(Recipe)})
    recipe.method = NONE if recipe.method == UNPATCHED else recipe.method
    recipe = mistakes.check(calibrated, recipe, default=replace(recipe, method_options=None))
    return recipe, _training_arguments(values, mistakes)


def derive(values: dict[str, Any], typed: set[str]) -> None:
    """Set the options that follow from ``target_length`` and ``rows_per_step``, in place.

    ``typed`` are the options that were given, whose values stay.

    Raises:
        RopeExtError: the trained length is not known, or a value is given twice.
    """
    rows = values["rows_per_step"]
    target = values["target_length"]
    if rows is not None:
        if values["gradient_accumulation_steps"] != 1:
            raise OptionError(
                "--rows_per_step and --gradient_accumulation_steps set the same; give one of them"
            )
        # Devices that share a row take it together; accelerate refuses fewer than share one.
        world = max(1, int(os.environ.get("WORLD_SIZE", "1")) // context_parallel_size())
        each = world * values["per_device_train_batch_size"]
        if rows < 1 or rows % each:
            raise OptionError(
                f"--rows_per_step {rows} must be a multiple of the {each} rows that all devices "
                f"take at once (devices, or groups of them that share a row, times "
                f"--per_device_train_batch_size)"
            )
        values["gradient_accumulation_steps"] = rows // each
    if target is None:
        return
    if "factor" in typed:
        raise OptionError("--factor and --target_length set the same; give one of them")
    trained = values["original_max_position_embeddings"]
    if trained is None and values["model"] is not None:
        trained = trained_length(config_of(values["model"]))
    if trained is None:
        return  # a missing model is reported with the other mistakes
    if target <= trained:
        raise OptionError(
            f"--target_length {target} must be longer than the {trained} tokens that the model was "
            f"trained on"
        )
    values["factor"] = float(factor_to(target, trained))
    if values["length"] is None:
        values["length"] = min(trained, _LONGEST_ROW)
    if "minimum_document" not in typed and values["format"] != CHAT:
        values["minimum_document"] = values["length"] // 2


def calibrated(recipe: Recipe) -> Recipe:
    """Replace the path of a calibration file in the recipe by the options in it.

    Options that equal the published default are left out.

    Raises:
        RopeExtError: the file cannot be read, or is for another method or factor.
    """
    path = recipe.method_options or ""
    if not path.endswith(".json"):
        return recipe
    found = {choice.method.name: choice.method for choice in Calibration.load(path).choices}
    method = found.get(recipe.method if recipe.method == NONE else method_class(recipe.method).name)
    if method is None:
        raise OptionError(
            f"--method_options {path} calibrates {', '.join(found)}, not --method {recipe.method}; "
            f"give --method one of those, or calibrate {recipe.method}"
        )
    if method.factor != recipe.factor:
        raise OptionError(
            f"--method_options {path} was calibrated for factor {method.factor:g}, and --factor is "
            f"{recipe.factor:g}; give --factor {method.factor:g}, or calibrate for the target"
        )
    published = method_to_json(type(method)(factor=method.factor))
    options = {k: v for k, v in method_to_json(method).items() if published[k] != v}
    return replace(recipe, method_options=json.dumps(options))


def _training_arguments(values: Mapping[str, Any], mistakes: Mistakes) -> Any:
    options = {option.name: option for option in fields(TrainingArguments) if option.init}
    given = {name: values[name] for name in options}
    supported = dict(given)
    mistakes.add_all(unsupported(supported))
    # TrainingArguments stops at its first error, so mistakes that are already recorded are not
    # passed on.
    for name in out_of_range(given):
        supported[name] = options[name].default
    plain = argparse.Namespace(**given, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    try:
        args = TrainingArguments(**supported)
    except Exception as error:  # transformers, accelerate and DeepSpeed raise many kinds
        mistakes.add(f"transformers rejects these settings: {first_line(error)}")
        return plain
    return args if supported == given else plain


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML silently uses the last, and aliases.

    Aliases of aliases make a file of a kilobyte a value of gigabytes.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1
            raise yaml.YAMLError(f"line {line} has an alias (*name); write out its value")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            line = key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(
                    f"{name!r} is given twice, in lines {lines[name]} and {line}; remove one of "
                    f"them"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


def _words(file: str, names: set[str], mistakes: Mistakes) -> list[str]:
    """Convert a YAML file to command-line arguments."""
    try:
        if os.path.getsize(file) > _MOST_BYTES:
            raise OptionError(f"--config {file} has more than 1 MB; give a file of settings")
        values = yaml.load(Path(file).read_text(encoding="utf-8"), _Loader)
    except (OSError, TypeError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise OptionError(f"cannot read --config {file}: {reason}") from None
    if not isinstance(values, dict):
        raise OptionError(f"--config {file} must hold lines of the form `name: value`")
    words = []
    for name, value in values.items():
        if name not in names:
            near = nearest(str(name), names) or "; see --help"
            mistakes.add(f"{file}: unknown setting {name!r}{near}")
            continue
        many = value if isinstance(value, list) else [value]
        # YAML reads an unquoted `no` as false.
        many = ["no" if v is False and name.endswith("_strategy") else v for v in many]
        shown = [json.dumps(v) if isinstance(v, dict) else str(v) for v in many]
        words += [] if value is None else [f"--{name}", *shown]
    return words


def method_of(recipe: Recipe) -> Any:
    """The method object; None for no patch.

    Raises:
        RopeExtError: the method is unknown, or an option is not valid.
    """
    if not recipe.factor > 1:
        raise OptionError(
            f"--factor {recipe.factor:g} does not extend the trained length; give a number above 1"
        )
    try:
        more = read_json(recipe.method_options or "{}")
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
        raise OptionError(
            "--method_options needs a method, but --method is none; remove one of them"
        )
    return None


def check_together(recipe: Recipe, args: Any, mistakes: Mistakes | None = None) -> None:
    """Find settings that are missing or incompatible.

    Args:
        recipe: the recipe.
        args: TrainingArguments, or an object with the same attributes.
        mistakes: records all errors; None raises them.

    Raises:
        OptionError: lists all errors.
    """
    found = Mistakes() if mistakes is None else mistakes
    for name in ("model", "dataset", "length"):
        if getattr(recipe, name) is None and not (name == "dataset" and recipe.datasets):
            found.add(f"--{name} is missing; give it in the recipe or on the command line")
    method = None
    with found.collected():
        method = method_of(recipe)
    found.add_all(not_installed(vars(args)))
    found.add_all(unusable_optimizer(args))
    found.add_all(_of_lora(recipe, args))
    found.add_all(_of_method(recipe, method))
    found.add_all(_of_attention(recipe))
    if recipe.length is not None:
        found.add_all(_of_rows(recipe, args))
        if separates(recipe) and not (method and method.replaces_attention):
            found.add_all(_of_masking(recipe, args))
    if args.eval_strategy != "no":
        found.add_all(_of_evaluation(recipe))
        with found.collected():
            require_matplotlib()
    if recipe.chunked_loss and (args.use_liger_kernel or args.label_smoothing_factor):
        found.add(
            "--chunked_loss replaces the loss and has no label smoothing; leave "
            "--use_liger_kernel and --label_smoothing_factor out, or give --chunked_loss false"
        )
    if mistakes is None:
        found.report()


def _of_lora(recipe: Recipe, args: Any) -> Iterator[str]:
    """Errors about LoRA and the dtype of weights."""
    for name in ("quantize", "train_embeddings_and_norms", "loraplus_ratio", "restoration"):
        if recipe.lora_r == 0 and getattr(recipe, name):
            yield f"--{name} needs LoRA; set --lora_r 8, or remove it"
    yield from _of_restoration(recipe)
    if recipe.dtype not in ("float32", "bfloat16"):
        yield f"--dtype {recipe.dtype!r} is not valid; give float32 or bfloat16"
    if recipe.dtype == "bfloat16" and recipe.lora_r and not args.bf16:
        yield (
            "--dtype bfloat16 keeps frozen weights in bfloat16 and trained ones in float32, which "
            "needs autocast; also give --bf16 true, or give --dtype float32"
        )
    if recipe.dtype == "bfloat16" and not recipe.lora_r:
        yield (
            "--lora_r 0 trains all weights, and in --dtype bfloat16 most updates would be rounded "
            "away; give --dtype float32, with --bf16 true to compute in bfloat16"
        )
    yield from _of_quantization(recipe)
    yield from _of_lora_options(recipe)
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    if _in_eight_bits(recipe) and on_cpu and _use_dora(recipe):
        yield (
            "--lora_options use_dora does not work on weights of 8 bits on a CPU: bitsandbytes "
            "loses their scales in the second step; give --quantize_bits 4, or leave use_dora out"
        )


def _of_restoration(recipe: Recipe) -> Iterator[str]:
    """Errors about the loss that restores the original model at short lengths."""
    if not 0 <= recipe.restoration < math.inf:  # also catches NaN
        yield (
            f"--restoration {recipe.restoration:g} is not valid; it is the weight of a loss, such "
            f"as 5, or 0"
        )
    if recipe.restoration and recipe.method == NONE:
        yield "--restoration needs a method to restore from, but --method is none; remove one"


def _of_quantization(recipe: Recipe) -> Iterator[str]:
    """Errors about quantized weights."""
    if recipe.quantize:
        yield from missing("--quantize", "bitsandbytes", "give --quantize false")
    if recipe.quantize_bits not in (4, 8):
        yield f"--quantize_bits {recipe.quantize_bits} is not valid; give 4 or 8"
    if _in_eight_bits(recipe) and sharded_by():
        yield (
            f"--quantize_bits 8 does not work with {sharded_by()}, which cannot shard its weights; "
            f"give --quantize_bits 4, or launch with recipes/accelerate/ddp.yaml or single.yaml"
        )


def _in_eight_bits(recipe: Recipe) -> bool:
    return recipe.quantize and recipe.quantize_bits == 8


def _use_dora(recipe: Recipe) -> bool:
    with contextlib.suppress(OptionError):  # reported with the other options
        return bool(lora_options(recipe).get("use_dora"))
    return False


def lora_options(recipe: Recipe) -> dict[str, Any]:
    """The options of ``peft.LoraConfig`` in a recipe.

    Raises:
        OptionError: they are not valid, or set by another setting.
    """
    try:
        given = read_json(recipe.lora_options or "{}")
        if not isinstance(given, dict):
            raise ValueError("it holds no names")
    except ValueError as error:
        raise OptionError(
            f"--lora_options {recipe.lora_options!r} is not valid ({error}); give JSON such as "
            f"'{{\"use_dora\": true}}'"
        ) from None
    names = {option.name for option in fields(LoraConfig) if option.init} - set(_LORA_SETTINGS)
    for name in given:
        if name in _LORA_SETTINGS:
            raise OptionError(
                f"--lora_options {name!r} is a setting of its own; give --{_LORA_SETTINGS[name]}"
            )
        if name not in names:
            near = nearest(name, names) or ";"
            raise OptionError(f"--lora_options: peft.LoraConfig has no {name!r}{near} see its help")
    return given


_LORA_SETTINGS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target",
    "modules_to_save": "train_embeddings_and_norms",
    "ensure_weight_tying": "train_embeddings_and_norms",
    "task_type": "model",
    "base_model_name_or_path": "model",
}
"""Options of ``peft.LoraConfig`` that other settings decide, and these settings."""
_BIASES = ("none", "all", "lora_only")
_INITS = (True, False, "gaussian", "orthogonal")
_OF_WEIGHTS = ("pissa", "olora")
"""Initial values of LoRA that move a part of the base weights into it; peft does it again when the
adapter is loaded, which gives the same weights only if nothing is random or rounded."""


def _of_lora_options(recipe: Recipe) -> Iterator[str]:
    """Errors about options of PEFT that would not survive saving and loading."""
    try:
        options = lora_options(recipe)
    except OptionError as error:
        yield str(error)
        return
    if options and (recipe.lora_r == 0 or recipe.lora_target == [NONE]):
        yield "--lora_options needs LoRA; set --lora_r 8 and --lora_target, or remove it"
    if options.get("bias", _BIASES[0]) not in _BIASES:
        yield (
            f"--lora_options bias {options['bias']!r} is not valid; give one of "
            f"{', '.join(_BIASES)}"
        )
    init = options.get("init_lora_weights", True)
    if init not in (*_INITS, *_OF_WEIGHTS):
        yield (
            f"--lora_options init_lora_weights {init!r} is not supported: peft needs data or a "
            f"preparation for it, or cannot repeat it when the adapter is loaded; give one of "
            f"{', '.join(map(str, (*_INITS, *_OF_WEIGHTS)))}"
        )
    if init in _OF_WEIGHTS and (recipe.quantize or recipe.restoration or recipe.dtype != "float32"):
        yield (
            f"--lora_options init_lora_weights {init!r} changes the base weights, so it needs "
            f"--dtype float32, without --quantize and --restoration; give these, or leave it out"
        )


def _of_method(recipe: Recipe, method: Any) -> Iterator[str]:
    """Errors about methods whose frequencies depend on the rows, and about initial parameters."""
    yield from _not_among("init", recipe.init, INITS)
    if recipe.init == "model" and not can_fit(method):
        yield (
            f"--init model fits what an encoding learns, and {recipe.method} learns nothing in the "
            f"layers that could take the place of the rotation; give --init default, or one of "
            f"{', '.join(supported())}, or alibi with --method_options learned true"
        )
    if recipe.lora_target == [NONE] and not (_learns(method) or recipe.train_embeddings_and_norms):
        yield (
            f"--lora_target none trains what the method learns alone, and --method {recipe.method} "
            f'learns nothing; give --method_options \'{{"temperature": "ssmax"}}\', or names of '
            f"linear layers"
        )
    if getattr(method, "mode", None) == "growing":
        yield (
            f"{method.name} with mode='growing' depends on the order of the training rows; give "
            f"--method_options mode 'fixed'"
        )
    if recipe.positions == "random_floats" and not _takes_fractions(method):
        yield (
            f"--positions random_floats needs fixed frequencies, and {method.name} counts whole "
            f"tokens; give --positions random, or a frequency method such as yarn"
        )
    if recipe.document_masking and method is not None and method.is_dynamic:
        yield (
            f"{method.name} chooses one set of frequencies per row, but with --document_masking "
            f"each document has its own length; give --method_options a fixed 'length', or leave "
            f"--document_masking out"
        )


def _learns(method: Any) -> bool:
    """Whether the method learns parameters, or its temperature does."""
    if method is None or isinstance(method.chosen_temperature, SSMax):
        return method is not None
    if isinstance(method, InputEncoding):
        return type(method).initial_inputs is not InputEncoding.initial_inputs
    return can_fit(method) or (isinstance(method, Encoding) and method.computes_positions())


def _takes_fractions(method: Any) -> bool:
    """Whether the method accepts fractional positions."""
    return method is None or (isinstance(method, FrequencyMethod) and not method.is_dynamic)


def _of_attention(recipe: Recipe) -> Iterator[str]:
    """Errors about unknown attention implementations; names with a / come from the Hub."""
    known = {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    if recipe.attn is not None and recipe.attn not in known and "/" not in recipe.attn:
        near = nearest(recipe.attn, known) or ";"
        yield (
            f"--attn {recipe.attn!r} is not valid{near} give one of transformers', such as sdpa, "
            f"eager, flex_attention or flash_attention_2"
        )


def _of_rows(recipe: Recipe, args: Any) -> Iterator[str]:
    """Errors about incompatible settings of the data and rows."""
    yield from _not_among("positions", recipe.positions, POSITIONS)
    yield from _not_among("rows", recipe.rows, ROWS)
    yield from _of_chat(recipe, args)
    yield from _not_among("bad_files", recipe.bad_files, (SKIP, STOP))
    kinds = {recipe.rows}
    try:
        kinds = {part.rows for part in parts(recipe)}
    except OptionError as error:
        yield str(error)
    yield from _of_reading(recipe, args)
    yield from _of_positions(recipe)
    yield from _of_documents(recipe, kinds)
    yield from _of_retrieval(recipe, args)
    if scheme_of(recipe) == "pose_released":
        mixed = recipe.rows in MIXED_ROWS
        if mixed or kinds != {"document"}:
            shown = recipe.rows if mixed else ", ".join(sorted(kinds))
            yield (
                f"--positions pose_released takes its chunks from a single document, unlike --rows "
                f"{shown}; give --positions pose, or leave --rows out"
            )


def _of_reading(recipe: Recipe, args: Any) -> Iterator[str]:
    """Errors about data without an end, and about processes that read it."""
    endless = None
    if recipe.streaming:
        endless = "--streaming"
    elif recipe.datasets:
        endless = "--datasets"
    if endless and args.max_steps == -1:
        yield f"{endless} has no end; set --max_steps"
    if endless and args.dataloader_num_workers > 1:
        yield (
            f"{endless} supports at most one worker, and --dataloader_num_workers is "
            f"{args.dataloader_num_workers}; give 1, or 0 so that a resumed run does not read data "
            f"again"
        )
    if args.dataloader_persistent_workers:
        yield "--dataloader_persistent_workers repeats the rows of the first epoch; leave it out"


def _of_positions(recipe: Recipe) -> Iterator[str]:
    """Errors about options of PoSE and of mixed windows."""
    scheme = scheme_of(recipe)
    if recipe.pose_chunks and not 2 <= recipe.pose_chunks <= length_of(recipe):
        yield (
            f"--pose_chunks {recipe.pose_chunks} is not valid; give 0 (no PoSE), or from 2 to "
            f"--length {recipe.length}"
        )
    if recipe.pose_chunks and scheme != "pose":
        yield f"--pose_chunks needs --positions pose, not {scheme}; remove one of them"
    if scheme == "mixed_windows" and not 0 < recipe.short_share < 1:  # also catches NaN
        yield (
            f"--short_share {recipe.short_share:g} is not valid; it is a share of the rows, above "
            f"0 and below 1, such as 0.3"
        )


def _of_documents(recipe: Recipe, kinds: set[str]) -> Iterator[str]:
    """Errors about masked documents in rows of these kinds."""
    if not recipe.document_masking:
        return
    scheme = scheme_of(recipe)
    if scheme != "consecutive":
        yield (
            f"--document_masking separates documents by their positions, which --positions "
            f"{scheme} changes; leave one of them out"
        )
    elif "packed" not in kinds or not kinds <= {"packed", "chunked"}:
        shown = ", ".join(sorted(kinds - {"packed"}))
        yield (
            f"--document_masking needs rows with several documents, which --rows {shown} does not "
            f"make; leave one of them out"
        )


def _of_retrieval(recipe: Recipe, args: Any) -> Iterator[str]:
    """Errors about the share of rows with facts and questions."""
    scheme = scheme_of(recipe)
    separated = recipe.document_masking or scheme in ("pose_released", "mixed_windows")
    if not 0 <= recipe.retrieval_share <= 1:  # also catches NaN
        yield (
            f"--retrieval_share {recipe.retrieval_share:g} is not valid; it is a share of the "
            f"rows, from 0 to 1, such as 0.1"
        )
    elif recipe.retrieval_share and (args.use_liger_kernel or args.label_smoothing_factor):
        yield (
            "--retrieval_share weights the loss of labels, which --use_liger_kernel and "
            "--label_smoothing_factor do not support; leave them out, or give --retrieval_share 0"
        )
    elif recipe.retrieval_share and separated:
        other = "--document_masking" if recipe.document_masking else f"--positions {scheme}"
        yield (
            f"--retrieval_share puts facts and questions into one row, and {other} could separate "
            f"them; leave one of them out"
        )


def _of_chat(recipe: Recipe, args: Any) -> Iterator[str]:
    """Errors about settings that conversations do not support."""
    yield from _not_among("format", recipe.format, FORMATS)
    try:
        chats = [part for part in parts(recipe) if part.format == CHAT]
    except OptionError:  # reported with the other settings of rows
        return
    if not chats:
        return
    released = scheme_of(recipe) == "pose_released"  # which sets the rows itself
    if not released and any(part.rows != "packed" for part in chats):
        yield "--format chat puts whole conversations into rows; leave --rows out"
    if scheme_of(recipe) in ("pose_released", "mixed_windows"):
        yield (
            f"--positions {scheme_of(recipe)} cuts rows, and with --format chat answers would lose "
            f"their questions; give --positions pose"
        )
    if args.eval_strategy != "no" and recipe.eval_dataset is None:
        yield (
            "--eval_strategy evaluates on text, and --format chat has none; give --eval_dataset "
            "documents, or leave --eval_strategy out"
        )
    if recipe.init == "model":
        yield "--init model fits to text, and --format chat has none; give --init default"


def _of_masking(recipe: Recipe, args: Any) -> Iterator[str]:
    """Errors about packed documents that would attend to each other, or whose mask is too large."""
    rows = args.per_device_train_batch_size
    size = mask_bytes(recipe, args, length_of(recipe))
    option = "--document_masking" if recipe.document_masking else "--positions mixed_windows"
    if size > _LARGEST_MASK:
        yield (
            f"{option} with --attn {recipe.attn or 'sdpa'} needs a mask of --length x "
            f"--length for each row, {size / 2**30:.1f} GiB, and rules out fast kernels; give "
            f"--attn flex_attention, --attn flash_attention_2 with one row per device, a --length "
            f"of at most {math.isqrt(_LARGEST_MASK // rows)}, or leave it out"
        )
    if "flash" in (recipe.attn or "") and rows > 1:
        yield (
            f"{option} with --attn {recipe.attn} supports one row at a time; give "
            f"--per_device_train_batch_size 1 and --gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps * rows}, or --attn flex_attention"
        )


def _of_evaluation(recipe: Recipe) -> Iterator[str]:
    """Errors about evaluation settings."""
    for name, least in (("eval_rows", 1), ("eval_passkeys", 0), ("eval_length", 2)):
        value = getattr(recipe, name)
        if value is not None and value < least:
            yield f"--{name} {value} is not valid; it must be {least} or more"
    if recipe.datasets and recipe.eval_dataset is None:
        yield (
            "--eval_strategy with --datasets needs --eval_dataset, since evaluation rows come from "
            "a single dataset"
        )


def warn_of_gaps(recipe: Recipe, method: Any) -> None:
    """Warn that positions with gaps are slow for methods with their own attention function."""
    scheme = scheme_of(recipe)
    if method is not None and method.replaces_attention and scheme not in LONG_ROWS:
        warnings.warn(
            f"{method.name} has fast kernels for consecutive positions only; --positions {scheme} "
            f"leaves gaps, so every layer uses dense attention: exact, in linear memory, but "
            f"several times slower. Give --positions consecutive, or a frequency method such as "
            f"yarn",
            stacklevel=2,
        )


def _not_among(name: str, value: str, choices: Sequence[str]) -> Iterator[str]:
    if value not in choices:
        near = nearest(value, set(choices)) or ";"
        yield f"--{name} {value!r} is not valid{near} give one of {', '.join(choices)}"


def length_of(recipe: Recipe) -> int:
    """Tokens of a row, of a recipe in which :func:`check_together` found nothing missing."""
    return not_none(recipe.length)


def output_of(args: TrainingArguments) -> Path:
    """The output directory; without one, TrainingArguments has chosen a name."""
    return Path(not_none(args.output_dir))


def scheme_of(recipe: Recipe) -> str:
    """The scheme of positions; ``pose_chunks`` alone implies PoSE."""
    plain = recipe.positions == "consecutive"
    return "pose" if plain and recipe.pose_chunks else recipe.positions


def separates(recipe: Recipe) -> bool:
    """Whether attention between parts of a row is masked."""
    return recipe.document_masking or recipe.positions == "mixed_windows"


def rows_of(recipe: Recipe) -> str:
    """The kind of rows; PoSE's code makes each row from one document."""
    return "document" if recipe.positions == "pose_released" else recipe.rows


@dataclass(frozen=True)
class Part:
    """One dataset of a recipe; fields as in :class:`Recipe`."""

    dataset: str
    weight: float = 1.0
    config: str | None = None
    split: str = "train"
    column: str = "text"
    rows: str = "packed"
    minimum_document: int = 0
    format: str = TEXT


def parts(recipe: Recipe) -> list[Part]:
    """The datasets of a recipe.

    Raises:
        OptionError: a mixture is not valid, or combined with ``dataset``.
    """
    if not recipe.datasets:
        return [
            Part(
                dataset=recipe.dataset or "",
                weight=1.0,
                config=recipe.dataset_config,
                split=recipe.dataset_split,
                column=recipe.text_column,
                rows=rows_of(recipe),
                minimum_document=recipe.minimum_document,
                format=recipe.format,
            )
        ]
    if recipe.dataset is not None:
        raise OptionError("--dataset and --datasets cannot be combined; remove one of them")
    found = [_part(text, recipe) for text in recipe.datasets]
    total = sum(part.weight for part in found)
    if abs(total - 1) > 1e-6:
        shown = " + ".join(f"{part.weight:g}" for part in found)
        raise OptionError(
            f"the weights of --datasets are shares of the rows, and {shown} = {total:g}; give "
            f"weights whose sum is 1"
        )
    return found


def _part(text: str, recipe: Recipe) -> Part:
    """Read one dataset of --datasets; raises OptionError, naming what is wrong."""
    given = _entry(text)
    chat = given.get("format", recipe.format) == CHAT
    part = Part(
        **{
            "column": recipe.text_column,
            "rows": rows_of(recipe),
            "format": recipe.format,
            # Short conversations are used, unless this dataset says otherwise.
            "minimum_document": 0 if chat else recipe.minimum_document,
            **given,
        }
    )
    for fault in _of_part(part):
        raise OptionError(f"--datasets {text}: {fault}")
    return part


def _entry(text: str) -> dict[str, Any]:
    """The names and values of one entry of --datasets; raises OptionError for unknown names."""
    try:
        given = read_json(text)
        if not isinstance(given, dict):
            raise ValueError("it holds no names")
    except ValueError as error:
        raise OptionError(
            f"--datasets {text!r} is not valid ({error}); give JSON such as "
            f'\'{{"dataset": "books/", "weight": 0.3}}\''
        ) from None
    names = {option.name for option in fields(Part)}
    for name in given:
        if name not in names:
            near = nearest(str(name), names) or f"; it must be one of {', '.join(sorted(names))}"
            raise OptionError(f"--datasets {text}: unknown name {name!r}{near}")
    # The default weight is that of a recipe with a single dataset.
    for name in ("dataset", "weight"):
        if name not in given:
            raise OptionError(f"--datasets {text}: {name} is missing; give it")
    return given


def _of_part(part: Part) -> Iterator[str]:
    """What is wrong with the values of one dataset; types first, on which the others rely."""
    for name, kinds in _OF_PART.items():
        value = getattr(part, name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            yield f"{name} {value!r} is not valid"
            return
    for name, choices in (("rows", ROWS), ("format", FORMATS)):
        for message in _not_among(name, getattr(part, name), choices):
            yield message.removeprefix("--")
    if part.minimum_document < 0:
        yield f"minimum_document {part.minimum_document} is not valid; it must be 0 or more"
    if not 0 < part.weight <= 1:  # also catches NaN
        yield (
            f"weight {part.weight:g} is not valid; it is a share of the rows, above 0 and at most 1"
        )


_OF_PART: dict[str, Any] = {
    "dataset": str,
    "weight": (int, float),
    "config": str | None,
    "split": str,
    "column": str,
    "rows": str,
    "minimum_document": int,
    "format": str,
}


def mask_bytes(recipe: Recipe, args: TrainingArguments, length: int) -> int:
    """Size of the mask between packed documents; 0 if the kernel needs no mask."""
    if not separates(recipe) or getattr(method_of(recipe), "replaces_attention", False):
        return 0
    matrix = recipe.attn in (None, "sdpa", "eager")
    return args.per_device_train_batch_size * length**2 if matrix else 0


def decisive(recipe: Recipe, args: TrainingArguments) -> dict[str, Any]:
    """All settings that affect the results of a run, as JSON."""
    values = {name: getattr(args, name) for name in _DECISIVE}
    # As a file returns it, with lists for tuples, so that the two can be compared.
    return json.loads(json.dumps({**asdict(recipe), **values}, default=str))


def check_output(recipe: Recipe, args: TrainingArguments) -> None:
    """Determine where to resume; raise OptionError if the directory belongs to another run."""
    folder = output_of(args)
    _require_writable(folder)
    _refuse_links(folder)
    last = _last_checkpoint(folder, args)
    resume_from = args.resume_from_checkpoint
    if resume_from is None or resume_from.lower() == "false":
        args.resume_from_checkpoint = None
        _refuse_results(folder, last)
        return
    from_last = resume_from.lower() == "true"
    _check_devices(args, folder if from_last else Path(resume_from).parent)
    if from_last:
        args.resume_from_checkpoint = None if last is None else str(last)
        if last is None and _checkpoints(folder):  # killed while writing the first checkpoint
            return
    elif not _whole(Path(resume_from), args):
        args.resume_from_checkpoint = None
    if args.resume_from_checkpoint is None:
        where = f"in {folder}" if from_last else resume_from
        raise OptionError(
            f"there is no checkpoint to resume from ({where}); leave --resume_from_checkpoint out, "
            f"or give a complete checkpoint such as {folder}/checkpoint-100"
        )
    if args.save_only_model and finished(args) is None:
        raise OptionError(
            f"{args.resume_from_checkpoint} holds no state of the optimizer (--save_only_model), "
            f"so the run cannot be resumed; train again in another --output_dir"
        )
    _refuse_other_settings(recipe, args)


def _require_writable(folder: Path) -> None:
    """Raise OptionError if the output directory cannot be made or written to."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "cannot be written to" if there.is_dir() else "is not a directory"
        raise OptionError(f"--output_dir {folder}: {there} {what}; give another --output_dir")


def _refuse_results(folder: Path, last: Path | None) -> None:
    """Raise OptionError if a new run would write over a checkpoint, a model or a tokenizer."""
    kinds = (*_OF_MODELS, *_OF_TOKENIZERS)
    file = next((file for kind in kinds for file in sorted(folder.glob(kind))), last)
    if file is not None:
        fix = "another --output_dir"
        if last is not None:
            fix += f", or --resume_from_checkpoint true to resume from {last.name}"
        raise OptionError(
            f"{folder} contains the results of a run or a model ({file.name}); give {fix}"
        )


def _refuse_other_settings(recipe: Recipe, args: TrainingArguments) -> None:
    """Raise OptionError if the run to resume had other settings that affect its results."""
    for run, before in _settings_before(args):
        now = decisive(recipe, args)
        # Settings newer than the run have their default.
        newer = {"eval_strategy": "no", "label_smoothing_factor": 0.0}
        # Runs did not record these, so whatever they had is taken to be as now.
        newer |= {name: now[name] for name in ("train_sampling_strategy", "dataloader_drop_last")}
        before = asdict(Recipe()) | newer | before
        changed = [f"{k} {before.get(k)!r} -> {now[k]!r}" for k in now if before.get(k) != now[k]]
        if changed:
            raise OptionError(
                f"{run} belongs to a run with other settings ({', '.join(changed)}); use the "
                f"same settings to resume it, or give another --output_dir"
            )


def _refuse_links(folder: Path) -> None:
    """Raise OptionError for a link or pipe in a run's directory, which may come from elsewhere."""
    # Trainer opens files by name and follows links, to wherever the sender of the directory wants.
    for path in (*folder.glob("*"), *folder.glob("checkpoint-*/*")):
        written = not path.is_dir() or path.name.startswith("checkpoint-")
        if written and (path.is_symlink() or not (path.is_file() or path.is_dir())):
            raise OptionError(
                f"{path} is a symbolic link, through which the run would write, or not a regular "
                f"file; remove it, or give another --output_dir"
            )


def _check_devices(args: TrainingArguments, run: Path) -> None:
    """Refuse another number of processes, for which no checkpoint of ``run`` looks complete."""
    for folder, before in _settings_of({run}):
        devices = before.get("world_size", args.world_size)
        if devices != args.world_size and _checkpoints(folder):
            raise OptionError(
                f"{folder} belongs to a run on {devices} devices, and this one has "
                f"{args.world_size}: checkpoints hold the random state of each device, and a step "
                f"has other rows; launch with --num_processes {devices} to resume it, or train its "
                f"model on in another --output_dir (merge an adapter first, with recipes/merge.py)"
            )


def check_data(args: TrainingArguments, digests: list[str], template: str | None = None) -> None:
    """Refuse to resume a run on other data.

    Args:
        args: arguments of the run.
        digests: hash of each dataset.
        template: hash of the chat template of a run on conversations.

    Raises:
        OptionError: the data, or what the chat template makes of it, is not that of the run.
    """
    if args.resume_from_checkpoint is None:
        return
    for run, before in _settings_before(args):
        if before.get(DIGESTS, digests) != digests:  # older runs have none
            raise OptionError(
                f"{run} belongs to a run on other training data: files or documents have changed "
                f"since; give it the same data to resume it, or give another --output_dir"
            )
        if before.get(TEMPLATE, template) != template:
            raise OptionError(
                f"{run} belongs to a run with another chat template, which makes other rows of the "
                f"same conversations; give --model the tokenizer with that template to resume it, "
                f"or give another --output_dir"
            )


def _settings_before(args: TrainingArguments) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The directories of the run to resume, with their settings."""
    checkpoint = Path(not_none(args.resume_from_checkpoint))
    yield from _settings_of({output_of(args), checkpoint.parent})


def _settings_of(folders: set[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for folder in folders:
        if not (folder / SETTINGS).exists():
            continue
        try:
            yield folder, dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise OptionError(
                f"cannot read {folder / SETTINGS} ({error}), so the settings that {folder} was "
                f"started with are unknown; delete it to resume with the current settings, or give "
                f"another --output_dir"
            ) from None


def write_settings(
    recipe: Recipe, args: TrainingArguments, digests: list[str], template: str | None = None
) -> None:
    """Save the settings that a resumed run is compared with, and hashes of its data, atomically."""
    folder = output_of(args)
    folder.mkdir(parents=True, exist_ok=True)
    hashes = {DIGESTS: digests} | ({} if template is None else {TEMPLATE: template})
    text = json.dumps(decisive(recipe, args) | hashes, indent=1) + "\n"
    with draft_of(folder / SETTINGS) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def finished(args: TrainingArguments) -> Path | None:
    """The checkpoint whose model is the result, if training is already finished."""
    if args.resume_from_checkpoint is None:
        return None
    checkpoint = Path(args.resume_from_checkpoint)
    state = _state(checkpoint) or {}
    steps = args.max_steps if args.max_steps > 0 else state.get("max_steps", 0)
    best = args.load_best_model_at_end and state.get("best_model_checkpoint")
    # By its name: the state has the path as it was, and the run may have been moved.
    result = checkpoint.parent / Path(best).name if best else checkpoint
    return result if 0 < steps <= state.get("global_step", 0) else None


def how_to_resume(args: TrainingArguments) -> str:
    """How to continue a run that was stopped."""
    last = _last_checkpoint(output_of(args), args)
    if last is None:
        return "there is no checkpoint yet; run the same command to start again"
    return f"run the same command with --resume_from_checkpoint true to continue from {last.name}"


def save_from(checkpoint: Path, folder: Path) -> None:
    """Copy the model of a checkpoint to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(checkpoint.iterdir()):
        there = folder / file.name
        if not file.is_file() or file.name.startswith(_RESUME_FILES):
            continue
        # A finished run may be called again, and leaves its files as they are.
        if there.exists() and filecmp.cmp(file, there, shallow=False):
            continue
        with draft_of(there) as unfinished:
            shutil.copyfile(file, unfinished)


def _checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, complete or not, the latest first."""
    found = [f for f in folder.glob("checkpoint-*") if f.name.split("-", 1)[1].isdecimal()]
    return sorted(found, key=lambda f: -int(f.name.split("-")[1]))


def _last_checkpoint(folder: Path, args: TrainingArguments) -> Path | None:
    """The latest complete checkpoint; a killed run may leave an incomplete one."""
    return next((found for found in _checkpoints(folder) if _whole(found, args)), None)


def _state(checkpoint: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        kinds = {"global_step": int, "max_steps": int, "best_model_checkpoint": str | None}
        defaults = {"max_steps": 0}
        if isinstance(state, dict) and all(
            isinstance(state.get(name, defaults.get(name)), kind) for name, kind in kinds.items()
        ):
            return state
    return None


def _whole(checkpoint: Path, args: TrainingArguments) -> bool:
    """Whether all processes of the run finished writing a checkpoint.

    The first process writes the trainer state last, and each process writes the state of its random
    generators last.
    """
    if _state(checkpoint) is None:
        return False
    ranks = [""] if args.world_size == 1 else [f"_{rank}" for rank in range(args.world_size)]
    if not args.save_only_model and not all(
        (checkpoint / f"rng_state{rank}.pth").is_file() for rank in ranks
    ):
        return False
    for file in checkpoint.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt"):  # checks the file size
                pass
        except (OSError, SafetensorError):
            return False
    return True
