"""What a method is, and the registry of all of them.

A method changes the rotation angle ``t * theta_i``: a frequency method into ``t * h_i``, a
position method into ``g(t) * theta_i``. It sees the trained embedding as a :class:`Rope` and
answers in float64; it knows no model.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from rope_ext.errors import (
    OptionError,
    RopeExtError,
    UnknownMethodError,
    UnsupportedModelError,
    nearest,
)
from rope_ext.methods.geometry import ChunkGap, Distance, Geometry

MOST_TOKENS = 2**31 - 1
"""The longest context; other readers of config.json keep it in 32 bits."""
LARGEST = 1e30
"""Of any option; the smallest but 0 is its inverse. Float32 holds both."""
_QUERIES = 2**16
"""Looked at in a text, at most."""
# cos and sin of a pair with this wavelength ratio are 1 and 0 at any reachable position;
# tables in JSON cannot hold the infinity that a frequency of zero would ask for.
_NEVER_ROTATES = 1e30


@dataclass(frozen=True)
class Rope:
    """One trained rotary embedding.

    Args:
        inv_freq: ``theta``, float64, shape ``[dim / 2]``, radians per token, fastest first.
        base: ``b`` of ``theta_i = b ** (-2 i / dim)`` (``rope_theta``).
        length: trained context in tokens (``original_max_position_embeddings``).
    """

    inv_freq: torch.Tensor
    base: float
    length: int

    @classmethod
    def geometric(cls, base: float, dim: int, length: int) -> Rope:
        """The unscaled embedding of ``base``, exact in float64."""
        return cls(geometric(base, dim), base, length)

    @property
    def dim(self) -> int:
        """Rotary dimension: two per frequency."""
        return 2 * self.inv_freq.numel()

    @property
    def rotations(self) -> torch.Tensor:
        """Full turns of each pair within the trained context: ``length * theta / (2 pi)``."""
        return self.length * self.inv_freq / (2 * math.pi)

    def rotation_ramp(self, low: float, high: float) -> torch.Tensor:
        """Linear in rotations: 0 below ``low``, 1 above ``high``, float64, ``[dim / 2]``."""
        return ((self.rotations - low) / (high - low)).clamp(0, 1)

    @property
    def ntk_exponent(self) -> float:
        """``d / (d - 2)``: a base times ``s`` to this power divides the slowest pair by ``s``."""
        self._require_pairs()
        return self.dim / (self.dim - 2)

    def _require_pairs(self) -> None:
        """Raise where the base changes nothing: the fastest pair turns by 1 whatever the base."""
        if self.dim == 2:
            raise UnsupportedModelError(
                "one pair of columns rotates in each head of this model, and its frequency does "
                "not depend on the base; use a method that divides frequencies, such as 'pi'"
            )

    def interpolated(self, kept: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        """Frequencies of which the share ``kept`` stays and the rest is divided by ``factor``."""
        return (1 - kept) * self.inv_freq / factor + kept * self.inv_freq

    def with_base_times(self, scale: float | torch.Tensor) -> torch.Tensor:
        """The frequencies of the base times ``scale`` (``[...]``): ``[..., dim / 2]``."""
        self._require_pairs()
        scale = torch.as_tensor(scale, dtype=torch.float64, device="cpu")
        return self.inv_freq * scale.unsqueeze(-1) ** -_exponents(self.dim)


def geometric(base: float, dim: int) -> torch.Tensor:
    """``base ** (-2 i / dim)`` in float64, shape ``[dim / 2]``."""
    return float(base) ** -_exponents(dim)


def reach(factor: float, length: int) -> int:
    """Context after an extension of ``length`` tokens, tokens.

    Raises:
        OptionError: it is more than MOST_TOKENS.
    """
    if factor > MOST_TOKENS / length:
        raise OptionError(
            f"factor={factor!r} is not valid; {length} trained tokens can be extended to at most "
            f"{MOST_TOKENS}, by a factor of {MOST_TOKENS // length}"
        )
    return math.ceil(round(factor * length, 6))  # 1.1 * 1500 is 1650.0000000000002


def plain_number(value: Any) -> int | float | None:
    """A real number of any library's kind (numpy's, a Fraction) as Python's; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    except OverflowError:  # of a Fraction
        return math.inf


def whole_number(value: Any, minimum: int = 1) -> int | None:
    """``value`` as a number of tokens from ``minimum`` to MOST_TOKENS; None: it is none."""
    number = plain_number(value)
    return number if isinstance(number, int) and minimum <= number <= MOST_TOKENS else None


