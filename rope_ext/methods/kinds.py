"""What a method is.

A method changes the rotation angle ``t * theta_i``: a frequency method into ``t * h_i``, a
position method into ``g(t) * theta_i``. It sees the trained embedding as a :class:`Rope` and
answers in float64; it knows no model. Every method answers every question: what its kind does not
change is as in the trained embedding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rope_ext.errors import OptionError
from rope_ext.methods.checked import Checked
from rope_ext.methods.geometry import ChunkGap, Distance, Geometry
from rope_ext.methods.rope import MOST_TOKENS, Rope, geometric, reach
from rope_ext.methods.temperature import LogN, Temperature, as_temperature

FACTORS = (1.0, 1.1, 1.2, 1.3, 1.4)
"""What cos and sin are multiplied by, to begin with, where the best of it is not known."""
_QUERIES = 2**16
"""Looked at in a text, at most."""
# cos and sin of a pair with this wavelength ratio are 1 and 0 at any reachable position;
# tables in JSON cannot hold the infinity that a frequency of zero would ask for.
_NEVER_ROTATES = 1e30


@dataclass(frozen=True, kw_only=True)
class Method(Checked):
    """Base of all methods.

    Subclasses are frozen dataclasses whose fields are the public options.

    Args:
        factor: the context grows to this many times the trained length, at least 1.
        attention_factor: number that multiplies cosine and sine, as transformers names it, and so
            by its square the logits of the columns that rotate; None: the method's own, which is 1
            unless one was published with it.
        temperature: number that multiplies queries, after everything else that is done to them,
            and so the logits of all columns: ``"log_n"``, ``"llama4"``, ``"yarn"``, a number, or
            an object such as ``LogN(scale=0.5)``. It takes the place of the method's own; None:
            that one, which is 1 unless one was published with it.

    Raises:
        OptionError: an option is of the wrong kind or out of range.
    """

    aliases: ClassVar[tuple[str, ...]] = ()
    paper: ClassVar[str]
    use: ClassVar[str]  # the one-line reason to choose it

    kind: ClassVar[str]  # what it changes, in one word
    attends: ClassVar[bool] = False  # by a function of this package, proven with the weights
    works_within: ClassVar[bool] = False  # factor 1 is of use: nothing is extended
    start_tokens = 0  # positions below it keep the trained frequencies

    factor: float
    attention_factor: float | None = None
    temperature: str | float | Temperature | None = None

    def __post_init__(self) -> None:
        self.require_number("factor", minimum=1, maximum=MOST_TOKENS)
        if self.attention_factor is not None:
            self.require_number("attention_factor", above=0, maximum=100)
        if self.temperature is not None:
            made = as_temperature(self.temperature)
            valid = (
                "'log_n', 'llama4', 'yarn', a positive number of at most 100, or an object such as "
                "rope_ext.LogN(scale=0.5)"
            )
            self.require("temperature", made is not None, valid)
            self.set("temperature", made)

    @property
    def adapts(self) -> bool:
        """Whether frequencies depend on the sequence."""
        return False

    def target_length(self, rope: Rope) -> int:
        """Context after the extension, tokens."""
        return reach(self.factor, rope.length)

    def check(self, length: int | None = None) -> None:
        """Raise OptionError where nothing would be extended, without a model at hand.

        Args:
            length: trained context, tokens; None leaves out what depends on it.
        """
        idle = self.factor <= 1
        if length is not None:  # a factor may be too close to 1 for a single token
            idle = self.target_length(Rope.geometric(1e4, 2, length)) <= length
        if idle and not self.works_within:
            raise OptionError(
                f"{self.name}: factor={self.factor!r} would not extend anything; it must be a "
                f"number greater than 1 (4 makes 4 times the trained context)"
            )

    def resolved(self, rope: Rope) -> Method:
        """The same method with every option filled in.

        Raises:
            OptionError: the options do not go with the trained length.
        """
        return self

    def frequencies(self, rope: Rope, length: int) -> torch.Tensor:
        """Radians per token in a sequence of ``length`` tokens: float64, ``[dim / 2]``."""
        return rope.inv_freq

    def attention_scaling(self, rope: Rope) -> float:
        """Number that multiplies cos and sin (its square multiplies the attention logits)."""
        if self.attention_factor is not None:
            return self.attention_factor
        return self.own_scaling(rope)

    def own_scaling(self, rope: Rope) -> float:
        """The published ``attention_factor``."""
        return 1.0

    def distances(self, rope: Rope, length: int, distance: torch.Tensor) -> torch.Tensor:
        """The distances that the last of ``length`` tokens uses in place of the real ones.

        Args:
            rope: the trained embedding.
            length: tokens.
            distance: from the last token back, whole numbers below ``length``; float64, ``[n]``.

        Returns:
            Tokens, ``[n]``, or ``[n, dim / 2]`` where every pair uses its own; NaN where a token
            is hidden.
        """
        return distance

    def span(self, rope: Rope, length: int) -> torch.Tensor:
        """How many distances any two of ``length`` tokens use: one more than the largest.

        Float64, ``[1]``, or ``[dim / 2]`` where every pair uses its own.
        """
        return torch.tensor([length], dtype=torch.float64, device="cpu")

    def tempered(self, rope: Rope) -> Temperature | None:
        """The temperature in force with every option filled in; None: 1 everywhere."""
        given = as_temperature(self.temperature) or self.own_temperature()
        if given is None:
            return None
        filled = given.filled(rope.length, self.factor)
        return None if filled.constant == 1 else filled

    def own_temperature(self) -> Temperature | None:
        """The published ``temperature``; None: none."""
        return None

    def query_scaling(self, t: torch.Tensor, rope: Rope) -> torch.Tensor | None:
        """Number that multiplies the query at position ``t`` (float64); None: none."""
        tempered = self.tempered(rope)
        return None if tempered is None else tempered.at(t)

    def grids(self, rope: Rope) -> dict[str, tuple[Any, ...]]:
        """The options that :func:`rope_ext.calibrate` finds, and the values that it begins with.

        They are looked at in this order. A value that the method or a model refuses is left out.
        """
        return {"attention_factor": FACTORS}


@dataclass(frozen=True, kw_only=True)
class FrequencyMethod(Method):
    """Base of all frequency methods.

    Only :meth:`inv_freq` must be overridden.
    """

    kind: ClassVar[str] = "frequency"

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        """``h``: float64, shape ``[dim / 2]``, radians per token."""
        raise NotImplementedError

    def frequencies(self, rope: Rope, length: int) -> torch.Tensor:
        return self.inv_freq(rope)

    def extends(self, rope: Rope) -> bool:
        """Whether any pair turns more slowly, and so meets trained angles for longer."""
        return bool((self.inv_freq(rope) < rope.inv_freq * (1 - 1e-9)).any())

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        """``config.rope_parameters`` with which plain transformers builds the same embedding."""
        return longrope_table(rope, self.inv_freq(rope), self.factor, self.attention_scaling(rope))


Map = Callable[[torch.Tensor], torch.Tensor] | float
"""A position as a function of a token's own (float64, ``[...]``), or the same for all tokens.

