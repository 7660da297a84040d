"""Merge an adapter of recipes/finetune.py into its base model, and verify the result.

    python recipes/merge.py runs/tiny_512_yarn_pose --output runs/tiny_4096

Plain transformers can load the result if its configuration can express the patch.
rope_ext.from_pretrained can always load it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

import rope_ext
from recipes.finetune import lengths
from recipes.settings import NONE, SETTINGS, Recipe
from rope_ext.advice.describe import write_card
from rope_ext.command.terminal import show, tell, tell_next
from rope_ext.config.nested import text_of
from rope_ext.engines import engines_for
from rope_ext.errors import LoadError, MeasureError, OptionError, RopeExtError, first_line
from rope_ext.saving.checkpoints import load_model, load_tokenizer
from rope_ext.saving.folder import read_saved

COMPARED = 64  # tokens beyond the trained length whose logits are compared
# Relative to the largest logit. Merging changes the order of additions; reloading changes nothing.
_MERGED = 1e-4
_RELOADED = 1e-6


def load(adapter: Path) -> Any:
    """Load the base model with patch and adapter, in float32.

    Raises:
        RopeExtError: the adapter does not fit its base, or does not record how it was trained.
    """
    for folder in (adapter, adapter.parent):
        if (folder / SETTINGS).exists():
            settings = _read(folder / SETTINGS)
            recipe = Recipe(**{k: v for k, v in settings.items() if k in Recipe.__annotations__})
            if recipe.method != NONE:
                break
            base = str(_base(adapter))
            model = load_model(base, "float32", "cpu", adapter=str(adapter), as_saved=True)
            text = text_of(model.config)
            # As in training; without a patch, only this says how long the context is.
            text.max_position_embeddings = lengths(recipe, model)[1]
            return model
    # Added in float32 and rounded once, after the comparison.
    return rope_ext.from_pretrained(adapter, dtype=torch.float32)


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise OptionError(
            f"cannot read {file} ({first_line(error)}); give the output_dir of a run that was "
            f"saved completely"
        ) from None


def _base(adapter: Path) -> str | None:
    return _read(adapter / "adapter_config.json").get("base_model_name_or_path")


def tokenizer_of(adapter: Path) -> Any:
    """Load the tokenizer next to an adapter, or else that of its base.

    Raises:
        OptionError: neither has a tokenizer, or the adapter does not name its base.
    """
    base = _base(adapter)
    for folder in (str(adapter), base):
        with contextlib.suppress(LoadError, MeasureError):
            if folder:
                return load_tokenizer(folder)
    raise OptionError(
        f"neither {adapter} nor its base {base} has a tokenizer; copy tokenizer.json and "
        f"tokenizer_config.json of the base into {adapter}"
    )


def logits(model: Any, length: int) -> torch.Tensor:
    """Logits of the last tokens of random input, ``[COMPARED, vocabulary]``."""
    vocabulary = text_of(model.config).vocab_size
    ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids.to(model.device), logits_to_keep=COMPARED).logits[0].float()


def difference(found: torch.Tensor, expected: torch.Tensor, bound: float, what: str) -> float:
    """Largest difference relative to the largest logit.

    Raises:
        MeasureError: the difference is above ``bound``.
    """
    by = float((found - expected).abs().max() / expected.abs().max())
    if not by <= bound:
        raise MeasureError(
            f"{what} differ by {by:.1e} of the largest, more than {bound:.0e}: do not use them"
        )
    return by


def merge(adapter: Path, output: Path, dtype: str) -> str:
    """Merge an adapter, save and reload the model, and compare logits.

    Returns:
        A summary of the comparison.

    Raises:
        RopeExtError: ``output`` is not empty or cannot be created, the adapter or the tokenizer is
            missing, or logits differ.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OptionError(f"{output} is not empty; give --output a new directory")
    if not (adapter / "adapter_config.json").exists():
        raise OptionError(
            f"{adapter} contains no adapter; give the output_dir of a run with LoRA, or a "
            f"checkpoint in it"
        )
    tokenizer = tokenizer_of(adapter)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"cannot create {output} ({error.strerror}); give --output another directory"
        ) from None
    tell(f"loading {adapter}")
    model = load(adapter)
    tell(f"merging, and comparing the logits of {COMPARED} tokens before and after")
    # Beyond the trained length, where a patch that was lost would show.
    length = rope_ext.describe(model).length + COMPARED
    trained = logits(model, length)
    model = model.merge_and_unload()
    merged = difference(
        logits(model, length), expected=trained, bound=_MERGED, what="logits after merging"
    )
    for parameter in model.parameters():  # not the buffers, which contain frequencies
        parameter.data = parameter.data.to(getattr(torch, dtype))
    saved = logits(model, length)
    extended = rope_ext.describe(model).method is not None
    tell(f"writing {output}, and comparing what it loads as")
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    if extended:
        report = adapter / "report"
        report = report if (report / "table.md").exists() else None
        write_card(output, _base(adapter), report)
    del model
    again = logits(rope_ext.from_pretrained(output, dtype=getattr(torch, dtype)), length)
    reloaded = difference(again, expected=saved, bound=_RELOADED, what="logits after reloading")
    return (
        f"{output}: for {COMPARED} tokens beyond the trained length, logits differ by {merged:.1e} "
        f"of the largest after merging, and by {reloaded:.1e} after reloading"
    )


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("adapter", type=Path, help="output directory of a run, or a checkpoint in it")
    add("--output", type=Path, required=True, help="output directory; must not exist")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    return parser


def main() -> None:
    args = parser().parse_args()
    show(merge(args.adapter, args.output, args.dtype))
    engines = engines_for(read_saved(args.output).model)
    if engines:
        tell_next(["rope-ext", "export", args.output, "--engine", engines[0]])
    else:
        tell_next(["rope-ext", "describe", args.output])


if __name__ == "__main__":
    try:
        main()
    except RopeExtError as error:
        sys.exit(f"error: {error}")
