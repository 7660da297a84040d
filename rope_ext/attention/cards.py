"""What a GPU of CUDA can do, known before a kernel is compiled for it."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass

import torch

AMPERE = (8, 0)
"""The first capability with torch's flash kernel and with bfloat16."""


@dataclass(frozen=True)
class Card:
    """A GPU and the software that compiles kernels for it.

    Args:
        capability: such as ``(8, 6)``.
        shared: bytes of shared memory that one block of threads can have.
        compiles: whether Triton and its C compiler are installed.
    """

    capability: tuple[int, int]
    shared: int
    compiles: bool

    @property
    def version(self) -> str:
        """The capability as NVIDIA writes it, such as ``"8.6"``."""
        return ".".join(map(str, self.capability))


@torch.compiler.assume_constant_result
def card(device: torch.device) -> Card:
    """The card of a device of CUDA."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return card_at(index)


@functools.cache
def card_at(index: int) -> Card:
    found = torch.cuda.get_device_properties(index)
    # ROCm does not have the second attribute; its cards have 64 KiB.
    shared = getattr(found, "shared_memory_per_block_optin", 2**16)
    return Card((found.major, found.minor), shared, compiles() and found.major >= 7)


def compiles() -> bool:
    """Whether Triton is installed, with the C compiler that it needs; on Windows it has its own."""
    if importlib.util.find_spec("triton") is None:
        return False
    compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    return sys.platform == "win32" or any(shutil.which(x) for x in compilers if x)


@dataclass(frozen=True)
class Heads:
    """Heads of attention, as the kernel sees them: columns are padded to a power of two.

    Args:
        columns: of queries and keys.
        value_columns: of values.
        size: bytes of a number.
        bias: whether logits get a bias by distance.
    """

    columns: int
    value_columns: int
    size: int
    bias: bool = False

    def padded(self) -> Heads:
        columns, value_columns = (
            1 << (x - 1).bit_length() for x in (self.columns, self.value_columns)
        )
        return Heads(columns, value_columns, self.size, self.bias)

    def gradients(self, side: int, card: Card) -> int:
        """As :meth:`Tile.shared`, of the backward pass with blocks of ``side`` tokens."""
        if card.capability < AMPERE and self.size == 2:
            return 4 * side * (2 * self.columns + self.value_columns)
        both = 2 * side * (self.columns + self.value_columns)  # also of the output's gradient
        return self.size * (both + side * side)


@dataclass(frozen=True)
class Tile:
    """Sizes of FlexAttention's kernel.

    Args:
        rows: queries of a block.
        keys: keys that it takes at a time.
        stages: loads in flight, plus one.
    """

    rows: int
    keys: int
    stages: int

    def shared(self, heads: Heads, card: Card) -> int:
        """Bytes of shared memory at most, as Triton 3.9 allocates them.

        Queries, keys, values and biases in flight, and the logits. Often products stay in
        registers or share memory with keys, and Triton needs less (docs/speed.md).
        """
        wgmma = card.capability >= (9, 0) and heads.size == 2  # reads a buffer while others fill
        in_flight = self.stages if wgmma else max(self.stages - 1, 1)
        logits = 4 * self.rows * self.keys
        loaded = in_flight * heads.size * self.keys * (heads.columns + heads.value_columns)
        total = heads.size * self.rows * heads.columns + loaded + logits
        if heads.bias:
            total += in_flight * logits
        if card.capability < AMPERE and heads.size == 2:  # operands are rearranged
            arranged = max(4 * self.rows, 6 * self.keys) * heads.columns
            total = max(total, 2 * self.rows * heads.columns + arranged)
        return total


HOPPER = 227 * 2**10
"""Bytes of an H100, where FlexAttention's own sizes fit but for one: see :func:`_own_sizes_fit`."""
ENOUGH = 163 * 2**10
"""Bytes of an A100, where they fit for many heads."""
SLACK = 2**10
_PREFILL = [
    Tile(rows, keys, stages)
    for rows, keys, stages in (
        (64, 64, 3), (64, 32, 3), (64, 32, 2), (32, 32, 2), (32, 16, 2), (16, 16, 1)
    )
]  # fmt: skip


def options(card: Card, heads: Heads, gradients: bool = False) -> dict[str, int | bool] | None:
    """``kernel_options`` of FlexAttention that fit the card; None if none do.

    Args:
        card: the GPU.
        heads: sizes of a head.
        gradients: whether there is a backward pass.
    """
    padded, room = heads.padded(), card.shared - SLACK
    # For fewer than 128 queries there is another kernel, which refuses 65 of them under two heads
    # for each key head, and reads all keys of a band in one block of threads.
    always: dict[str, int | bool] = {"FORCE_USE_FLEX_ATTENTION": True}
    if _own_sizes_fit(card, heads):
        return always
    tile = next((x for x in _PREFILL if x.shared(padded, card) <= room), None)
    # In float32, FlexAttention's own sizes of the backward pass are the smallest ones.
    sides = (64, 32, 16) if heads.size == 2 else (16,)
    side = next((x for x in sides if padded.gradients(x, card) <= room), None)
    if tile is None or (gradients and side is None):
        return None
    forward = {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "num_stages": tile.stages}
    made = always | {f"fwd_{name}": number for name, number in forward.items()}
    if side is not None and card.shared < ENOUGH:
        blocks = dict.fromkeys(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), side)
        made |= {f"bwd_{name}": number for name, number in {**blocks, "num_stages": 1}.items()}
    return made


def _own_sizes_fit(card: Card, heads: Heads) -> bool:
    """Whether the card has enough for the sizes of prefill that FlexAttention chooses by itself.

    It has tuned ones for 64, 128 and 256 columns, and for 192 in half precision, without a bias
    in mind; for others it takes 64 x 64 in 3 stages, which float32 heads of 96 columns exceed.
    """
    half = heads.size == 2
    if card.shared >= HOPPER:
        return not (heads.bias and half and heads.columns == 64)  # 128 x 128 in 3 stages
    if card.shared < ENOUGH:
        return False
    if heads.columns <= 64 or heads.bias:
        return heads.columns <= 64
    return heads.columns in (128, 256) or (half and (heads.columns < 128 or heads.columns == 192))
