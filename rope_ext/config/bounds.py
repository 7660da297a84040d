"""Bounds on the sizes in a configuration, checked before a library builds anything of that size."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from rope_ext.errors import LoadError, brief

MOST_BYTES = 16 * 2**20
"""Size of the largest config.json that is read."""
_BOUNDS = (
    (re.compile(r"layers?$|layer_count$|block_count$|blocks$|^depth$"), 2**12),
    (re.compile(r"experts?$|expert_count$"), 2**14),
    (re.compile(r"heads?$|heads_kv$|head_count$|head_count_kv$"), 2**14),
    (re.compile(r"head_dim$|head_size$|key_length$|value_length$|dimension_count$"), 2**16),
    (re.compile(r"hidden_size$|n_embd$|d_model$|embedding_length$|(^|_)dim$"), 2**22),
    (re.compile(r"labels$"), 2**20),  # transformers makes a name for each
    (re.compile(r"^r$"), 2**16),  # of an adapter
)
"""The largest number in a field, by its name; the last part of a GGUF key counts.

Each is far above every published model.
"""
_WIDEST = 2**24  # columns of all heads of a layer
_SECONDS = 5.0  # to look for the field that a library cannot read


def require_bounds(values: Mapping[str, Any], where: str) -> None:
    """Raise LoadError if a configuration, as JSON or GGUF keys, has a size that no model has."""
    for name, number, most in _sizes(values):
        if number > most:
            raise LoadError(
                f"{where} has {name}={number}, and no model has more than {most}; "
                f"the file is damaged, so download it again"
            )


def culprit(values: Mapping[str, Any], build: Callable[[dict[str, Any]], Any]) -> str | None:
    """Return the field because of which ``build(values)`` fails, as ``name=value``; None: several.

    The first one without which it succeeds.
    """
    end = time.monotonic() + _SECONDS
    with suppress(Exception):  # of another library, on values that make no sense
        build(dict(values))
        return None  # the field is not among them
    for name, value in values.items():
        if time.monotonic() > end:
            break
        if name == "rope_type" and isinstance(value, str):
            continue  # without it, no other field of its entry is read
        others = {other: values[other] for other in values if other != name}
        with suppress(Exception):
            build(others)
            part = None
            if isinstance(value, Mapping):
                part = culprit(value, partial(_build_with, build, others, name))
            return f"{name}={brief(value)}" if part is None else f"{name}.{part}"
    return None


def _build_with(
    build: Callable[[dict[str, Any]], Any], others: Mapping[str, Any], name: str, value: Any
) -> Any:
    return build({**others, name: value})


def _sizes(values: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield the name, value and bound of every size; nested ones, too."""
    heads = 0
    columns = 0
    for name, value in values.items():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                yield from _sizes(part)
        found = _largest(value)
        if found is None:
            continue
        bounds = [most for pattern, most in _BOUNDS if pattern.search(str(name))]
        if bounds:
            yield str(name), found, min(bounds)
        if re.search(r"attention_heads$|n_head$|head_count$", str(name)):
            heads = max(heads, found)
        if re.search(r"head_dim$|key_length$", str(name)):
            columns = max(columns, found)
    yield "heads times head_dim", heads * columns, _WIDEST


def _largest(value: Any) -> int | None:
    """Return an integer, or the largest of a list; None for other values."""
    several = value if isinstance(value, list) else [value]
    return max((one for one in several if type(one) is int), default=None)
