"""The result of ``recommend``, which ``patch`` accepts as a method."""

from dataclasses import dataclass
from typing import Literal

from rope_ext.config.record import option_texts
from rope_ext.methods import Method


@dataclass(frozen=True)
class Recommendation:
    """A recommended patch; ``print`` it, or pass it to :func:`rope_ext.patch`."""

    model: str  # class of the decoder
    method: Method  # with every option that matters filled in
    factor: float  # target_length / trained_length, rounded up to hundredths
    target_length: int  # target_length, trained_length: tokens
    trained_length: int
    finetune: bool  # whether the model will be fine-tuned
    engine: str | None  # the engine that has to run it; None: this process
    compose: bool | Literal["raise"]  # for ``patch``, if the checkpoint is already scaled
    original_max_position_embeddings: int | None  # if the configuration's is wrong
    reasons: tuple[str, ...]  # sentences, each with its source
    # further methods that the model accepts, and when to choose each
    alternatives: tuple[tuple[Method, str], ...]
    # the first method that other engines can run; None: none, or ``engine`` was set
    serve: Method | None = None
    engines: tuple[str, ...] = ()  # the engines that can run ``serve``
    # the checkpoint's own scaling with a larger factor, which needs compose="raise", if any
    raised: Method | None = None

    @property
    def call(self) -> str:
        """The call that applies the patch, as text."""
        return self._call(self.method)

    def _call(self, method: Method) -> str:
        words = ["model", repr(method.name), *option_texts(method)]
        if method == self.raised:
            words.append("compose='raise'")
        elif self.compose and method.kind == "frequency":
            words.append("compose=True")
        if (length := self.original_max_position_embeddings) is not None:
            words.append(f"original_max_position_embeddings={length}")
        return f"rope_ext.patch({', '.join(words)})"

    def __str__(self) -> str:
        lines, more = self._answers(), len(self.alternatives)
        if more:
            lines.append(f"{more} other methods: full() of this object, or recommend --all")
        return "\n".join(lines)

    def full(self) -> str:
        """Return the recommendation as text, with all alternatives."""
        others = (f"or {self._call(method)}\n  - {why}" for method, why in self.alternatives)
        return "\n".join([*self._answers(), *others])

    def _answers(self) -> list[str]:
        tuned = "with" if self.finetune else "without"
        where = "in this process" if self.engine is None else f"for {self.engine}"
        lines = [
            f"{self.model}: {self.trained_length} -> {self.target_length} tokens, factor "
            f"{self.factor:g}, {tuned} fine-tuning, {where}",
            f"  {self.call}",
            *(f"  - {reason}" for reason in self.reasons),
        ]
        if self.serve is not None:
            lines += [f"to serve with {', '.join(self.engines)}", f"  {self._call(self.serve)}"]
            lines += [f"  - {why}" for method, why in self.alternatives if method == self.serve]
        return lines
