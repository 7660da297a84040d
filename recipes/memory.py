"""Computes how much memory a recipe needs on each device, without loading weights.

    python recipes/memory.py recipes/llama3_8b_yarn_lora.yaml --devices 8
    python recipes/memory.py recipes/llama3_8b_yarn_lora.yaml --length 65536 --lora_r 64 \
        --shape hidden=8192,layers=80,heads=64,kv_heads=8,intermediate=28672,vocab=128256

Weights, gradients and optimizer states are counted on the model that finetune.py builds, on the
meta device. Activations are the peak of one training step of that model on fake tensors, which
tracks every storage of the forward and backward pass from allocation to release. Only the following
are estimated:

* what FSDP2 gathers: two layers, the output layer, and the largest of their gradients, as computed
  and in float32, in which it is summed;
* the mask of packed documents, once as created, and once in the compute dtype for each layer that
  stores it;
* under context parallelism, the keys and values of one layer, gathered from all ranks;
* 4-bit weights, in blocks of 64 with quantized constants, or 8-bit weights with a constant for
  each row, and one dequantized matrix;
* 8-bit and 4-bit states of optimizers, with a scale for each block.

What it does not know, it names as not estimated: states of other optimizers (``STATES``).

For small Llamas on a CPU, in float32 and under bfloat16, the peak equals that of torch's own tensor
tracker to the byte; compared with its allocator it is up to 0.5 % too low with gradient
checkpointing (states of random generators). Not included are the framework itself, workspaces
inside kernels (1.3 % there, on a CPU with bfloat16 units), and fragmentation: leave ten percent of
a card for them. Evaluation stores no activations for a backward pass. Attention is SDPA without a
mask, which stores the same tensors as flash attention and position methods; with ``--attn eager``,
and by default in Gemma 2, it is the model's own, with its scores of all pairs of tokens.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from recipes import finetune, settings
from recipes.checks import POSITIVE, at_least, out_of_range
from recipes.restoration import OPTIONS, distance
from recipes.settings import mask_bytes
from recipes.shapes import config_of
from rope_ext.advice.memory import Live, heads_of, shown
from rope_ext.command.terminal import show, tell, tell_next
from rope_ext.errors import Mistakes, OptionError, RopeExtError, first_line, is_path
from rope_ext.saving.checkpoints import trained_length

BLOCK = 64  # 4-bit weights per quantization constant (QLoRA, arXiv 2305.14314, section 3)
# Bytes of an optimizer state, with a scale for each block of states.
_FULL = 4.0
# 256 states share a scale in bitsandbytes and torchao, 128 in torchao's 4 bits.
_BYTE = 1 + 4 / 256
_HALF = 0.5 + 4 / 128
_SMALL = 4096  # parameters with fewer values keep states in float32
STATES: dict[str, tuple[int, float]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"), (2, _FULL)),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), (2, _BYTE)),
    **dict.fromkeys(("adamw_torch_8bit",), (2, _BYTE)),
    **dict.fromkeys(("adamw_torch_4bit",), (2, _HALF)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), (1, _FULL)),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), (1, _BYTE)),
}
"""Optimizers whose states are known: their number per trained weight, and bytes of each. Paged
states are counted too, although they can move to the host."""
OF_CONSTANTS = 256  # quantization constants per second-level constant
EAGER = "eager"  # stores the scores of all pairs of tokens
_CAUSAL = "recipes_memory_causal"  # names with sdpa or flash take special paths


@dataclass(frozen=True)
class Memory:
    """Memory on one device, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float = 0

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Need:
    """The memory that a recipe needs, on one device and sharded over several.

    Args:
        parameters, trained: parameter counts, including LoRA and copies of trained modules.
        alone: memory on a single device.
        constants: bytes of 4-bit constants, which FSDP does not shard.
        gathered: largest number of bytes that FSDP2 gathers at a time.
        keys: bytes of the keys and values of a whole sequence in one layer.
        step: peak activation memory in bytes by tokens per row, sharded.
        length: tokens per row.
        missing: what is not estimated.
    """

    parameters: int
    trained: int
    alone: Memory
    constants: float
    gathered: float
    keys: float
    step: Callable[[int], float]
    length: int
    missing: tuple[str, ...] = ()

    def sharded(self, devices: int) -> Memory:
        """Memory per device with FSDP2 or ZeRO-3, where each device has its own rows."""
        alone = self.alone
        return Memory(
            weights=(alone.weights - self.constants) / devices + self.constants,
            gradients=alone.gradients / devices,
            optimizer=alone.optimizer / devices,
            activations=self.step(self.length),
            gathered=self.gathered,
        )

    def context_parallel(self, devices: int) -> Memory:
        """Memory per device if all devices share each row."""
        shared = replace(self, step=lambda length: self.step(length // devices))
        return replace(shared.sharded(devices), gathered=self.gathered + self.keys)


def step_peaks(
    model: PreTrainedModel,
    rows: int,
    length: int,
    bf16: bool = False,
    device: str = "cpu",
    restored: int = 0,
    attention: str = _CAUSAL,
) -> tuple[int, int]:
    """Peak activation memory of a forward and of the following backward pass, in bytes.

    Weights and their gradients are not included.

    Args:
        model: a model in training mode; with fake tensors under a ``FakeTensorMode``.
        rows: number of sequences in the batch.
        length: tokens per sequence.
        bf16: use autocast, as Trainer does.
        device: device of the model.
        restored: tokens of each row in the restoration loss.
        attention: implementation of attention: SDPA without a mask, or ``eager``.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:  # gradients exist in all but the first accumulation step
            parameter.grad = torch.zeros_like(parameter)
    if all(parameter.grad is None for parameter in model.parameters()):
        # Only parameters of the method are trained, which do not exist on the meta device.
        model.get_input_embeddings().register_forward_hook(lambda *call: call[-1].requires_grad_())
    model.config.get_text_config()._attn_implementation_internal = attention
    ids = torch.zeros(rows, length, dtype=torch.long, device=device)
    # Counted are what the step adds to these, which are there before it.
    live = Live()
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    live.known((*model.parameters(), *model.buffers(), *gradients))
    with live:
        with torch.autocast(device, torch.bfloat16) if bf16 else nullcontext():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if restored:
                short = ids[:, :restored]
                with torch.no_grad():
                    originals = model(input_ids=short, **OPTIONS).hidden_states
                loss = loss + distance(model, short, originals)
                # As in a run: restoration_loss has returned before the backward pass.
                del originals
        forward = live.peak
        # The backward pass begins with what the forward pass stored.
        live.peak = live.live
        loss.backward()
    return forward, live.peak


def _causal(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    """SDPA without a mask, equivalent to an all-ones mask; fake masks have no values to check."""
    return sdpa_attention_forward(module, query, key, value, None, **kwargs)


AttentionInterface.register(_CAUSAL, _causal)
AttentionMaskInterface.register(_CAUSAL, lambda **arguments: None)


def extrapolated(
    model: PreTrainedModel,
    rows: int,
    length: int,
    bf16: bool,
    restored: int = 0,
    attention: str = _CAUSAL,
) -> int:
    """Peak activation memory of a training step of a model on the meta device, in bytes.

    Extrapolated from :func:`step_peaks` with two and three layers: all layers are alike, and at
    both peaks each has stored its activations.
    """
    layers = _layers(model)
    number = len(layers)
    del layers[3:]
    peaks = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()  # where autocast acts
        while layers and len(peaks) < 2:
            peaks.append(
                step_peaks(model, rows, length, bf16=bf16, restored=restored, attention=attention)
            )
            del layers[-1:]
    if number <= 3:
        return max(peaks[0])
    return max(three + (number - 3) * (three - two) for three, two in zip(*peaks, strict=True))


def need(recipe: finetune.Recipe, args: Any, config: PreTrainedConfig) -> Need:
    """Compute the memory that a recipe needs.

    Args:
        recipe: a recipe from :func:`recipes.settings.parse`.
        args: its TrainingArguments.
        config: configuration of the model.

    Raises:
        OptionError: the length is missing, or the model does not run without weights.
    """
    if recipe.length is None:
        raise OptionError("--length is missing; give it in the recipe or on the command line")
    model = finetune.build(recipe, config, meta=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    packed = _packed(model) if recipe.quantize else []
    bits = recipe.quantize_bits
    constants = _constants(packed, bits)
    states = optimizer_bytes(args.optim.value, trained)
    missing = []
    if states is None:
        missing.append(f"the states of --optim {args.optim.value}")
    if packed and bits == 8:
        missing.append("what 8-bit products store beyond 16-bit ones")
    step = functools.partial(
        _step,
        recipe=recipe,
        args=args,
        config=config,
        dequantized=max((p.nbytes for p in packed), default=0),
    )
    width = _width(args)
    return Need(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in trained),
        alone=Memory(
            weights=_bytes(model.parameters()) - _bytes(packed) + _codes(packed, bits) + constants,
            gradients=_bytes(trained),
            optimizer=states or 0,
            activations=step(recipe.length, sharded=False),
        ),
        constants=constants,
        gathered=_gathered(model, packed, width, packed_width=bits / 8),
        keys=_keys(config, args.per_device_train_batch_size * recipe.length) * width,
        step=functools.partial(step, sharded=True),
        length=recipe.length,
        missing=tuple(missing),
    )


def _width(args: Any) -> int:
    """Bytes of a value in the compute dtype."""
    return 2 if args.bf16 else 4


def _codes(packed: Sequence[torch.Tensor], bits: int) -> float:
    """Bytes of quantized weights, without their constants."""
    return sum(p.numel() for p in packed) * bits / 8


def _constants(packed: Sequence[torch.Tensor], bits: int) -> float:
    """Bytes of the constants of quantized weights."""
    if bits == 8:
        return sum(4 * p.shape[0] for p in packed)  # a scale for each row
    # A byte for each block, and a float32 for each block of these bytes: double quantization.
    return sum(p.numel() for p in packed) * (1 / BLOCK + 4 / (BLOCK * OF_CONSTANTS))


def _keys(config: PreTrainedConfig, tokens: int) -> int:
    """Number of values in the keys and values of one layer."""
    _, heads, columns = heads_of(config)
    return 2 * tokens * heads * columns


def _step(
    length: int,
    *,
    sharded: bool,
    recipe: finetune.Recipe,
    args: Any,
    config: PreTrainedConfig,
    dequantized: int,
) -> float:
    """Peak memory of the activations of a training step, in bytes.

    Args:
        length: tokens of each row on this device.
        sharded: whether the weights are sharded, by FSDP2 or ZeRO-3.
        recipe: a recipe from :func:`recipes.settings.parse`.
        args: its TrainingArguments.
        config: configuration of the model.
        dequantized: bytes of the largest quantized matrix, when it computes.
    """
    skeleton = finetune.build(recipe, config, meta=True)
    if sharded and args.bf16:  # FSDP2 and ZeRO-3 compute with bfloat16 weights
        skeleton.bfloat16()
    if args.gradient_checkpointing:
        skeleton.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    # Without checkpointing, every layer stores its cast of the mask for the backward pass. Counted
    # here, since ``extrapolated`` takes layers away.
    copies = 1 if args.gradient_checkpointing else len(_layers(skeleton))
    own = recipe.original_max_position_embeddings or trained_length(config)
    restored = min(own, length) if recipe.restoration else 0
    try:
        peak = extrapolated(
            skeleton,
            rows=args.per_device_train_batch_size,
            length=length,
            bf16=args.bf16 and not sharded,
            restored=restored,
            attention=_attention(recipe, skeleton),
        )
    except RopeExtError:
        raise
    except Exception as error:  # of the model's code, which may need real tensors
        raise OptionError(
            f"the memory of {recipe.model or 'this shape'} cannot be estimated, since its training "
            f"step fails without weights ({type(error).__name__}: {first_line(error)}); train some "
            f"steps with recipes/finetune.py --max_steps 3 and watch the device, or give another "
            f"--dtype and --bf16"
        ) from error
    mask = mask_bytes(recipe, args, length) * (1 + _width(args) * copies)
    return peak + dequantized + mask


def _attention(recipe: finetune.Recipe, model: PreTrainedModel) -> str:
    """The implementation of attention whose memory is counted."""
    replaced = getattr(settings.method_of(recipe), "replaces_attention", False)
    # Of the model, not of the recipe: Gemma 2, which caps its scores, is eager by default.
    eager = model.config.get_text_config()._attn_implementation == EAGER
    return EAGER if eager and not replaced else _CAUSAL


def optimizer_bytes(optim: str, trained: Sequence[nn.Parameter]) -> float | None:
    """Bytes of the states of an optimizer; None if they are not known."""
    if optim not in STATES:
        return None
    number, size = STATES[optim]
    return sum(number * p.numel() * (size if p.numel() >= _SMALL else _FULL) for p in trained)


def _layers(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def _bytes(parameters: Any) -> int:
    return sum(p.nbytes for p in parameters)


def _packed(model: PreTrainedModel) -> list[torch.Tensor]:
    """Weights that bitsandbytes quantizes: all linear layers except the output layer."""
    head = model.get_output_embeddings()
    return [
        module.weight
        for module in model.modules()
        # Matrices of LoRA are linear layers as well, and are trained: they are not quantized.
        if isinstance(module, nn.Linear) and module is not head and not module.weight.requires_grad
    ]


def _gathered(
    model: PreTrainedModel, packed: Sequence[torch.Tensor], width: int, packed_width: float
) -> float:
    """Bytes of two layers, the output layer, and the largest gradient, also in float32."""
    halves = {id(p) for p in packed}

    def size(module: nn.Module, trained: bool) -> float:
        return sum(
            p.numel() * (packed_width if id(p) in halves else width)
            for p in module.parameters()
            if p.requires_grad or not trained
        )

    layers = _layers(model)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    # FSDP2 gathers the next layer while one computes, hence two.
    largest = max(size(layer, trained=False) for layer in layers)
    gradient = max(size(module, trained=True) for module in (*layers, *ends))
    return 2 * largest + size(ends[1], trained=False) + gradient * (1 + 4 / width)


def line(found: Need, devices: int) -> str:
    """The first line of a recipe file."""
    parts = [f"{shown(found.alone.total)} on one device"]
    if devices > 1:
        parts.append(f"{shown(found.sharded(devices).total)} on each of {devices} with FSDP2")
    parts += [f"without {each} (not estimated)" for each in found.missing]
    return f"# memory: {', '.join(parts)}; computed by recipes/memory.py"


def verdict(found: Need, devices: int, card: float) -> tuple[bool, str]:
    """Whether nine tenths of ``card`` GiB are enough, and a sentence that says so."""
    size = (found.alone if devices == 1 else found.sharded(devices)).total
    usable = 0.9 * card * 2**30
    needed = f"{shown(size)} of the {0.9 * card:.1f} GiB that a card of {card:g} GiB leaves"
    if size <= usable:
        without = (
            f", without {' and '.join(found.missing)} (not estimated)" if found.missing else ""
        )
        return True, f"fits: {needed}{without}"
    return False, (
        f"does not fit: {needed}; use a shorter --length, --quantize true, "
        f"--gradient_checkpointing true, or more --devices"
    )


def table(found: Need, devices: int) -> str:
    """All parts of the memory as a table."""
    columns = {"one device": found.alone}
    if devices > 1:
        columns[f"each of {devices}: FSDP2, ZeRO-3"] = found.sharded(devices)
        columns["context parallel"] = found.context_parallel(devices)
    lines = ["".join([" " * 12, *(f"{name:>28}" for name in columns)])]
    for name in [*(field.name for field in fields(Memory)), "total"]:
        cells = (f"{shown(getattr(memory, name)):>28}" for memory in columns.values())
        lines.append("".join([f"{name:12}", *cells]))
    return "\n".join(lines)


def config_from_shape(text: str) -> PreTrainedConfig:
    """Configuration of a Llama with a shape such as ``"hidden=4096,layers=32,heads=32"``.

    Raises:
        OptionError: a name is unknown, or a value is not a positive integer.
    """
    names = {
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate": "intermediate_size",
        "vocab": "vocab_size",
        "trained": "max_position_embeddings",
    }
    values = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in names or not value.isdecimal() or int(value) == 0:
            raise OptionError(
                f"--shape {part!r} is not valid; it must be NAME=NUMBER, of {', '.join(names)}"
            )
        values[names[name]] = int(value)
    try:
        return LlamaConfig(**values)
    except Exception as error:  # huggingface_hub's, whose message has several lines
        reason = str(error).strip().splitlines()[-1].strip()
        raise OptionError(
            f"--shape {text} is no shape of a Llama ({reason}); correct its numbers"
        ) from None


def read(path: str, *more: str) -> tuple[finetune.Recipe, Any]:
    """Read a recipe; further words override it, as on the command line of finetune.py."""
    return settings.parse(_words(path, *more))


def _words(path: str, *more: str) -> list[str]:
    # Without a GPU, TrainingArguments rejects bfloat16 unless use_cpu is set.
    return ["--config", path, "--use_cpu", "true", *more]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("recipe", help="YAML recipe of recipes/finetune.py")
    parser.add_argument(
        "--devices", type=int, default=1, help="number of devices that share the model"
    )
    parser.add_argument("--card", type=float, help="memory of a device in GiB; exit 1 if too small")
    parser.add_argument("--shape", help="hidden=4096,layers=32,... instead of the recipe's model")
    options, more = parser.parse_known_args(argv)
    try:
        mistakes = Mistakes()
        config = None
        mistakes.add_all(
            out_of_range(vars(options), {"devices": at_least(1), "card": POSITIVE}).values()
        )
        if options.shape is not None:
            with mistakes.collected():
                config = config_from_shape(options.shape)
        recipe, args = settings.read_settings(_words(options.recipe, *more), mistakes)
        if recipe.model is None and options.shape is None:
            mistakes.add("--model is missing; give it in the recipe or here, or give --shape")
        mistakes.report()
        found = need(recipe, args, config or config_of(str(recipe.model)))
    except RopeExtError as error:
        parser.exit(2, f"{error}\n")
    show(
        f"{Path(options.recipe).name}: {found.parameters:,} parameters, {found.trained:,} of them "
        f"trained; {args.per_device_train_batch_size} x {recipe.length} tokens a device"
    )
    show(table(found, options.devices))
    show(line(found, options.devices))
    if options.card is not None:
        fits, sentence = verdict(found, options.devices, options.card)
        show(sentence)
        if not fits:
            parser.exit(1)
    for part in settings.parts(recipe) if recipe.dataset or recipe.datasets else ():
        if is_path(part.dataset) and not Path(part.dataset).exists():
            tell(
                f"note: {part.dataset} does not exist; set dataset in {options.recipe}, or add "
                f"--dataset, to the documents to train on",
                "yellow",
            )
    if options.shape is not None:
        return
    devices = "single" if options.devices == 1 else "fsdp2"
    launch = ["accelerate", "launch", "--config_file", f"recipes/accelerate/{devices}.yaml"]
    tell_next([*launch, "recipes/finetune.py", "--config", options.recipe, *more])


if __name__ == "__main__":
    main()
