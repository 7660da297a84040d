"""Checks the header of a GGUF file before the library reads it.

The library creates objects for every entry that a header declares, before it reads them. A file of
a few bytes can declare any number.
"""

import os
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, BinaryIO

from rope_ext.config.bounds import require_bounds

MOST_ENTRIES = 2**21
"""Entries of all arrays in a header; the largest vocabularies take 2**20 in several arrays."""
MOST_KEYS = 2**16
MOST_TENSORS = 2**16
MOST_CHARACTERS = 2**24
"""Bytes of a string."""
_MOST_AXES = 4
_DEPTH = 2  # of arrays in arrays
_SCALARS = "BbHhIif?"
"""Formats of the types 0 to 7; 8 is a string, and 9 an array."""
_LATER = {10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_FORMATS: Mapping[int, str] = {**dict(enumerate(_SCALARS)), **_LATER}


class _Header:
    """Reads numbers and strings in the order of the file; raises ValueError beyond its end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.left = size
        self.entries = 0

    def take(self, count: int) -> bytes:
        self.require(count)
        self.left -= count
        return self.file.read(count)

    def skip(self, count: int) -> None:
        self.require(count)
        self.left -= count
        self.file.seek(count, os.SEEK_CUR)

    def require(self, count: int) -> None:
        if count > self.left:
            raise ValueError(f"it declares {count} bytes where {self.left} are left; it is cut off")

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def string(self) -> str:
        size = self.number("Q")
        if size > MOST_CHARACTERS:
            raise ValueError(f"it declares a string of {size} bytes")
        return self.take(size).decode(errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a number, or pass over a string or array; returns the number, or None."""
        if kind in _FORMATS:
            return self.number(_FORMATS[kind])
        if kind == _STRING:
            self.string()
            return None
        if kind != _ARRAY or depth == _DEPTH:
            raise ValueError(f"it has a value of type {kind} at depth {depth}")
        self._array(depth)
        return None

    def _array(self, depth: int) -> None:
        kind = self.number("I")
        count = self.number("Q")
        self.entries += count
        if self.entries > MOST_ENTRIES:
            raise ValueError(f"it declares arrays of {self.entries} entries")
        if kind in _FORMATS:
            self.skip(count * struct.calcsize(f"<{_FORMATS[kind]}"))
            return
        for _ in range(count):
            self.value(kind, depth + 1)


def require_sound(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if a GGUF file declares more than it has, or than any model has."""
    there = os.stat(path)
    _require_sound(os.fspath(path), there.st_size, there.st_mtime_ns)


@lru_cache(maxsize=8)  # several readers ask, and a vocabulary takes a second
def _require_sound(path: str, size: int, changed: int) -> None:
    """Read the header of a file as it is now; ``size`` in bytes, ``changed`` in nanoseconds."""
    del changed  # asks again
    with open(path, "rb") as file:
        header = _Header(file, size)
        if header.take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = header.number("I")
        if version & 0xFFFF == 0:
            raise ValueError("it is big-endian; convert it to little-endian")
        if version not in (2, 3):
            raise ValueError(f"version {version} of GGUF is not supported")
        tensors = header.number("Q")
        keys = header.number("Q")
        if tensors > MOST_TENSORS or keys > MOST_KEYS:
            raise ValueError(f"it declares {tensors} tensors and {keys} keys")
        sizes: dict[str, Any] = {}
        for _ in range(keys):
            name = header.string()
            sizes[name] = header.value(header.number("I"))
        require_bounds(sizes, path)
        for _ in range(tensors):
            header.string()
            axes = header.number("I")
            if axes > _MOST_AXES:
                raise ValueError(f"it declares a tensor of {axes} axes")
            header.skip(8 * axes + 4 + 8)  # sizes, type and place
