"""Refuses settings that context parallelism cannot train correctly, before weights are loaded.

Sequence parallelism (Ulysses, ALST) has the same limits: ranks exchange heads inside SDPA.

Context parallelism gives each rank a part of every sequence: it splits tokens, labels and positions
the same way, exchanges keys inside SDPA, and replaces every mask by plain causal attention.
Settings that need more than that would silently train something else.

PoSE works: its positions are split along with the tokens, and its all-ones mask means plain causal
attention. The positions have to be a function of the row, since each rank of a sequence draws them
separately.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from typing import TYPE_CHECKING

from accelerate.utils import DistributedType
from torch import distributed

import rope_ext
from rope_ext import OptionError
from rope_ext.config.settings import all_settings
from rope_ext.methods.checked import not_none

if TYPE_CHECKING:
    from accelerate import ParallelismConfig
    from transformers import PreTrainedConfig, TrainingArguments

_SHARDED = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}


def context_parallel_size(parallelism_config: ParallelismConfig | None = None) -> int:
    """Number of ranks that share each sequence, determined as in Trainer and accelerate.

    Args:
        parallelism_config: configuration of the training arguments; None reads the environment set
            by ``accelerate launch``.
    """
    return max(_sizes(parallelism_config))


def shares_heads(parallelism_config: ParallelismConfig | None = None) -> bool:
    """Whether ranks share each sequence through Ulysses, which needs explicit positions."""
    return _sizes(parallelism_config)[1] > 1


def _sizes(given: ParallelismConfig | None) -> tuple[int, int]:
    """Ranks of context parallelism, and of sequence parallelism."""
    if given is None:
        if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
            return 1, 1
        from accelerate import ParallelismConfig

        given = ParallelismConfig()
    return given.cp_size or 1, getattr(given, "sp_size", 1)


def check_processes(known: int, devices: int = 1) -> None:
    """Refuse processes that would each train separately, and one process on several GPUs.

    Args:
        known: number of processes in accelerate's process group.
        devices: number of GPUs that Trainer would use in this process.

    Raises:
        OptionError: more processes were launched, or the process has several GPUs.
    """
    if devices > 1:  # Trainer would multiply rows, and in 4 bits also gradients, by their number
        raise OptionError(
            f"{devices} GPUs are visible to one process; set CUDA_VISIBLE_DEVICES=0, or launch "
            f"with recipes/accelerate/ddp.yaml and --num_processes {devices}"
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if known < launched:
        raise OptionError(
            f"{launched} processes were launched, but accelerate's process group has {known} (on "
            f"CPUs it needs --use_cpu true, for plain data parallelism), so each would train "
            f"separately; give --use_cpu true, or --num_processes 1"
        )


def warn_of_launch(args: TrainingArguments) -> None:
    """Warn if accelerate does not shard the model although the launch file requests it.

    On CPUs it replaces FSDP and DeepSpeed by plain data parallelism without a message.
    """
    on_cpu = not_none(args.distributed_state).distributed_type in (
        DistributedType.MULTI_CPU,
        DistributedType.NO,
    )
    for name, variable in _SHARDED.items():
        if on_cpu and args.use_cpu and os.environ.get(variable, "false").lower() == "true":
            warnings.warn(
                f"the launch file requests {name}, which accelerate does not use on CPUs: with "
                f"--use_cpu true, this run uses plain data parallelism (DDP), and every process "
                f"holds the whole model. Leave --use_cpu out on a machine with GPUs, or launch "
                f"with recipes/accelerate/ddp.yaml",
                stacklevel=2,
            )


def sharded_by() -> str | None:
    """What the launch file shards the model with, FSDP or DeepSpeed; None for whole models."""
    for name, variable in _SHARDED.items():
        if os.environ.get(variable, "false").lower() == "true":
            return name
    return None


def check_fractions() -> None:
    """Refuse to shard a model that trains on real positions, which would be rounded.

    Raises:
        OptionError: the launch file asks for FSDP or DeepSpeed.
    """
    name = sharded_by()
    if name is not None:
        raise OptionError(
            f"--positions random_floats does not work with {name}, which casts real inputs to "
            f"the dtype of the forward, so that bfloat16 would round positions; give "
            f"--positions random, or launch with recipes/accelerate/ddp.yaml or single.yaml"
        )


def leave() -> None:
    """Destroy the process group at the end of a run.

    A communication thread may still hold a tensor. If Python exits first, the process aborts, and
    the launcher reports a completed run as a failure (pytorch issue 190489).
    """
    if distributed.is_available() and distributed.is_initialized():
        gc.collect()  # a leftover trainer would keep the group and its threads alive
        distributed.destroy_process_group()
        time.sleep(0.1)  # deepspeed or a mesh may hold it, too; give its threads time to finish


def check_parallelism(
    method: rope_ext.FrequencyMethod | rope_ext.PositionMethod | None,
    config: PreTrainedConfig,
    *,
    cp_size: int,
    attn_implementation: str | None = None,
    document_masking: bool = False,
    length: int | None = None,
) -> None:
    """Refuse settings that context parallelism would train incorrectly, or not at all.

    Args:
        method: the method to patch with; None for no patch.
        config: configuration of the unpatched model.
        cp_size: number of ranks that share each sequence (:func:`context_parallel_size`).
        attn_implementation: attention implementation of the model; None for transformers' default,
            which is ``"sdpa"`` if the family supports it.
        document_masking: whether attention between packed documents is masked.
        length: tokens per training sequence.

    Raises:
        OptionError: names the incompatible settings, and how to fix them.
    """
    if cp_size == 1:
        return
    where = f"context or sequence parallelism over {cp_size} ranks"
    whole = "one rank for each sequence (recipes/accelerate/fsdp2.yaml)"
    if method is not None and method.replaces_attention:
        raise OptionError(
            f"method={method.name!r} does not support {where}: it has its own attention function, "
            f"but ranks exchange keys inside SDPA only; choose a fixed frequency method such as "
            f"'yarn', or {whole}"
        )
    if method is not None and method.is_dynamic:
        fixed = "length=TOKENS"
        if getattr(method, "mode", "fixed") == "growing":
            fixed = "mode='fixed' and length=TOKENS"
        raise OptionError(
            f"method={method.name!r} does not support {where}: it depends on the largest position, "
            f"which differs between ranks; pass {fixed}, choose a fixed method such as 'yarn', or "
            f"{whole}"
        )
    if method is not None and getattr(method, "start_tokens", 0):
        raise OptionError(
            f"method={method.name!r} with start_tokens={method.start_tokens} does not support "
            f"{where}: only the first rank sees the start of a sequence; leave start_tokens out, "
            f"or choose {whole}"
        )
    text = config.get_text_config()
    for settings in all_settings(text).values():
        if settings.is_dynamic:
            raise OptionError(
                f"rope_type={settings.rope_type!r} in the model's configuration does not "
                f"support {where}: it depends on the largest position, which differs between "
                f"ranks; load the model with rope_type 'default' and patch it with a fixed method "
                f"such as 'yarn', or choose {whole}"
            )
    if attn_implementation not in (None, "sdpa"):
        raise OptionError(
            f"attn_implementation={attn_implementation!r} does not support {where}; it must be "
            f"'sdpa', or choose {whole}"
        )
    if document_masking:
        raise OptionError(
            f"document masking does not work with {where}, which replaces every mask by plain "
            f"causal attention; pack documents without masks, use one document per row, or choose "
            f"{whole}"
        )
    windowed = _windowed(text)
    if windowed:
        raise OptionError(
            f"{type(text).__name__} has {windowed}, which {where} would train with attention over "
            f"the whole sequence; use a model with full attention only, or {whole}"
        )
    if length is not None and length % (2 * cp_size):
        raise OptionError(
            f"length={length} does not work with {where}: each rank takes two equal parts of a "
            f"sequence, so it must be a multiple of {2 * cp_size}, such as "
            f"{max(1, length // (2 * cp_size)) * 2 * cp_size}"
        )


def _windowed(config: PreTrainedConfig) -> str | None:
    """Describe layers without full attention, as accelerate detects them; None without any."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        others = sorted(set(kinds) - {"full_attention"})
        return f"layers of type {', '.join(others)}" if others else None
    if getattr(config, "sliding_window", None):
        return f"layers with sliding_window={config.sliding_window}"
    return None
