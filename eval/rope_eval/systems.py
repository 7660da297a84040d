"""Systems to measure: a model with one of the requested methods, checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_eval.cases import Case, digest
from rope_ext.command.arguments import UNPATCHED
from rope_ext.config.record import ARGUMENTS, option_texts
from rope_ext.errors import OptionError
from rope_ext.methods import Method, build_method, extended_length
from rope_ext.methods.rope import factor_to
from rope_ext.patching import patched

_LONGEST = 40  # most characters of an option in a row's name


# By identity: systems are keys of dicts, and options cannot be hashed.
@dataclass(frozen=True, eq=False)
class System:
    """A model with a method: a row of the report.

    ``label`` is the method and its options, or a server; ``name`` adds the model if there are
    several. ``identity`` is a digest of what results depend on besides the case. ``cut``: an
    embedder gets only so many tokens of every text, as users have it without a method.
    """

    name: str
    label: str
    model: str
    method: str
    options: Mapping[str, Any]
    trained: int
    is_dynamic: bool
    identity: str
    adapted: bool = False
    cut: int | None = None

    def key(self, case: Case) -> str:
        more = () if self.cut is None else (self.cut,)
        of_case = (case.task, case.length, case.bin, case.seed, case.prompt)
        return digest(self.identity, *of_case, *more)


def short_name(path: str) -> str:
    """Return the last part of a model's or adapter's folder or ID, as reports name it."""
    return Path(path).name or Path(path).resolve().name


def built(name: str, options: Mapping[str, Any]) -> Method:
    return build_method(name, **{k: v for k, v in options.items() if k not in ARGUMENTS})


def label(name: str, options: Mapping[str, Any], factor: float) -> str:
    """Name a method in reports, without the factor that is common to the run."""
    if name == UNPATCHED:
        return name
    method = built(name, options)
    common = method.factor == factor
    texts = [one for one in option_texts(method) if not (common and one.startswith("factor="))]
    texts += [f"{k}={getattr(v, 'name', v)}" for k, v in options.items() if k in ARGUMENTS]
    shown = [text if len(text) <= _LONGEST else f"{text.split('=')[0]}=..." for text in texts]
    return f"{name} ({', '.join(shown)})" if shown else name


def under(
    model: Any,
    name: str,
    options: Mapping[str, Any],
    compose: bool | str,
    trained_length: int | None,
) -> AbstractContextManager[Any]:
    """Patch a model for a ``with`` block; ``trained_length`` is in tokens, None: as configured."""
    given = {"compose": compose, "original_max_position_embeddings": trained_length}
    return patched(model, name, **{**given, **options})


def beyond(
    methods: Mapping[str, Mapping[str, Any]],
    lengths: Sequence[int],
    trained: Mapping[str, int],
    force: bool,
) -> Iterator[str]:
    """Yield a note for every method and model whose extended length is exceeded."""
    for model, length in trained.items():
        for method, options in methods.items():
            under = options.get("frequency")
            built(method, options).check(
                length if under is None else extended_length(under.factor, length)
            )
            target = extended_length(options["factor"], length)
            far = [n for n in lengths if n > target]
            if not far:
                continue
            note = (
                f"{', '.join(map(str, far))} tokens: beyond factor {options['factor']:g} x the "
                f"trained {length} tokens = {target} of {method} on {model}"
            )
            larger = f"raise --factor to {factor_to(max(far), length):g}"
            if not force:
                raise OptionError(f"{note}; {larger}, give shorter --lengths, or --force")
            yield f"{note}, which is not meant to reach that far; {larger}"