def _exponents(dim: int) -> torch.Tensor:
    """``2 i / dim``, float64, shape ``[dim / 2]``."""
    return torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods.

    Subclasses are frozen dataclasses whose fields are the public options.

    Args:
        factor: the context grows to this many times the trained length, at least 1.

    Raises:
        OptionError: an option is of the wrong kind or out of range.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    paper: ClassVar[str]
    use: ClassVar[str]  # the one-line reason to choose it

    works_within: ClassVar[bool] = False  # factor 1 is of use: nothing is extended

    factor: float

    def __post_init__(self) -> None:
        self.require_number("factor", minimum=1, maximum=MOST_TOKENS)

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

    def options(self) -> dict[str, Any]:
        """The options and their values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def require(self, option: str, holds: bool, valid: str) -> None:
        """Raise OptionError naming the value and the valid ones unless ``holds``."""
        if not holds:
            value = getattr(self, option)
            raise OptionError(f"{self.name}: {option}={value!r} is not valid; it must be {valid}")

    def require_choice(self, option: str, *choices: str) -> None:
        """Raise OptionError unless the option is one of these words."""
        value = getattr(self, option)
        valid = " or ".join(map(repr, choices))
        self.require(option, isinstance(value, str) and value in choices, valid)

    def require_number(
        self,
        option: str,
        minimum: float | None = None,
        above: float | None = None,
        maximum: float = LARGEST,
    ) -> None:
        """Raise OptionError unless the option is a finite number in its range."""
        number = plain_number(getattr(self, option))
        finite = isinstance(number, int) or (number is not None and math.isfinite(number))
        valid, holds = "a finite number", finite
        if minimum is not None:
            valid, holds = f"{valid} of at least {minimum}", holds and number >= minimum
        if above is not None:
            valid, holds = f"{valid} greater than {above}", holds and number > above
        self.require(option, holds, valid)
        self.require(option, number <= maximum, f"at most {maximum}")
        self.require(option, not 0 < number < 1 / LARGEST, f"at least {1 / LARGEST}")
        self.set(option, number)

    def require_tokens(self, option: str, minimum: int = 1, optional: bool = True) -> None:
        """Raise OptionError unless the option is a whole number of tokens, or None."""
        value = getattr(self, option)
        if optional and value is None:
            return
        number = whole_number(value, minimum)
        valid = f"a whole number of at least {minimum}{', or None' if optional else ''}"
        if isinstance(plain_number(value), int) and value > MOST_TOKENS:
            valid = f"at most {MOST_TOKENS} tokens"
        self.require(option, number is not None, valid)
        self.set(option, number)

    def set(self, option: str, value: Any) -> None:
        """Give an option its final form while the object is being made."""
        object.__setattr__(self, option, value)


@dataclass(frozen=True, kw_only=True)
class FrequencyMethod(Method):
    """Base of all frequency methods.

    Only :meth:`inv_freq` must be overridden.
    """

    start_tokens = 0  # positions below it keep the trained frequencies

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        """``h``: float64, shape ``[dim / 2]``, radians per token."""
        raise NotImplementedError

    def extends(self, rope: Rope) -> bool:
        """Whether any pair turns more slowly, and so meets trained angles for longer."""
        return bool((self.inv_freq(rope) < rope.inv_freq * (1 - 1e-9)).any())

    def attention_scaling(self, rope: Rope) -> float:
        """Number that multiplies cos and sin (its square multiplies the attention logits)."""
        return 1.0

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        """``config.rope_parameters`` with which plain transformers builds the same embedding."""
        return longrope_table(rope, self.inv_freq(rope), self.factor, self.attention_scaling(rope))


Map = Callable[[torch.Tensor], torch.Tensor] | float
"""A position as a function of a token's own (float64, ``[...]``), or the same for all tokens."""


def own(t: torch.Tensor) -> torch.Tensor:
    """The position that a token has anyway."""
    return t


