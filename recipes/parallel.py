"""What context parallelism cannot train rightly, refused before any weights are loaded.

Context parallelism gives each rank a part of every sequence: tokens, labels and positions are cut
alike, attention is exchanged inside of SDPA, and every mask is replaced by plain causal attention.
What needs more than that would train on something else without a word.

PoSE goes well with it: its positions are cut along with the tokens, and plain causal attention is
what its all-ones mask asks for. They have to be a function of the row, since the ranks of one
sequence draw them one by one.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

from accelerate.utils import DistributedType
from torch import distributed

import rope_ext
from rope_ext import OptionError

if TYPE_CHECKING:
    from accelerate import ParallelismConfig
    from transformers import PreTrainedConfig, TrainingArguments

_SHARDED = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}


def context_parallel_size(parallelism_config: ParallelismConfig | None = None) -> int:
    """Number of ranks that share each sequence, as Trainer and accelerate find it.

    Args:
        parallelism_config: of the training arguments; None reads what ``accelerate launch`` has
            set in the environment.
    """
    if parallelism_config is None:
        if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
            return 1
        from accelerate import ParallelismConfig

        parallelism_config = ParallelismConfig()
    return parallelism_config.cp_size


def check_processes(known: int) -> None:
    """Refuse processes that would train alone, each for itself.

    Args:
        known: processes that accelerate has joined.

    Raises:
        OptionError: more were launched.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if known < launched:
        raise OptionError(
            f"{launched} processes were launched, and accelerate has joined {known} (on CPUs it "
            f"joins them with --use_cpu true only, as plain data parallelism), so that each would "
            f"train alone; give --use_cpu true, or --num_processes 1"
        )


def warn_of_launch(args: TrainingArguments) -> None:
    """Warn where accelerate does not shard the model although the launch file asks for it.

    On CPUs it replaces FSDP and DeepSpeed by plain data parallelism without a message.
    """
    on_cpu = args.distributed_state.distributed_type in (
        DistributedType.MULTI_CPU,
        DistributedType.NO,
    )
    for name, variable in _SHARDED.items():
        if on_cpu and args.use_cpu and os.environ.get(variable, "false").lower() == "true":
            warnings.warn(
                f"the launch file asks for {name}, which accelerate does not use on CPUs: with "
                f"--use_cpu true this run is plain data parallelism (DDP), and every process holds "
                f"the whole model. Leave --use_cpu out on a machine with GPUs, or launch with "
                f"recipes/accelerate/ddp.yaml",
                stacklevel=2,
            )


def leave() -> None:
    """Take leave of the other processes, when nothing is left to do.

    A thread that exchanges tensors may still hold one; should Python end before it, the process
    is aborted, and the launcher calls a run that is whole a failure (pytorch issue 190489).
    """
    if distributed.is_available() and distributed.is_initialized():
        gc.collect()  # what is left of a trainer holds the group, and with it its threads
        distributed.destroy_process_group()
        time.sleep(0.1)  # others may hold it, too (deepspeed, a mesh): then its threads let go now


def check_parallelism(
    method: rope_ext.FrequencyMethod | rope_ext.PositionMethod | None,
    config: PreTrainedConfig,
    *,
    cp_size: int,
    attn_implementation: str | None = None,
    document_masking: bool = False,
    length: int | None = None,
) -> None:
    """Refuse what context parallelism would train wrongly, or not at all.

    Args:
        method: that the model will be patched with; None: it stays as it is.
        config: of the model, before the patch.
        cp_size: ranks that share each sequence (:func:`context_parallel_size`).
        attn_implementation: that the model will be loaded with; None: transformers' own choice,
            which is ``"sdpa"`` where the family has it.
        document_masking: whether packed documents are kept from seeing each other.
        length: tokens of a training sequence.

    Raises:
        OptionError: names what does not go together, and the cure.
    """
    if cp_size == 1:
        return
    where = f"context parallelism (parallelism_config_cp_size={cp_size})"
    whole = "parallelism_config_cp_size=1 (recipes/accelerate/fsdp2.yaml)"
    if method is not None and method.attends:
        raise OptionError(
            f"method={method.name!r} does not go with {where}: it has an attention function of its "
            f"own, and the ranks exchange keys inside of SDPA only; choose a fixed frequency "
            f"method such as 'yarn', or {whole}"
        )
    if method is not None and method.adapts:
        fixed = "length=TOKENS"
        if getattr(method, "mode", "fixed") == "growing":
            fixed = "mode='fixed' and length=TOKENS"
        raise OptionError(
            f"method={method.name!r} does not go with {where}: it follows the longest position it "
            f"sees, and each rank sees other ones; pass {fixed}, choose a fixed method such as "
            f"'yarn', or {whole}"
        )
    if getattr(method, "start_tokens", 0):
        raise OptionError(
            f"method={method.name!r} with start_tokens={method.start_tokens} does not go with "
            f"{where}: no rank but the first sees where a sequence starts; leave start_tokens out, "
            f"or choose {whole}"
        )
    text = config.get_text_config()
    for parameters in _rope_parameters(text):
        if _switches(parameters):
            raise OptionError(
                f"rope_type={parameters['rope_type']!r} of the model's own configuration does not "
                f"go with {where}: it follows the longest position it sees, and each rank sees "
                f"other ones; load the model with rope_type 'default' and patch it with a fixed "
                f"method such as 'yarn', or choose {whole}"
            )
    if attn_implementation not in (None, "sdpa"):
        raise OptionError(
            f"attn_implementation={attn_implementation!r} does not go with {where}; it must be "
            f"'sdpa', or choose {whole}"
        )
    if document_masking:
        raise OptionError(
            f"document masking does not go with {where}, which replaces every mask by plain causal "
            f"attention; pack documents without masks, give each a sequence of its own, or choose "
            f"{whole}"
        )
    windowed = _windowed(text)
    if windowed:
        raise OptionError(
            f"{type(text).__name__} has {windowed}, which do not go with {where}: it would "
            f"train them with attention over the whole sequence; take a model of full attention "
            f"only, or {whole}"
        )
    if length is not None and length % (2 * cp_size):
        raise OptionError(
            f"length={length} does not go with {where}: each rank takes two equal parts of a "
            f"sequence; it must be a multiple of {2 * cp_size}, such as "
            f"{max(1, length // (2 * cp_size)) * 2 * cp_size}"
        )


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Of every kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _switches(parameters: dict[str, Any]) -> bool:
    """Whether transformers changes these frequencies with the longest position it is given."""
    rope_type = parameters.get("rope_type")
    if rope_type == "longrope":
        return parameters.get("short_factor") != parameters.get("long_factor")
    return rope_type == "dynamic"


def _windowed(config: PreTrainedConfig) -> str | None:
    """Which layers do not see the whole sequence, in words, as accelerate tells them."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        others = sorted(set(kinds) - {"full_attention"})
        return f"layers of type {', '.join(others)}" if others else None
    if getattr(config, "sliding_window", None):
        return f"layers with sliding_window={config.sliding_window}"
    return None
