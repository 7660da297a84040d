"""How much memory a recipe needs on each device, computed without loading a weight.

    python recipes/memory.py recipes/llama3_8b_yarn_lora.yaml --devices 8
    python recipes/memory.py recipes/llama3_8b_yarn_lora.yaml --length 65536 --lora_r 64 \
        --shape hidden=8192,layers=80,heads=64,kv_heads=8,intermediate=28672,vocab=128256

Weights, gradients and optimizer are counted on the model as finetune.py builds it, on the meta
device. Activations are the peak of one training step of that model on fake tensors: every storage
it makes, forward and backward, is followed from its making to its end. Nothing is estimated but

* what FSDP2 has gathered: two layers, the output layer, and the gradient of the largest of them, as
  it was computed and in float32, in which it is summed;
* the mask of packed documents, once as it is made and once, in the dtype of the computation, for
  each layer that keeps what it made;
* under context parallelism the keys and values of one layer, gathered from all ranks;
* 4-bit weights, in blocks of 64 with quantised constants, and one matrix of them made whole.

Against torch's own tracker of tensors, for small Llamas on a CPU in float32 and under bfloat16, the
peak is right to the byte; against the record of its allocator it is up to 0.5 % too low with
gradient checkpointing (the states of random generators). Not counted are the framework itself,
workspaces inside of kernels (1.3 % there, on a CPU with bfloat16 units), and fragmentation: leave
ten per cent of a card for them. An evaluation keeps nothing for a backward. For position methods
native attention stands in, which keeps the same tensors.
"""

from __future__ import annotations

import argparse
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from recipes import finetune, settings
from recipes.checks import POSITIVE, at_least, out_of_range
from recipes.settings import mask_bytes
from rope_ext.checkpoints import load_config
from rope_ext.errors import Mistakes, OptionError, RopeExtError

BLOCK = 64  # weights that share a constant in 4 bits (QLoRA, arXiv 2305.14314, section 3)
TWO_STATES = ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit")  # as large as the weights
OF_CONSTANTS = 256  # constants that share one of their own
_CAUSAL = "recipes_memory_causal"  # names with sdpa or flash take special paths