The function answers in the same shape, or in ``[..., pairs]`` with a position for every pair.
"""


def own(t: torch.Tensor) -> torch.Tensor:
    """The position that a token has anyway."""
    return t


def at(to: Map, t: torch.Tensor) -> torch.Tensor:
    """Where ``to`` puts the tokens at ``t`` (``[...]``): ``[..., 1]``, or ``[..., pairs]``."""
    put = to(t) if callable(to) else torch.full_like(t, to)
    return put if put.ndim > t.ndim else put.unsqueeze(-1)


@dataclass(frozen=True)
class Band:
    """The keys of one band and the positions used in it.

    Args:
        geometry: which keys each query sees in this band.
        query: position at which a query is rotated.
        key: position at which a key is rotated.
    """

    geometry: Geometry
    query: Map
    key: Map

    def distances(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Distances in use; NaN where a query does not see a key in this band.

        Token positions (float64), broadcast against each other to ``[...]``; returns ``[..., 1]``,
        or ``[..., pairs]`` where every pair has its own.
        """
        used = at(self.query, query) - at(self.key, key)
        return torch.where(self.geometry.sees(query, key).unsqueeze(-1), used, math.nan)


@dataclass(frozen=True, kw_only=True)
class PositionMethod(Method):
    """Base of all position methods.

    Options left at None follow from ``factor`` and the trained length.
    """

    kind: ClassVar[str] = "position"
    attends: ClassVar[bool] = True
    by_pair: ClassVar[bool] = False  # every pair is at positions of its own
    fits: ClassVar[str] = "distances that were trained"  # what extends anything, in words

    def grids(self, rope: Rope) -> dict[str, tuple[Any, ...]]:
        # It costs nothing here, and a hook per layer under a frequency method.
        return {**super().grids(rope), "temperature": (LogN(),)}

    def resolved(self, rope: Rope) -> PositionMethod:
        return self

    def bands(self) -> tuple[Band, ...]:
        """Disjoint bands, together all that a query sees; of a :meth:`resolved` method.

        Keys are cached with the rotation of the last band.
        """
        raise NotImplementedError

    def distances(self, rope: Rope, length: int, distance: torch.Tensor) -> torch.Tensor:
        query = torch.full_like(distance, length - 1)
        used = torch.full_like(distance, math.nan).unsqueeze(-1)
        for band in self.resolved(rope).bands():
            found = band.distances(query, query - distance)
            used = torch.where(found.isnan(), used, found)
        return used.squeeze(-1)

    def span(self, rope: Rope, length: int) -> torch.Tensor:
        return spans(self.resolved(rope).bands(), length)

    def check(self, length: int | None = None) -> None:
        if length is None:
            super().check()
        else:
            self.reached(Rope.geometric(1e4, 2, length))  # no frequency matters

    def reached(self, rope: Rope) -> int:
        """Tokens, up to the target length, within which every distance in use was trained.

        Where every pair has its own, no distance is new to one that turned all the way round in
        training, or never turns.

        Raises:
            OptionError: the options do not go with the trained length, or extend nothing.
        """
        super().check(rope.length)
        length, target = rope.length, self.target_length(rope)
        bands = self.resolved(rope).bands()
        # A distance of the trained length itself is one beyond the last; the published caps use it.
        reached, beyond, middle = length, target + 1, target
        while beyond - reached > 1:  # they only grow with the text
            if self._known(rope, spans(bands, middle)):
                reached = middle
            else:
                beyond = middle
            middle = (reached + beyond) // 2
        if target > length:
            extends = reached > length + 1 or reached == target
        else:
            extends = bool((spans(bands, length) < length).any())
        if not extends:
            self._refuse_idle(rope, bands)
        return reached

    @staticmethod
    def _known(rope: Rope, used: torch.Tensor) -> bool:
        """Whether as many distances as ``used`` (:func:`spans`) were trained."""
        within = used <= rope.length + 1
        if len(used) > 1:
            within |= (rope.rotations >= 1) | (rope.rotations == 0)
        return bool(within.all())

    def _refuse_idle(self, rope: Rope, bands: tuple[Band, ...]) -> None:
        free = [field.name for field in dataclasses.fields(self) if field.default is None]
        given = {name: getattr(self, name) for name in free if getattr(self, name) is not None}
        own = dataclasses.replace(self, **dict.fromkeys(given)).resolved(rope)
        defaults = ", ".join(f"{name}={getattr(own, name)!r}" for name in given)
        options = ", ".join(f"{name}={value!r}" for name, value in given.items())
        length = rope.length
        used = distances_in_use(bands, max(self.target_length(rope), length + 2)) - 1
        raise OptionError(
            f"{self.name}: {options or f'factor={self.factor!r}'} extends nothing on {length} "
            f"trained tokens: distances up to {used:g} stay in use; it takes {self.fits}"
            + (f"; leave out {', '.join(given)} for {defaults}" if given else "")
        )

    def require_resolved(self, option: str, holds: bool, valid: str, rope: Rope) -> None:
        """As :meth:`require`, where what is valid depends on the trained length."""
        self.require(option, holds, f"{valid} (trained length {rope.length} tokens)")