def at(to: Map, t: torch.Tensor) -> torch.Tensor:
    """Where ``to`` puts the tokens at ``t``."""
    return to(t) if callable(to) else torch.full_like(t, to)


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

        Token positions (float64), broadcast against each other.
        """
        used = at(self.query, query) - at(self.key, key)
        return torch.where(self.geometry.sees(query, key), used, math.nan)


@dataclass(frozen=True, kw_only=True)
class PositionMethod(Method):
    """Base of all position methods.

    Options left at None follow from ``factor`` and the trained length.
    """

    fits: ClassVar[str] = "distances that were trained"  # what extends anything, in words

    def resolved(self, rope: Rope) -> PositionMethod:
        """The same method with every option filled in.

        Raises:
            OptionError: the options do not go with the trained length.
        """
        return self

    def bands(self) -> tuple[Band, ...]:
        """Disjoint bands, together all that a query sees; of a :meth:`resolved` method.

        Keys are cached with the rotation of the last band.
        """
        raise NotImplementedError

    def temperature(self, t: torch.Tensor, rope: Rope) -> torch.Tensor | None:
        """Number that multiplies the query at position ``t`` (float64); None: none."""
        return None

    def check(self, length: int | None = None) -> None:
        if length is None:
            super().check()
        else:
            self.reached(Rope.geometric(1e4, 2, length))  # no frequency matters

    def reached(self, rope: Rope) -> int:
        """Tokens, up to the target length, within which every distance in use was trained.

        Raises:
            OptionError: the options do not go with the trained length, or extend nothing.
        """
        super().check(rope.length)
        length, target = rope.length, self.target_length(rope)
        bands = self.resolved(rope).bands()
        # A distance of the trained length itself is one beyond the last; the published caps use it.
        reached, beyond, middle = length, target + 1, target
        while beyond - reached > 1:  # they only grow with the text
            if distances_in_use(bands, middle) <= length + 1:
                reached = middle
            else:
                beyond = middle
            middle = (reached + beyond) // 2
        if target > length:
            extends = reached > length + 1 or reached == target
        else:
            extends = distances_in_use(bands, length) < length
        if not extends:
            self._refuse_idle(rope, bands)
        return reached

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
    m = torch.arange(
        length - 1, -1, -math.ceil(length / _QUERIES), dtype=torch.float64, device="cpu"
    )
    largest = 0.0
    for band in bands:
        n = torch.zeros_like(m)  # of the keys in a band, the first has the smallest position
        geometry = band.geometry
        if isinstance(geometry, Distance) and geometry.last is not None:
            n = (m - geometry.last + 1).clamp(min=0)
        elif isinstance(geometry, ChunkGap):
            n = ((m // geometry.size - geometry.first) * geometry.size).clamp(min=0)
        largest = max(largest, float(band.distances(m, n).nan_to_num(nan=0).max()))
    return largest + 1


@dataclass(frozen=True, kw_only=True)
class LogScaled(PositionMethod):
    """A position method with the published scaling of queries by the logarithm of the length.

    Args:
        log_n: multiply the query at position ``m`` by ``max(1, ln(m + 1) / ln(length))``.

    Su 2023, kexue.fm/archives/8823.
    """

    log_n: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("log_n", isinstance(self.log_n, bool), "True or False")

    def temperature(self, t: torch.Tensor, rope: Rope) -> torch.Tensor | None:
        if not self.log_n:
            return None
        return ((t + 1).log() / math.log(rope.length)).clamp(min=1)


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
        return torch.ones_like(lengths)

    @property
    def adapts(self) -> bool:
        """Whether frequencies still depend on the sequence (no ``length`` was given)."""
        return self.length is None

    def _fixed(self, rope: Rope) -> torch.Tensor:
        length = self.target_length(rope) if self.length is None else self.length
        return torch.tensor([length], dtype=torch.float64, device="cpu")

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        """``h`` at ``length``, or at the full extended context when none was given."""
        return self.inv_freq_at(rope, self._fixed(rope))[0]

    def attention_scaling(self, rope: Rope) -> float:
        return float(self.attention_scaling_at(rope, self._fixed(rope))[0])


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


_REGISTRY: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def register(cls: M) -> M:
    """Class decorator: makes a method known by its name and aliases.

    Raises:
        RopeExtError: the name or an alias is taken; nothing is registered then.
    """
    names = (cls.name, *cls.aliases)
    for name in names:
        holder = _REGISTRY.get(_key(name), cls)
        if holder is not cls:
            raise RopeExtError(
                f"method name {name!r} is taken by {holder.__name__}; give {cls.__name__} another"
            )
    _REGISTRY.update((_key(name), cls) for name in names)
    return cls


def all_methods() -> list[type[Method]]:
    """Every registered method, once, in order of registration."""
    return list(dict.fromkeys(_REGISTRY.values()))


def method_class(name: str) -> type[Method]:
    """The method of that name or alias; case, hyphens and underscores do not matter.

    Raises:
        UnknownMethodError: there is none.
    """
    try:
        return _REGISTRY[_key(name)]
    except KeyError:
        names = [cls.name for cls in all_methods()]
        aliases = [alias for cls in all_methods() for alias in cls.aliases]
        raise UnknownMethodError(
            f"unknown method {name!r}{nearest(name.lower(), names + aliases) or '.'} "
            f"Methods: {', '.join(names)}"
        ) from None


def build_method(name: str, /, **options: Any) -> Method:
    """A method by name with its options.

    Raises:
        UnknownMethodError: no method of that name.
        OptionError: an option is unknown, missing or out of range.
    """
    cls = method_class(name)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for option in options:
        if option not in fields:
            raise OptionError(
                f"{cls.name} has no option {option!r}{nearest(option, fields) or '.'} "
                f"Options: {', '.join(fields)}"
            )
    missing = [
        field.name
        for field in fields.values()
        if field.name not in options
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise OptionError(f"{cls.name} needs {', '.join(f'{option}=...' for option in missing)}")
    return cls(**options)
