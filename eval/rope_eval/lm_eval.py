r"""Runs lm-evaluation-harness with an additional model type, ``rope_ext``.

    python -m rope_eval.lm_eval --model rope_ext \
        --model_args pretrained=checkpoints/tiny-512,method=yarn,factor=4 --tasks ruler_vt

Packages cannot register models for the command ``lm_eval``, so this module starts it; all of its
flags are unchanged. The model takes the arguments of ``hf`` and also ``method``, ``factor``,
``trained_length``, ``compose`` and all options of the method. If a folder was saved with a patch,
or an adapter (``peft=``) was trained with one, the patch is loaded, too.
"""

import dataclasses
import types
from typing import Any

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'lm-evaluation-harness is not installed; install it with: pip install "rope-ext[harness]"',
        name=error.name,
    ) from None

from rope_eval.data.templates import with_limits
from rope_ext.command.arguments import NONE, UNPATCHED
from rope_ext.command.terminal import clean_errors
from rope_ext.config.record import ARGUMENTS
from rope_ext.errors import OptionError
from rope_ext.methods import method_class
from rope_ext.patching import patch
from rope_ext.saving.load import from_pretrained

_HFLM = with_limits(HFLM)


@register_model("rope_ext")
class PatchedLM(_HFLM):
    """A transformers model with a patch.

    Its chat template is rendered with limits (rope_eval/data/templates.py).

    Args:
        pretrained: folder or Hub ID.
        method: name of a method; None or "unpatched": load the model as saved.
        trained_length: tokens; overrides the trained length in the config.
        **kwargs: for the method, :func:`rope_ext.patch`, and ``HFLM`` of the harness.
    """

    def __init__(
        self,
        pretrained: str,
        method: str | None = None,
        trained_length: int | None = None,
        **kwargs: Any,
    ) -> None:
        names = {"factor", "compose", *ARGUMENTS}
        method = None if method in (UNPATCHED, NONE) else method
        if method is not None:
            names |= {field.name for field in dataclasses.fields(method_class(method))}
        options = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        if trained_length is not None:
            options["original_max_position_embeddings"] = trained_length
        if method is None and options:
            raise OptionError(f"{', '.join(sorted(options))} given without a method; add method=")
        if method is not None and (peft := kwargs.get("peft")) is not None:
            raise OptionError(f"the adapter {peft} brings its patch along; leave method= out")
        self._method = method
        self._options = options
        super().__init__(pretrained, **kwargs)

    def _create_model(self, pretrained: str, peft: str | None = None, **kwargs: Any) -> None:
        def load(path: str, **given: Any) -> Any:
            return from_pretrained(path if peft is None else peft, base=peft and path, **given)

        usual = self.AUTO_MODEL_CLASS  # transformers' own class, which applies no patch
        self.AUTO_MODEL_CLASS = types.SimpleNamespace(from_pretrained=load)
        super()._create_model(pretrained, **kwargs)
        self.AUTO_MODEL_CLASS = usual
        if self._method is not None:
            patch(self._model, self._method, tokenizer=self.tokenizer, **self._options)


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    with clean_errors():
        cli_evaluate()


if __name__ == "__main__":
    main()
