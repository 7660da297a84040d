"""Properties of CUDA GPUs that decide which kernels can be compiled for them."""

import functools
import importlib.util
import os
import shutil
import sys
from typing import NamedTuple

import torch

AMPERE = (8, 0)  # the lowest compute capability with PyTorch's flash kernel and bfloat16
HOPPER = (9, 0)  # that of an H100
A100 = 163 * 2**10  # bytes of shared memory per block
H100 = 227 * 2**10
SLACK = 2**10  # bytes of it that estimates leave


class Card(NamedTuple):
    """A GPU and the software that compiles kernels for it."""

    capability: tuple[int, int]  # such as (8, 6)
    shared: int  # bytes of shared memory available to a thread block
    compiles: bool  # whether Triton and its C compiler are installed

    @property
    def version(self) -> str:
        return ".".join(map(str, self.capability))


@torch.compiler.assume_constant_result
def card(device: torch.device) -> Card:
    return card_at(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def card_at(index: int) -> Card:
    found = torch.cuda.get_device_properties(index)
    # ROCm lacks the second attribute; its cards have 64 KiB.
    shared = getattr(found, "shared_memory_per_block_optin", 2**16)
    return Card((found.major, found.minor), shared, compiles() and found.major >= 7)


def compiles() -> bool:
    """Whether Triton and the C compiler that it needs are installed; on Windows it bundles one."""
    if importlib.util.find_spec("triton") is None:
        return False
    compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    return sys.platform == "win32" or any(shutil.which(x) for x in compilers if x)


class Heads(NamedTuple):
    """Attention heads: columns, bytes per number, and whether logits get a bias by distance."""

    columns: int
    value_columns: int
    size: int
    bias: bool = False

    @property
    def padded(self) -> tuple[int, int]:
        """Columns padded to powers of two, as in the kernel."""
        return 1 << (self.columns - 1).bit_length(), 1 << (self.value_columns - 1).bit_length()


def forward_bytes(rows: int, keys: int, stages: int, heads: Heads, card: Card) -> int:
    """Upper bound of FlexAttention's shared memory, as allocated by Triton 3.9.

    ``rows`` queries and ``keys`` at a time, with ``stages - 1`` loads of keys, values and biases in
    flight. Triton needs less if products stay in registers, as they often do.
    """
    columns, value_columns = heads.padded
    wgmma = card.capability >= (9, 0) and heads.size == 2  # reads a buffer while others fill
    in_flight = stages if wgmma else max(stages - 1, 1)
    logits = 4 * rows * keys * (1 + in_flight * heads.bias)
    loaded = in_flight * heads.size * keys * (columns + value_columns)
    total = heads.size * rows * columns + loaded + logits
    if card.capability < AMPERE and heads.size == 2:  # operands are rearranged
        total = max(total, (2 * rows + max(4 * rows, 6 * keys)) * columns)
    return total


def backward_bytes(side: int, heads: Heads, card: Card) -> int:
    """Upper bound for the backward pass, with blocks of ``side`` tokens and one stage."""
    columns, value_columns = heads.padded
    if card.capability < AMPERE and heads.size == 2:
        return 4 * side * (2 * columns + value_columns)
    return heads.size * side * (2 * (columns + value_columns) + side)


def options(card: Card, heads: Heads, gradients: bool = False) -> dict[str, int | bool] | None:
    """Return FlexAttention ``kernel_options`` that fit the card (with backward, if ``gradients``).

    Returns None if none fit.
    """
    # The separate kernel for fewer than 128 queries refuses 65 of them with two heads per key head,
    # and reads all keys of a band in one thread block.
    kernel_options: dict[str, int | bool] = {"FORCE_USE_FLEX_ATTENTION": True}
    room = card.shared - SLACK
    half = heads.size == 2
    # Default block sizes are faster where they fit, but they were chosen without a bias in mind.
    if card.shared >= H100 and not (heads.bias and half and heads.columns == 64):
        return kernel_options
    if card.shared >= A100 and not heads.bias and heads.columns in (64, 128, 256):
        return kernel_options
    tiles = (64, 64, 3), (64, 32, 3), (64, 32, 2), (32, 32, 2), (32, 16, 2), (16, 16, 1)
    tile = next((x for x in tiles if forward_bytes(*x, heads, card) <= room), None)
    # In float32, the default sizes of the backward pass are the smallest.
    sides = (64, 32, 16) if half else (16,)
    side = next((x for x in sides if backward_bytes(x, heads, card) <= room), None)
    if tile is None or (gradients and side is None):
        return None
    names = "fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_stages"
    kernel_options |= dict(zip(names, tile, strict=True))
    if side is not None and card.shared < A100:
        blocks = ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
        kernel_options |= dict.fromkeys(blocks, side) | {"bwd_num_stages": 1}
    return kernel_options
