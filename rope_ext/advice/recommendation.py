"""The result of ``recommend``, which ``patch`` accepts in place of a method."""

from dataclasses import dataclass
from typing import Literal

from rope_ext.config.record import patch_call
from rope_ext.methods import Method
from rope_ext.quoting import Printed


@dataclass(frozen=True)
class Recommendation(Printed):
    """A recommended patch; ``print`` it, or pass it to :func:`rope_ext.patch`."""

    model: str  # class of the decoder
    method: Method  # with every option that matters filled in
    factor: float  # target_length / trained_length, rounded up to hundredths
    target_length: int  # target_length, trained_length: tokens
    trained_length: int  # with the checkpoint's own scaling, whether trained so or not
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
    serve_reasons: tuple[str, ...] = ()  # why ``serve``, like ``reasons``
    # the length that the checkpoint's own scaling starts from, tokens; None: unscaled, or unknown
    unscaled_length: int | None = None
    # the checkpoint's own scaling with a larger factor, which needs compose="raise", if any
    raised: Method | None = None
    calibrated: bool = False  # whether ``method`` is the result of a calibration

    @property
    def call(self) -> str:
        """The call that applies the patch, as text."""
        return self._call(self.method)

    def _call(self, method: Method) -> str:
        stacked = bool(self.compose) and method.kind == "frequency"
        return patch_call(
            method,
            compose="raise" if method == self.raised else stacked,
            original_max_position_embeddings=self.original_max_position_embeddings,
        )

    def __str__(self) -> str:
        lines = self._answers()
        more = len(self.alternatives)
        if more:
            lines.append(f"{more} other methods: full() of this object, or recommend --all")
        return "\n".join(lines)

    def full(self) -> str:
        """Return the recommendation as text, with all alternatives."""
        left = ((m, why) for m, why in self.alternatives if m != self.serve)  # told already
        others = (f"or {self._call(method)}\n  - {why}" for method, why in left)
        return "\n".join([*self._answers(), *others])

    def _answers(self) -> list[str]:
        tuned = "with" if self.finetune else "without"
        where = "in this process" if self.engine is None else f"for {self.engine}"
        own = f" (scaled from {self.unscaled_length})" if self.unscaled_length else ""
        lines = [
            f"{self.model}: {self.trained_length}{own} -> {self.target_length} tokens, factor "
            f"{self.factor:g}, {tuned} fine-tuning, {where}",
            f"  {self.call}",
            *(f"  - {reason}" for reason in self.reasons),
        ]
        if self.serve == self.method:
            lines.append(f"  - {', '.join(self.engines)} can serve it.")
        elif self.serve is not None:
            lines += [f"to serve with {', '.join(self.engines)}", f"  {self._call(self.serve)}"]
            lines += [f"  - {reason}" for reason in self.serve_reasons]
        return lines
