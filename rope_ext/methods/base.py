"""What a method is, and the registry of all of them.

A method changes the rotation angle ``t * theta_i``: a frequency method into ``t * h_i``, a
position method into ``g(t) * theta_i``. It sees the trained embedding as a :class:`Rope` and
answers in float64; it knows no model.
"""

from __future__ import annotations

import dataclasses
import math
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
from rope_ext.methods.geometry import Geometry

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
    """Context after an extension of ``length`` tokens, tokens."""
    return math.ceil(round(factor * length, 6))  # 1.1 * 1500 is 1650.0000000000002


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
        self.require_number("factor", minimum=1)

    @property
    def adapts(self) -> bool:
        """Whether frequencies depend on the sequence."""
        return False

    def target_length(self, rope: Rope) -> int:
        """Context after the extension, tokens."""
        return reach(self.factor, rope.length)

    def options(self) -> dict[str, Any]:
        """The options and their values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def require(self, option: str, holds: bool, valid: str) -> None:
        """Raise OptionError naming the value and the valid ones unless ``holds``."""
        if not holds:
            value = getattr(self, option)
            raise OptionError(f"{self.name}: {option}={value!r} is not valid; it must be {valid}")

    def require_number(
        self, option: str, minimum: float | None = None, above: float | None = None
    ) -> None:
        """Raise OptionError unless the option is a finite number in its range."""
        value = getattr(self, option)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        valid = "a finite number"
        holds = number and math.isfinite(value)
        if minimum is not None:
            valid, holds = f"a finite number of at least {minimum}", holds and value >= minimum
        if above is not None:
            valid, holds = f"a finite number greater than {above}", holds and value > above
        self.require(option, holds, valid)

    def require_tokens(self, option: str, minimum: int = 1) -> None:
        """Raise OptionError unless the option is None or a whole number of tokens."""
        value = getattr(self, option)
        holds = value is None or (type(value) is int and value >= minimum)
        self.require(option, holds, f"a whole number of at least {minimum}, or None")


@dataclass(frozen=True, kw_only=True)
class FrequencyMethod(Method):
    """Base of all frequency methods.

    Only :meth:`inv_freq` must be overridden.
    """

    start_tokens = 0  # positions below it keep the trained frequencies

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        """``h``: float64, shape ``[dim / 2]``, radians per token."""
        raise NotImplementedError

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

    def require_resolved(self, option: str, holds: bool, valid: str, rope: Rope) -> None:
        """As :meth:`require`, where what is valid depends on the trained length."""
        self.require(option, holds, f"{valid} (trained length {rope.length} tokens)")


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
        if self.length is not None:
            self.require("length", type(self.length) is int and self.length > 0, "a positive int")

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
