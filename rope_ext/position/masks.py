"""Recognises the mask functions of transformers by their closures.

transformers combines simple functions of batch, head, query and key into one, and passes only the
result. The only way to tell them apart is ``__qualname__`` and the closure, which are not public:
:data:`CHECKED` are the versions of transformers on which this was checked.

An unknown function is treated as a mask of any shape: its layer gets dense logits, which is correct
but slow. Packed documents that are not recognized raise an error, since their positions decrease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers.masking_utils import causal_mask_function

CHECKED = ("5.17", "5.23")
"""The first and the last version of transformers on which this was checked."""

_PACKED = "packed_sequence_mask_function."
_WINDOW = "sliding_window_overlay."
_COMBINED = ("and_masks.", "remap_positions_for_packed_sequence.")
_UNION, _BLOCKS = "or_masks.", "blockwise_overlay."


def is_plain(function: Callable) -> bool:
    """Whether a mask function of transformers is causal, perhaps in a window or by document."""
    return all(
        part is causal_mask_function or _is(part, _PACKED, _WINDOW) for part in _parts(function)
    )


def documents_of(function: Callable) -> torch.Tensor | None:
    """The documents that a mask function keeps apart, ``[rows, keys]``."""
    for part in _parts(function):
        if _is(part, _PACKED) and part.__closure__:
            return part.__closure__[0].cell_contents
    return None


def _parts(function: Callable) -> Iterator[Callable]:
    """The simple mask functions that transformers has combined into ``function`` with ``and``."""
    if _is(function, *_COMBINED):
        for part in _inner(function):
            yield from _parts(part)
        return
    if _is(function, _UNION):  # without images there are no blocks of tokens that see each other
        inner = [part for part in _inner(function) if not _is(part, _BLOCKS) or _blocks(part)]
        if len(inner) == 1:
            yield from _parts(inner[0])
            return
    yield function


def _inner(function: Callable) -> Iterator[Callable]:
    """The functions in the closure of ``function``."""
    for cell in function.__closure__ or ():
        inner = cell.cell_contents
        yield from filter(callable, inner if isinstance(inner, tuple) else (inner,))


def _blocks(overlay: Callable) -> bool:
    """Whether any tokens belong to a block; those of no block have a negative number."""
    return any(
        bool((cell.cell_contents >= 0).any())
        for cell in overlay.__closure__ or ()
        if isinstance(cell.cell_contents, torch.Tensor)
    )


def _is(function: Callable, *made_by: str) -> bool:
    """Whether ``function`` was defined by transformers within one of the functions ``made_by``."""
    its = getattr(function, "__module__", None) == causal_mask_function.__module__
    return its and getattr(function, "__qualname__", "").startswith(made_by)
