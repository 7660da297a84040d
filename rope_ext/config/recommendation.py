"""The result of ``recommend``, which ``patch`` accepts as a method."""

from dataclasses import dataclass
from typing import Literal

from rope_ext.config.record import option_texts
from rope_ext.methods import Method


@dataclass(frozen=True)
class Recommendation:
    """A recommended patch for a model and a length; ``print`` it, or pass it to ``rope_ext.patch``.

    Args:
        model: class of the decoder.
        method: with every option that matters filled in.
        factor: ``target_length`` divided by ``trained_length``, rounded up to hundredths.
        target_length: tokens.
        trained_length: tokens.
        finetune: whether the model will be fine-tuned.
        engine: the engine that has to run it; None: this process.
        compose: ``compose`` of ``patch`` for ``method``: True or ``"raise"`` if the checkpoint is
            already scaled.
        original_max_position_embeddings: trained length, if the configuration's is wrong.
        reasons: sentences, each with its source.
        alternatives: further methods that the model accepts, and when to choose each.
        serve: the first method that other engines can run; None: none, or ``engine`` was set.
        engines: the engines that can run ``serve``.
        raised: the checkpoint's own scaling with a larger factor, which needs ``compose="raise"``;
            None: it has none that can be raised.
    """

    model: str
    method: Method
    factor: float
    target_length: int
    trained_length: int
    finetune: bool
    engine: str | None
    compose: bool | Literal["raise"]
    original_max_position_embeddings: int | None
    reasons: tuple[str, ...]
    alternatives: tuple[tuple[Method, str], ...]
    serve: Method | None = None
    engines: tuple[str, ...] = ()
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
        if self.original_max_position_embeddings is not None:
            words.append(
                f"original_max_position_embeddings={self.original_max_position_embeddings}"
            )
        return f"rope_ext.patch({', '.join(words)})"

    def __str__(self) -> str:
        lines, more = self._answers(), len(self.alternatives)
        if more:
            lines.append(f"{more} other methods: full() of this object, or recommend --all")
        return "\n".join(lines)

    def full(self) -> str:
        """Return the recommendation as text, with all alternatives."""
        lines = self._answers()
        for method, why in self.alternatives:
            lines += [f"or {self._call(method)}", f"  - {why}"]
        return "\n".join(lines)

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