# Published shapes, so that nothing has to be downloaded (and no licence accepted) to plan a run.
SHAPES: dict[str, PreTrainedConfig] = {
    "meta-llama/Llama-2-7b-hf": LlamaConfig(max_position_embeddings=4096),
    "meta-llama/Meta-Llama-3-8B": LlamaConfig(
        vocab_size=128256,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "Qwen/Qwen2.5-7B": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "Qwen/Qwen3-8B-Base": Qwen3Config(
        vocab_size=151936,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "mistralai/Mistral-7B-v0.3": MistralConfig(
        vocab_size=32768,
        max_position_embeddings=32768,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
}
SHAPES["meta-llama/Meta-Llama-3-8B-Instruct"] = SHAPES["meta-llama/Meta-Llama-3-8B"]


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

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
    """What a recipe needs on one device, and how it is shared out among several.

    Args:
        parameters, trained: numbers, LoRA and copies of trained modules among them.
        alone: on one device.
        constants: bytes of the 4-bit weights that FSDP does not share out.
        gathered: bytes that FSDP2 holds whole for a time, at most.
        keys: bytes of the keys and values of a whole sequence in one layer.
        step: peak of the activations in bytes for rows of that many tokens, sharded.
        length: tokens of a row.
    """

    parameters: int
    trained: int
    alone: Memory
    constants: float
    gathered: float
    keys: float
    step: Callable[[int], float]
    length: int

    def sharded(self, devices: int) -> Memory:
        """On each of ``devices`` with FSDP2 or ZeRO-3, every one with rows of its own."""
        alone = self.alone
        return Memory(
            (alone.weights - self.constants) / devices + self.constants,
            alone.gradients / devices,
            alone.optimizer / devices,
            self.step(self.length),
            self.gathered,
        )

    def context_parallel(self, devices: int) -> Memory:
        """On each of ``devices`` that share every row."""
        shared = replace(self, step=lambda length: self.step(length // devices))
        return replace(shared.sharded(devices), gathered=self.gathered + self.keys)


class _Live(TorchDispatchMode):
    """Follows the storages that are made under it; ``peak`` is the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.live = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())
        return result

    def known(self, tensors: Any) -> None:
        """Leave out what was there before."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()._cdata] = 0

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live += self._known[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._known.pop(key)


def step_peaks(
    model: nn.Module, rows: int, length: int, bf16: bool = False, device: str = "cpu"
) -> tuple[int, int]:
    """Most bytes of activations in a forward and in the backward after it.

    Weights and their gradients are not among them.

    Args:
        model: in training mode; with fake tensors under a ``FakeTensorMode``.
        rows: sequences of the batch.
        length: tokens of each.
        bf16: under autocast, as Trainer does.
        device: of the model.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:  # as in every step of an accumulation but the first
            parameter.grad = torch.zeros_like(parameter)
    model.config.get_text_config()._attn_implementation_internal = _CAUSAL
    ids = torch.zeros(rows, length, dtype=torch.long, device=device)
    live = _Live()
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    live.known((*model.parameters(), *model.buffers(), *gradients))
    with live:
        with torch.autocast(device, torch.bfloat16) if bf16 else nullcontext():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        forward, live.peak = live.peak, live.live
        loss.backward()
    return forward, live.peak


def _causal(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    """SDPA without a mask, which is what an all-ones one comes to; a fake one has no values."""
    return sdpa_attention_forward(module, query, key, value, None, **kwargs)


AttentionInterface.register(_CAUSAL, _causal)
AttentionMaskInterface.register(_CAUSAL, lambda **arguments: None)


def extrapolated(model: nn.Module, rows: int, length: int, bf16: bool) -> int:
    """Most bytes of activations in a step of a model on the meta device.

    From :func:`step_peaks` of its first two and three layers: layers are alike, and at both peaks
    all of them have left what they keep.
    """
    layers = _layers(model)
    number = len(layers)
    del layers[3:]
    peaks = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()  # where autocast acts
        while layers and len(peaks) < 2:
            peaks.append(step_peaks(model, rows, length, bf16))
            del layers[-1:]
    if number <= 3:
        return max(peaks[0])
    return max(three + (number - 3) * (three - two) for three, two in zip(*peaks, strict=True))


def need(recipe: finetune.Recipe, args: Any, config: PreTrainedConfig) -> Need:
    """What a recipe needs.

    Args:
        recipe: as :func:`recipes.settings.parse` returns it.
        args: likewise.
        config: of the model.

    Raises:
        OptionError: no rows, or an optimizer whose states are not known.
    """
    if args.optim not in TWO_STATES:
        raise OptionError(
            f"--optim {args.optim.value}: the size of its states is not known here; it must be one "
            f"of {', '.join(TWO_STATES)}"
        )
    if recipe.length is None:
        raise OptionError("--length is missing; give it in the recipe or on the command line")
    model = finetune.build(recipe, config, meta=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    packed = _packed(model) if recipe.quantize else []
    constants = sum(p.numel() for p in packed) * (1 / BLOCK + 4 / (BLOCK * OF_CONSTANTS))
    weights = _bytes(model.parameters()) - _bytes(packed)
    weights += sum(p.numel() for p in packed) / 2 + constants
    whole = max((p.nbytes for p in packed), default=0)
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rows, width = args.per_device_train_batch_size, 2 if args.bf16 else 4

    def step(length: int, sharded: bool) -> float:
        skeleton = finetune.build(recipe, config, meta=True)
        if sharded and args.bf16:  # FSDP2 and ZeRO-3 compute with weights of bfloat16
            skeleton.bfloat16()
        if args.gradient_checkpointing:
            skeleton.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        peak = extrapolated(skeleton, rows, length, args.bf16 and not sharded)
        copies = 1 if args.gradient_checkpointing else len(_layers(model))
        return peak + whole + mask_bytes(recipe, args, length) * (1 + width * copies)

    return Need(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in trained),
        alone=Memory(weights, _bytes(trained), 2 * _bytes(trained), step(recipe.length, False)),
        constants=constants,
        gathered=_gathered(model, packed, width),
        keys=2 * rows * recipe.length * text.num_key_value_heads * head * width,
        step=functools.partial(step, sharded=True),
        length=recipe.length,
    )


def _layers(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def _bytes(parameters: Any) -> int:
    return sum(p.nbytes for p in parameters)


def _packed(model: nn.Module) -> list[nn.Parameter]:
    """Weights that bitsandbytes holds in 4 bits: of linear layers, but for the output layer."""
    head = model.get_output_embeddings()
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head and not module.weight.requires_grad
    ]


def _gathered(model: nn.Module, packed: list[nn.Parameter], width: int) -> float:
    """Two layers, the output layer, and the largest gradient of a unit, also in float32."""
    halves = {id(p) for p in packed}

    def size(module: nn.Module, trained: bool) -> float:
        return sum(
            p.numel() * (0.5 if id(p) in halves else width)
            for p in module.parameters()
            if p.requires_grad or not trained
        )

    layers = _layers(model)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    largest = max(size(layer, trained=False) for layer in layers)
    gradient = max(size(module, trained=True) for module in (*layers, *ends))
    return 2 * largest + size(ends[1], trained=False) + gradient * (1 + 4 / width)


def shown(size: float) -> str:
    """``"12.3 GiB"``, or MiB below one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def line(found: Need, devices: int) -> str:
    """The line that heads a recipe."""
    parts = [f"{shown(found.alone.total)} on one device"]
    if devices > 1:
        parts.append(f"{shown(found.sharded(devices).total)} on each of {devices} with FSDP2")
    return f"# memory: {', '.join(parts)}; computed by recipes/memory.py"


def verdict(found: Need, devices: int, card: float) -> tuple[bool, str]:
    """Whether nine tenths of ``card`` GiB are enough, and a sentence that says so."""
    size = (found.alone if devices == 1 else found.sharded(devices)).total
    usable = 0.9 * card * 2**30
    needed = f"{shown(size)} of the {0.9 * card:.1f} GiB that a card of {card:g} GiB leaves"
    if size <= usable:
        return True, f"fits: {needed}"
    return False, (
        f"does not fit: {needed}; use a shorter --length, --quantize true, "
        f"--gradient_checkpointing true, or more --devices"
    )


def table(found: Need, devices: int) -> str:
    """All parts, in columns."""
    columns = {"one device": found.alone}
    if devices > 1:
        columns[f"each of {devices}: FSDP2, ZeRO-3"] = found.sharded(devices)
        columns["context parallel"] = found.context_parallel(devices)
    lines = ["".join([" " * 12, *(f"{name:>28}" for name in columns)])]
    for name in [*(field.name for field in fields(Memory)), "total"]:
        cells = (f"{shown(getattr(memory, name)):>28}" for memory in columns.values())
        lines.append("".join([f"{name:12}", *cells]))
    return "\n".join(lines)


def config_of(model: str) -> PreTrainedConfig:
    """Published shape of a model, else its own configuration."""
    return SHAPES[model] if model in SHAPES else load_config(model)


def of_shape(text: str) -> PreTrainedConfig:
    """A Llama of that shape: ``"hidden=4096,layers=32,heads=32"``.

    Raises:
        OptionError: an unknown name, or no whole number above 0.
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
    return LlamaConfig(**values)


def read(path: str, *more: str) -> tuple[finetune.Recipe, Any]:
    """A recipe's settings; what else is given goes over them, as on finetune.py's command line."""
    return settings.parse(_words(path, *more))


def _words(path: str, *more: str) -> list[str]:
    # Without a GPU TrainingArguments refuse bfloat16 unless they are told of the CPU.
    return ["--config", path, "--use_cpu", "true", *more]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="YAML recipe of recipes/finetune.py")
    parser.add_argument(
        "--devices", type=int, default=1, help="number of devices that share the model"
    )
    parser.add_argument("--card", type=float, help="memory of a device in GiB; exit 1 if too small")
    parser.add_argument("--shape", help="hidden=4096,layers=32,... instead of the recipe's model")
    options, more = parser.parse_known_args(argv)
    try:
        mistakes, config = Mistakes(), None
        mistakes.add_all(
            out_of_range(vars(options), {"devices": at_least(1), "card": POSITIVE}).values()
        )
        if options.shape is not None:
            with mistakes.collected():
                config = of_shape(options.shape)
        recipe, args = settings.read_settings(_words(options.recipe, *more), mistakes)
        mistakes.report()
        config = config_of(recipe.model) if config is None else config
        found = need(recipe, args, config)
    except RopeExtError as error:
        parser.exit(2, f"{error}\n")
    print(
        f"{Path(options.recipe).name}: {found.parameters:,} parameters, {found.trained:,} of them "
        f"trained; {args.per_device_train_batch_size} x {recipe.length} tokens a device"
    )
    print(table(found, options.devices))
    print(line(found, options.devices))
    if options.card is not None:
        fits, sentence = verdict(found, options.devices, options.card)
        print(sentence)
        if not fits:
            parser.exit(1)


if __name__ == "__main__":
    main()
