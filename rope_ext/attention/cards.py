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

    def shared(self, columns: int, value_columns: int, size: int) -> int:
        """Bytes of shared memory: queries, keys and values in flight, and their products.

        Triton 3.9 gave 151,552 bytes for 32 x 64 in 3 stages of 256 columns in half precision,
        which is this; 147,968 for 128 x 32 in 3 stages of 128 columns in float32, which is 512
        more; and 98,304 for 128 x 64 in 3 stages of 128 columns in half precision, where the
        products stay in registers, which is 16,384 less.
        """
        columns, value_columns = (1 << (x - 1).bit_length() for x in (columns, value_columns))
        in_flight = max(self.stages - 1, 1) * self.keys * (columns + value_columns)
        return size * (self.rows * columns + in_flight + self.rows * self.keys)


ENOUGH = 163 * 2**10
"""Bytes with which FlexAttention's own sizes fit: those of an A100."""
SLACK = 2**10
_PREFILL = [
    Tile(rows, keys, stages)
    for rows, keys, stages in (
        (64, 64, 3), (64, 32, 3), (64, 32, 2), (32, 32, 2), (32, 16, 2), (16, 16, 1)
    )
]  # fmt: skip
_DECODE = [Tile(16, keys, 1) for keys in (64, 32, 16)]


def options(
    card: Card, columns: int, value_columns: int, size: int, decode: bool
) -> dict[str, int | bool] | None:
    """``kernel_options`` of FlexAttention that fit the card; None if none do.

    Args:
        card: the GPU.
        columns: of a head of queries and keys.
        value_columns: of a head of values.
        size: bytes of a number.
        decode: whether there is one query, for which there is another kernel.
    """
    if card.shared >= ENOUGH:
        return {}
    room = card.shared - SLACK
    for tile in _DECODE if decode else _PREFILL:
        if tile.shared(columns, value_columns, size) <= room:
            if decode:
                return {"BLOCK_N": tile.keys, "num_stages": 1}
            # The backward pass has keys, values, queries and gradients at once.
            side = next(x for x in (64, 32, 16) if 2 * x * 2 * columns * size <= room or x == 16)
            blocks = dict.fromkeys(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), side)
            backward = {**blocks, "num_stages": 1}
            forward = {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "num_stages": tile.stages}
            return {
                "FORCE_USE_FLEX_ATTENTION": True,  # that of decoding has other sizes
                **{f"fwd_{name}": number for name, number in forward.items()},
                **{f"bwd_{name}": number for name, number in backward.items()},
            }
    return None
