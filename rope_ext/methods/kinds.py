"""The kinds of methods, their interface, and the registry.

A method changes the rotation angle ``t * theta_i``: a frequency method to ``t * h_i``, a position
method to ``g(t) * theta_i``. It receives the trained embedding as a :class:`Rope`, computes in
float64, and knows nothing about models. Every method implements the whole interface: what its kind
does not change stays as in the trained embedding.
"""

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from typing_extensions import Self, dataclass_transform

from rope_ext.errors import OptionError, RopeExtError, UnknownMethodError, nearest
from rope_ext.methods.checked import Checked, Number, Tokens
from rope_ext.methods.geometry import Band, Distance, identity, spans
from rope_ext.methods.rope import MOST_TOKENS, Rope, extended_length, geometric
from rope_ext.methods.temperature import LogN, Temperature, as_temperature

Factor = Annotated[float, Number(minimum=1, maximum=MOST_TOKENS)]
FACTORS = (1.0, 1.1, 1.2, 1.3, 1.4)
"""First candidates for ``attention_factor`` when the best value is unknown."""


@dataclass(frozen=True, kw_only=True)
class Method(Checked):
    """Base of all methods.

    Subclasses are frozen dataclasses whose fields are the public options.

    Args:
        factor: target length divided by trained length, at least 1.
        attention_factor: multiplies cosine and sine, as in transformers, and so multiplies the
            logits of the rotated dimensions by its square. None uses the published value of the
            method, or 1 if it has none.
        temperature: multiplies queries, and so the logits of all dimensions: ``"log_n"``,
            ``"ssmax"``, ``"llama4"``, ``"yarn"``, a number, or an object such as
            ``LogN(scale=0.5)``. None uses the published one of the method, or 1 if it has none.
    """

    aliases: ClassVar[tuple[str, ...]] = ()
    paper: ClassVar[str]  # by default, the first one in the last paragraph of the docstring
    summary: ClassVar[str]  # one-line reason to choose it

    kind: ClassVar[str]  # what it changes, in one word
    replaces_attention: ClassVar[bool] = False  # by this package's; checked with the weights
    allows_factor_one: ClassVar[bool] = False  # factor 1 is valid and changes something
    is_dynamic = False  # whether frequencies depend on the sequence
    by_pair = False  # whether every pair has its own positions
    start_tokens = 0  # positions below it keep the trained frequencies
    candidates: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # see grids
    candidate_shares: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    candidate_temperatures: ClassVar[tuple[Any, ...]] = ()

    factor: Factor
    attention_factor: Annotated[float, Number(above=0, maximum=100)] | None = None
    temperature: str | float | Temperature | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature is not None:
            temperature = as_temperature(self.temperature)
            valid = (
                "'log_n', 'ssmax', 'llama4', 'yarn', a positive number of at most 100, or an "
                "object such as rope_ext.LogN(scale=0.5)"
            )
            self.require("temperature", temperature is not None, valid)
            self.set("temperature", temperature)

    def valid_text(self, option: str, text: str) -> str:
        # Factor 1 can be built, for a ramp that is the same for all, but not applied.
        if option == "factor" and not self.allows_factor_one:
            return "a finite number greater than 1"
        return text

    def target_length(self, rope: Rope) -> int:
        """Context after the extension, in tokens."""
        return extended_length(self.factor, rope.length)

    def check(self, length: int | None = None) -> None:
        """Raise an OptionError if nothing is extended; ``length``: trained length, if known."""
        # A factor may be too close to 1 for a single token.
        reached = self.factor if length is None else extended_length(self.factor, length) / length
        if reached <= 1 and not self.allows_factor_one:
            raise OptionError(
                f"{self.name}: factor={self.factor!r} would not extend anything; it must be a "
                f"finite number greater than 1 (4 makes 4 times the trained context)"
            )

    def resolved(self, rope: Rope) -> Self:
        """The same method with every option set."""
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
        """The distances that the last of ``length`` tokens uses instead of the actual ones.

        ``[n]`` for ``distance``, back from the last token (float64, ``[n]``), or ``[n, dim / 2]``
        if every pair uses its own; NaN where a token is hidden.
        """
        return distance

    def span(self, rope: Rope, length: int) -> torch.Tensor:
        """The largest distance of ``length`` tokens plus one: ``[1]``, or ``[dim / 2]`` by pair."""
        return _lengths(length)

    def tempered(self, rope: Rope) -> Temperature | None:
        """The active temperature with every option set; None: 1 everywhere."""
        given = self.chosen_temperature
        if given is None:
            return None
        filled = given.filled(rope.length, self.factor)
        return None if filled.constant == 1 else filled

    @property
    def chosen_temperature(self) -> Temperature | None:
        """The given ``temperature``, or else the published one; None: 1 everywhere."""
        return as_temperature(self.temperature) or self.own_temperature()

    def own_temperature(self) -> Temperature | None:
        return None

    def query_scaling(self, t: torch.Tensor, rope: Rope) -> torch.Tensor | None:
        """Number that multiplies the query at ``t`` (float64), if learned the initial; None: 1."""
        tempered = self.tempered(rope)
        return None if tempered is None else tempered.at(t)

    def grids(self, rope: Rope) -> dict[str, tuple[Any, ...]]:
        """The options that :func:`rope_ext.calibrate` tunes, and their first candidate values.

        They are tuned in this order. Values that the method or a model rejects are skipped.
        """
        shares = {name: rope.tokens(*given) for name, given in self.candidate_shares.items()}
        tried = {"temperature": self.candidate_temperatures} if self.candidate_temperatures else {}
        return {"attention_factor": FACTORS, **tried, **self.candidates, **shares}


