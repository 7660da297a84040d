"""What every evaluation is told, whatever it measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rope_eval.data.prompts import Chat
from rope_ext.errors import OptionError

LARGEST_SEED = 2**32 - 1  # numpy's


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every evaluator is told.

    Args:
        models: folders or Hub ids.
        methods: names, or ``adapter`` for the patch under which the adapter was trained; the
            unpatched model is always measured too.
        lengths: context lengths, tokens. The trained length is added where some are longer.
        factor: of every method but ``adapter``.
        options: further options, by method.
        adapter: folder or Hub id of a PEFT adapter, in use wherever a method is.
        seed: of texts, prompts and bootstrap.
        dtype: ``auto`` or one of ``DTYPES``; see ``load_model``.
        attn: transformers' name of an attention implementation; None leaves the choice to it.
        device: a torch device or ``auto``.
        batch_size: rows per forward; None takes as many as make up ``automatic_tokens``, and
            halves a batch that does not fit into memory.
        chat: whether prompts go through the chat template.
        trained_length: trained context, tokens; None reads it from the configuration.
        compose: patch on top of the checkpoint's own scaling.
        force: measure lengths beyond what a method is meant to reach, and an adapter under
            another patch than the one it was trained under.
        output: folder for results.
        resume: use what is in ``output`` already.
        overwrite: delete it.
    """

    models: tuple[str, ...]
    methods: tuple[str, ...]
    lengths: tuple[int, ...]
    factor: float = 4.0
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    adapter: str | None = None
    seed: int = 0
    dtype: str = "auto"
    attn: str | None = None
    device: str = "auto"
    batch_size: int | None = None
    chat: Chat = "auto"
    trained_length: int | None = None
    compose: bool = False
    force: bool = False
    output: Path = Path("runs/eval")
    resume: bool = False
    overwrite: bool = False

    def to_json(self) -> dict[str, Any]:
        """What determines the results, as plain data."""
        names = set(self.__dataclass_fields__) - {"output", "resume", "overwrite", "force"}
        return {name: getattr(self, name) for name in sorted(names)}


def require_seed(seed: int) -> None:
    """Raise OptionError for a seed that some generator of random numbers does not take."""
    if type(seed) is not int or not 0 <= seed <= LARGEST_SEED:
        raise OptionError(
            f"seed={seed!r} is not valid; it must be a whole number from 0 to {LARGEST_SEED}"
        )
