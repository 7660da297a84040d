"""Systems to measure: a model with one of the requested methods, checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rope_eval.cases import Case, digest
from rope_ext.command.method_options import built
from rope_ext.errors import OptionError
from rope_ext.methods import reach
from rope_ext.patching import patched


@dataclass(frozen=True, eq=False)
class System:
    """A model with a method: a row of the report.

    ``label`` is the method and its options, or a server; ``name`` adds the model if there are
    several. ``identity`` is a digest of what results depend on besides the case.
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

    def key(self, case: Case) -> str:
        return digest(self.identity, case.task, case.length, case.bin, case.seed, case.prompt)


def under(
    model: Any,
    name: str,
    options: Mapping[str, Any],
    compose: bool | str,
    trained_length: int | None,
) -> AbstractContextManager[Any]:
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
            built(method, options).check(length if under is None else reach(under.factor, length))
            target = reach(options["factor"], length)
            far = [str(n) for n in lengths if n > target]
            note = (
                f"{', '.join(far)} tokens: beyond factor {options['factor']:g} x the trained "
                f"{length} tokens = {target} of {method} on {model}"
            )
            if far and not force:
                raise OptionError(f"{note}; give a larger --factor, shorter --lengths, or --force")
            if far:
                yield f"{note}, which is not meant to reach that far"
