"""Finds settings that are out of range or unsupported on this machine."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments, training_args
from transformers.integrations import integration_utils
from transformers.training_args import OptimizerNames

from rope_ext.errors import first_line

Rule = tuple[Callable[[Any], bool], str]


def at_least(least: float) -> Rule:
    """Rule for numbers of at least ``least``."""
    return lambda value: least <= value < math.inf, f"{least:g} or more"


POSITIVE: Rule = (lambda value: 0 < value < math.inf, "a number above 0")
_BELOW_ONE: Rule = (lambda value: 0 <= value < 1, "at least 0 and below 1")
SEED: Rule = (lambda value: 0 <= value < 2**32, "from 0 to 4294967295")
INTERVAL: Rule = (
    lambda value: 0 < value < 1 or (value >= 1 and value == int(value)),
    "a number of steps, 1 or more, or a share of all steps between 0 and 1",
)

RULES: dict[str, Rule] = {
    "length": at_least(2),
    "original_max_position_embeddings": at_least(1),
    "minimum_document": at_least(0),
    "lora_r": at_least(0),
    "lora_alpha": at_least(1),
    "lora_dropout": _BELOW_ONE,
    "loraplus_ratio": POSITIVE,
    "temperature_lr": POSITIVE,
    "per_device_train_batch_size": at_least(1),
    "per_device_eval_batch_size": at_least(1),
    "gradient_accumulation_steps": at_least(1),
    "eval_accumulation_steps": at_least(1),
    "max_steps": (lambda value: value == -1 or value >= 1, "1 or more, or -1 to train by epochs"),
    "num_train_epochs": POSITIVE,
    "learning_rate": at_least(0),  # 0: the adapter before training, for comparison
    "weight_decay": at_least(0),
    "adam_beta1": _BELOW_ONE,
    "adam_beta2": _BELOW_ONE,
    "adam_epsilon": POSITIVE,
    "max_grad_norm": at_least(0),
    "warmup_steps": at_least(0),
    "label_smoothing_factor": _BELOW_ONE,
    "neftune_noise_alpha": at_least(0),
    "logging_steps": INTERVAL,
    "save_steps": INTERVAL,
    "eval_steps": INTERVAL,
    "eval_delay": at_least(0),
    "save_total_limit": (lambda value: value >= 1, "1 or more; leave it out to keep all"),
    "torch_empty_cache_steps": at_least(1),
    "seed": SEED,
    "data_seed": SEED,
    "dataloader_num_workers": at_least(0),
    "dataloader_prefetch_factor": at_least(1),
    "ddp_timeout": at_least(1),
}
"""Rules for the numeric settings of recipes/finetune.py: a check and its description in errors."""


def out_of_range(
    values: Mapping[str, Any], rules: Mapping[str, Rule] = RULES, separator: str = "_"
) -> dict[str, str]:
    """Find values that are out of range.

    Args:
        values: option values by name; None is skipped.
        rules: rules by name.
        separator: separator of the words of an option on the command line.

    Returns:
        Error messages by name.
    """
    found = {}
    for name, (valid, words) in rules.items():
        value = values.get(name)
        # A number of steps has no effect if its strategy is "no".
        strategy = name.removesuffix("steps") + "strategy"
        if value is None or (name.endswith("_steps") and values.get(strategy) == "no"):
            continue
        if not (math.isfinite(value) and valid(value)):
            option = name.replace("_", separator)
            found[name] = f"--{option} {value:.16g} is not valid; it must be {words}"
    return found


def unsupported(values: dict[str, Any]) -> Iterator[str]:
    """Error messages for settings that this machine does not support.

    These settings are removed from ``values``, because TrainingArguments would raise an error only
    for the first one, without saying how to fix it.
    """
    on_cpu = values.get("use_cpu")
    if values.get("bf16") and not on_cpu and not training_args.is_torch_bf16_gpu_available():
        values["bf16"] = False
        yield (
            "--bf16 true needs a GPU with bfloat16 support, and none was found; give --use_cpu "
            "true to train on the CPU, or --bf16 false --dtype float32"
        )
    config = values.get("deepspeed")
    if config and importlib.util.find_spec("deepspeed") is None:
        values["deepspeed"] = None
        yield from missing(f"--deepspeed {config}", "DeepSpeed", "leave --deepspeed out")
    elif isinstance(config, str) and not config.startswith("{") and not Path(config).is_file():
        values["deepspeed"] = None
        yield f"--deepspeed {config} is not a file; give the path of a DeepSpeed configuration"


def not_installed(values: Mapping[str, Any]) -> Iterator[str]:
    """Error messages for settings whose package is missing, which Trainer reports only later."""
    given = values.get("report_to") or []
    available = integration_utils.get_available_reporting_integrations()
    for name in [given] if isinstance(given, str) else given:
        if name in integration_utils.INTEGRATION_TO_CALLBACK and name not in available:
            yield (
                f"--report_to {name} needs a package that is not installed; install {name}, or "
                f"give --report_to none"
            )
    if values.get("use_liger_kernel"):
        yield from missing(
            "--use_liger_kernel true", "liger-kernel", "leave --use_liger_kernel out"
        )


def unusable_optimizer(args: Any) -> Iterator[str]:
    """An error message if Trainer cannot create the optimizer, which it notices only later.

    Args:
        args: TrainingArguments; plain values, which transformers rejected, are not checked.
    """
    if not isinstance(args, TrainingArguments):
        return
    # Trainer's own choice on one small layer: whatever its version supports.
    # Low-rank optimizers search their layers in the model, and only miss their package here.
    name = OptimizerNames(args.optim).value
    low_rank = args.optim_target_modules or re.match("galore|apollo", name)
    errors = (ImportError,) if low_rank else (ImportError, ValueError, RuntimeError)
    try:
        Trainer.get_optimizer_cls_and_kwargs(args, cast(PreTrainedModel, torch.nn.Linear(1, 1)))
    except errors as error:
        yield (
            f"--optim {name} cannot be used here ({first_line(error)}); install what "
            f"it needs, or leave --optim out"
        )
    except ValueError:
        return


def missing(setting: str, package: str, instead: str) -> Iterator[str]:
    """An error message if the package that a setting needs is not installed."""
    name = package.lower()
    if importlib.util.find_spec(name.replace("-", "_")) is None:
        yield (
            f"{setting} needs {package}, which is not installed; install it with: "
            f"pip install {name}, or {instead}"
        )