def distances_in_use(bands: tuple[Band, ...], length: int) -> float:
    """One more than the largest distance that the maps make of any within ``length`` tokens."""
    return float(spans(bands, length).max())


def spans(bands: tuple[Band, ...], length: int) -> torch.Tensor:
    """The same of every pair that has its own distances: float64, ``[1]`` or ``[pairs]``."""
    m = torch.arange(
        length - 1, -1, -math.ceil(length / _QUERIES), dtype=torch.float64, device="cpu"
    )
    largest = torch.zeros(1, dtype=torch.float64, device="cpu")
    for band in bands:
        n = torch.zeros_like(m)  # of the keys in a band, the first has the smallest position
        geometry = band.geometry
        if isinstance(geometry, Distance) and geometry.last is not None:
            n = (m - geometry.last + 1).clamp(min=0)
        elif isinstance(geometry, ChunkGap):
            n = ((m // geometry.size - geometry.first) * geometry.size).clamp(min=0)
        largest = torch.maximum(largest, band.distances(m, n).nan_to_num(nan=0).amax(0))
    return largest + 1


@dataclass(frozen=True, kw_only=True)
class LogScaled(PositionMethod):
    """A position method with the published scaling of queries by the logarithm of the length.

    Args:
        log_n: ``temperature="log_n"`` unless another one is given.

    Su 2023, kexue.fm/archives/8823.
    """

    log_n: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("log_n", isinstance(self.log_n, bool), "True or False")

    def grids(self, rope: Rope) -> dict[str, tuple[Any, ...]]:
        return {**super().grids(rope), "temperature": (LogN(), 1.0)}

    def own_temperature(self) -> Temperature | None:
        return LogN() if self.log_n else None


@dataclass(frozen=True, kw_only=True)
class Tempered(PositionMethod):
    """A position method whose paper has no temperature, and which is better with ``log_n``.

    Args:
        published: as in the paper, which is ``temperature=1`` unless another one is given.
    """

    published: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("published", isinstance(self.published, bool), "True or False")
        if self.published:  # stored as the option that it stands for, so that equal is equal
            self.set("temperature", self.temperature or as_temperature(1.0))
            self.set("published", False)

    def grids(self, rope: Rope) -> dict[str, tuple[Any, ...]]:
        return {**super().grids(rope), "temperature": (LogN(), 1.0)}

    def own_temperature(self) -> Temperature:
        return LogN()


@dataclass(frozen=True, kw_only=True)
class DynamicMethod(FrequencyMethod):
    """A frequency method that depends on the length of the sequence it serves.

    The length never changes within a sequence, because the cached values of deeper layers were
    computed under the old frequencies and cannot be turned after the fact.

    Args:
        length: tokens; fixes the length for all sequences. None: every sequence keeps the one
            it starts with, which is prompt plus ``max_new_tokens`` under ``generate``, that of
            the first forward otherwise. Padding before it and other documents in its row do not
            count.
    """

    length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("length")

    def inv_freq_at(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        """``h`` for each of ``lengths`` (float64, ``[rows]``, tokens): ``[rows, dim / 2]``."""
        raise NotImplementedError

    def attention_scaling_at(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        """Number that multiplies cos and sin for each of ``lengths``: float64, ``[rows]``."""
        if self.attention_factor is not None:
            return torch.full_like(lengths, self.attention_factor)
        return self.own_scaling_at(rope, lengths)

    def own_scaling_at(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        """The published ``attention_factor`` for each of ``lengths``."""
        return torch.ones_like(lengths)

    @property
    def adapts(self) -> bool:
        """Whether frequencies still depend on the sequence (no ``length`` was given)."""
        return self.length is None

    def _fixed(self, rope: Rope) -> torch.Tensor:
        return _lengths(self.target_length(rope) if self.length is None else self.length)

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        """``h`` at ``length``, or at the full extended context when none was given."""
        return self.inv_freq_at(rope, self._fixed(rope))[0]

    def frequencies(self, rope: Rope, length: int) -> torch.Tensor:
        return self.inv_freq_at(rope, _lengths(length))[0] if self.adapts else self.inv_freq(rope)

    def own_scaling(self, rope: Rope) -> float:
        return float(self.own_scaling_at(rope, self._fixed(rope))[0])


def _lengths(length: int) -> torch.Tensor:
    return torch.tensor([length], dtype=torch.float64, device="cpu")


def longrope_table(
    rope: Rope, inv_freq: torch.Tensor, factor: float, attention_scaling: float
) -> dict[str, Any]:
    """Any fixed frequency map as transformers' ``longrope``: ``lambda_i = theta_i / h_i``."""
    theta = geometric(rope.base, rope.dim)
    table = torch.where(inv_freq > 0, theta / inv_freq, _NEVER_ROTATES).tolist()
    return {
        "rope_type": "longrope",
        "short_factor": table,
        "long_factor": list(table),
        "factor": float(factor),
        "attention_factor": float(attention_scaling),
        "original_max_position_embeddings": rope.length,
    }
