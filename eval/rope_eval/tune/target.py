"""The trained embedding that a search or a calibration starts from."""

from __future__ import annotations

from torch import nn

from rope_eval.tune.options import TuneOptions
from rope_ext.errors import OptionError
from rope_ext.methods import Rope
from rope_ext.patching import first_site


def trained_rope(model: nn.Module, given: TuneOptions, scored: int | None) -> Rope:
    """The rotary embedding that ``model`` was trained with.

    Args:
        model: not patched.
        given: the options; ``target_length`` must be beyond the trained length.
        scored: tokens to score at the end of each window.

    Raises:
        OptionError: the target length is not beyond the trained one, or leaves nothing to score.
    """
    rope = first_site(model, given.sliding_layers, given.original_max_position_embeddings).rope
    if given.target_length <= rope.length:
        raise OptionError(
            f"target_length={given.target_length} is not beyond the {rope.length} tokens that "
            f"the model was trained for; give a larger one"
        )
    if scored is not None and scored >= given.target_length:
        raise OptionError(
            f"scored={scored} is not valid; it must be below "
            f"target_length={given.target_length}, since the first token has no context"
        )
    return rope