@dataclass(frozen=True, kw_only=True)
class FrequencyMethod(Method):
    """Base of all frequency methods; only :meth:`inv_freq` must be overridden."""

    kind: ClassVar[str] = "frequency"

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        """``h``: float64, shape ``[dim / 2]``, radians per token."""
        raise NotImplementedError

    def frequencies(self, rope: Rope, length: int) -> torch.Tensor:
        return self.inv_freq(rope)

    def extends(self, rope: Rope) -> bool:
        """Whether any pair rotates more slowly, so that its angles stay in the trained range."""
        return bool((self.inv_freq(rope) < rope.inv_freq * (1 - 1e-9)).any())

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        """``config.rope_parameters`` from which plain transformers builds the same embedding."""
        return longrope_table(
            rope,
            inv_freq=self.inv_freq(rope),
            factor=self.factor,
            attention_scaling=self.attention_scaling(rope),
        )


@dataclass(frozen=True, kw_only=True)
class PositionMethod(Method):
    """Base of all position methods; None options follow ``factor`` and the trained length."""

    kind: ClassVar[str] = "position"
    replaces_attention: ClassVar[bool] = True
    # Why it has no meaning in attention in both directions; empty if it has.
    causal_only: ClassVar[str] = ""
    # Free here; under a frequency method it would need a hook per layer.
    candidate_temperatures = (LogN(),)

    def bands(self) -> tuple[Band, ...]:
        """Disjoint bands of a :meth:`resolved` method that cover all keys a query attends to.

        Keys are cached with the rotation of the last band. By default, positions stay as trained.
        """
        return (Band(Distance(0, None), identity, identity),)

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
        if length is None or self.by_pair:  # which distances were trained depends on the pairs
            super().check(length)
        else:
            self.reached(Rope.geometric(1e4, 2, length))  # frequencies do not matter here

    def reached(self, rope: Rope) -> int:
        """Number of tokens, up to the target length, within which every distance was trained.

        If every pair has its own distances, no distance is new to a pair that makes a full rotation
        within the trained length, or never rotates.
        """
        super().check(rope.length)
        length = rope.length
        target = self.target_length(rope)
        bands = self.resolved(rope).bands()
        reached = length
        beyond = target + 1
        middle = target
        while beyond - reached > 1:  # distances only grow with the length
            # Published caps use distances up to the trained length, one beyond the largest.
            known = spans(bands, middle) <= length + 1 + 1e-6  # divisions round
            if self.by_pair:
                known = known | (rope.rotations >= 1) | (rope.rotations == 0)
            if known.all():
                reached = middle
            else:
                beyond = middle
            middle = (reached + beyond) // 2
        if target > length:
            extends = reached > length + 1 or reached == target
        else:
            extends = bool((spans(bands, length) < length).any())
        if extends:
            return reached
        free = [field.name for field in dataclasses.fields(self) if field.default is None]
        given = {name: value for name, value in self.options().items() if name in free and value}
        options = ", ".join(f"{name}={value!r}" for name, value in given.items())
        used = spans(bands, max(target, length + 2)).max() - 1
        raise OptionError(
            f"{self.name}: {options or f'factor={self.factor!r}'} extends nothing on {length} "
            f"trained tokens: it still uses distances up to {used:g}; choose options with "
            f"distances of at most {length}, or leave {', '.join(given) or 'the options'} out"
        )

    def require_resolved(self, option: str, holds: bool, valid: str, rope: Rope) -> None:
        """Like :meth:`require`, if valid values depend on the trained length."""
        self.require(option, holds, f"{valid} (trained length {rope.length} tokens)")


@dataclass(frozen=True, kw_only=True)
class LogScaled(PositionMethod):
    """A position method whose paper scales queries by the logarithm of the length.

    Args:
        log_n: scale queries by the logarithm of the length, as published.

    Su 2023, kexue.fm/archives/8823.
    """

    candidate_temperatures = (LogN(), 1.0)

    log_n: bool = True

    def own_temperature(self) -> Temperature | None:
        return LogN() if self.log_n else None


@dataclass(frozen=True, kw_only=True)
class Tempered(PositionMethod):
    """A position method that works better with ``log_n``, although its paper has no temperature.

    Args:
        published: use ``temperature=1``, as in the paper, unless another one is given. The default
            is better on both bundled checkpoints (docs/temperature.md).
    """

    candidate_temperatures = (LogN(), 1.0)

    published: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.published:  # store what it stands for, so that equal settings compare equal
            self.set("temperature", self.temperature or as_temperature(1.0))
            self.set("published", False)

    def own_temperature(self) -> Temperature:
        return LogN()


@dataclass(frozen=True, kw_only=True)
class DynamicMethod(FrequencyMethod):
    """A frequency method that depends on the sequence length.

    The length is fixed when a sequence starts, because the cached values of deeper layers were
    computed with the old frequencies and cannot be rotated afterwards.

    Args:
        length: tokens; fixes the length for all sequences. None: each sequence uses the length
            it starts with: prompt plus ``max_new_tokens`` under ``generate``, the length of the
            first forward otherwise. Left padding and other documents in the row do not count.
    """

    length: Tokens | None = None

    def target_length(self, rope: Rope) -> int:
        """The ``length`` that the frequencies are fixed for, or else that of ``factor``, tokens."""
        return super().target_length(rope) if self.length is None else max(rope.length, self.length)

    def inv_freq_at(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
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
    def is_dynamic(self) -> bool:
        return self.length is None

    def _fixed(self, rope: Rope) -> torch.Tensor:
        return _lengths(self.target_length(rope) if self.length is None else self.length)

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        """``h`` at ``length``, or at the full extended context if none was given."""
        return self.inv_freq_at(rope, self._fixed(rope))[0]

    def frequencies(self, rope: Rope, length: int) -> torch.Tensor:
        return self.inv_freq_at(rope, _lengths(length) if self.is_dynamic else self._fixed(rope))[0]

    def own_scaling(self, rope: Rope) -> float:
        return float(self.own_scaling_at(rope, self._fixed(rope))[0])


def _lengths(length: int) -> torch.Tensor:
    return torch.tensor([length], dtype=torch.float64, device="cpu")


MSCALES = ("short_mscale", "long_mscale")
"""The attention factor of a ``longrope`` entry in vLLM and SGLang."""


def longrope_table(
    rope: Rope, inv_freq: torch.Tensor, factor: float, attention_scaling: float
) -> dict[str, Any]:
    """Any fixed frequencies as transformers' ``longrope``: ``lambda_i = theta_i / h_i``."""
    theta = geometric(rope.base, rope.dim)
    # JSON cannot hold the infinity of a pair that does not rotate.
    table = torch.where(inv_freq > 0, theta / inv_freq, 1e30).tolist()
    return {
        "rope_type": "longrope",
        "short_factor": table,
        "long_factor": list(table),
        "factor": float(factor),
        "attention_factor": float(attention_scaling),
        # vLLM and SGLang read these instead, or else compute it from the factor.
        **dict.fromkeys(MSCALES, float(attention_scaling)),
        "original_max_position_embeddings": rope.length,
    }


REGISTRY: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])
_CONTROLLED = ("attention_scaling", "attention_scaling_at", "temperature")
_PAPER = re.compile(r"arXiv \d{4}\.\d{5}|kexue\.fm/archives/\d+")


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def register(cls: M) -> M:
    """Class decorator: makes a frozen dataclass, and registers it under its name and aliases."""
    if "__dataclass_fields__" not in vars(cls):
        cls = dataclass(frozen=True, kw_only=True)(cls)
    shown: Any = cls  # classes have no such attribute for type checkers
    shown.__signature__ = plain_signature(cls)
    own = [base for base in cls.__mro__ if base.__module__ != Method.__module__]
    for name in _CONTROLLED:
        if any(callable(vars(base).get(name)) for base in own):
            raise RopeExtError(
                f"{cls.__name__} overrides {name}, which the options attention_factor and "
                f"temperature control; override own_{name.removeprefix('attention_')} instead"
            )
    if not hasattr(cls, "paper"):
        found = _PAPER.search((cls.__doc__ or "").rpartition("\n\n")[2])
        cls.paper = found[0] if found else ""
    names = (cls.name, *cls.aliases)
    for name in names:
        holder = REGISTRY.get(_key(name), cls)
        if (holder.__module__, holder.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RopeExtError(
                f"method name {name!r} is taken by {holder.__name__}; give {cls.__name__} another"
            )
    REGISTRY.update((_key(name), cls) for name in names)
    return cls


def plain_signature(cls: type) -> inspect.Signature:
    """Return how a class is called, with ``float`` for a type that also limits its values."""
    signature = inspect.signature(cls.__init__)  # of the class, it would be that of a base
    try:
        hints = typing.get_type_hints(cls)  # without what Annotated adds
    except NameError:  # a name that is defined for type checkers only
        return signature
    parameters = [
        one.replace(annotation=hints.get(one.name, one.annotation))
        for one in signature.parameters.values()
        if one.name != "self"
    ]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def all_methods() -> list[type[Method]]:
    """Registered methods that extend RoPE, in order of registration."""
    return [cls for cls in _all() if cls.kind not in ("encoding", "rotation")]


def all_encodings() -> list[type[Method]]:
    """Registered position encodings other than RoPE, in alphabetical order."""
    found = [cls for cls in _all() if cls.kind == "encoding"]
    return sorted(found, key=lambda cls: cls.__name__.lower())


def _all() -> list[type[Method]]:
    return list(dict.fromkeys(REGISTRY.values()))


def method_class(name: str) -> type[Method]:
    """Look up a method class by name or alias; ignores case, hyphens and underscores."""
    try:
        return REGISTRY[_key(name)]
    except KeyError:
        names = [cls.name for cls in _all()]
        aliases = [alias for cls in _all() for alias in cls.aliases]
        raise UnknownMethodError(
            f"unknown method {name!r}{nearest(name.lower(), names + aliases) or '.'} "
            f"Methods: {', '.join(cls.name for cls in all_methods())}. "
            f"Encodings: {', '.join(cls.name for cls in all_encodings())}. RoPE as trained: rope"
        ) from None


def build_method(name: str, /, **options: Any) -> Method:
    cls = method_class(name)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for option in options:
        if option not in fields:
            raise OptionError(
                f"{cls.name} has no option {option!r}{nearest(option, fields) or '.'} "
                f"Options: {', '.join(fields)}"
            )
    needed = [field.name for field in fields.values() if field.default is dataclasses.MISSING]
    missing = [f"{name}=..." for name in needed if name not in options]
    if missing:
        raise OptionError(f"{cls.name} needs {', '.join(missing)}")
    return cls(**options)
