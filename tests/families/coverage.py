"""Every class of transformers that rotates, patched and checked.

    python -m tests.families.coverage                            all of them
    python -m tests.families.coverage llama EuroBertModel        these families, check by check
    python -m tests.families.coverage --write docs/FAMILIES.md   and the page

Each family is built tiny and random (``zoo``), patched, and run through ``checks``.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import logging
import multiprocessing
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import rope_ext
from rope_ext.rotary.sites import RotarySite, text_config
from tests.families.checks import (
    CHECKS,
    FACTOR,
    NOTHING_GAINED,
    POSITIONS,
    POSITIONS_REFUSED,
    POSITIONS_WINDOWED,
    TEXT_ALONE,
    TOKENS,
    Check,
    Subject,
    last_line,
    saved_as,
)
from tests.families.others import OTHER_CHECKS, ROTATIONS_ALONE, OtherSubject
from tests.families.zoo import (
    LENGTH,
    NotBuildable,
    class_name,
    image_text_types,
    model_types,
    not_importable,
    other_classes,
    rotating_modules,
    tiny_model,
    tiny_of,
)

SUPPORTED = "supported"
WINDOW_ONLY = "window only"
REFUSED = "refused"
NO_ROPE = "no rope"
NOT_BUILDABLE = "not buildable"
FAILED = "failed"

# What no check can see.
_KNOWN = {
    "blt": "its local decoder has a window that is not in the module's configuration, so its "
    "frequencies are scaled, too",
    "moshi": "its attention ignores the window, its cache does not",
}


@dataclass(frozen=True)
class FamilyResult:
    """What was found about one family.

    Args:
        model_type: transformers' name.
        class_name: its modeling class.
        verdict: ``"supported"``; ``"window only"``: refused, but accepted with
            ``sliding_layers="scale"``; ``"refused"``; ``"failed"``: accepted, but fails a check;
            ``"no rope"``; ``"not buildable"``.
        reason: of any verdict but ``"supported"``.
        error: name of the error class that ``rope_ext.patch`` raises by default, else "".
        rotary: whether the text model rotates, from frequencies or by a fixed table.
        layout: how its rotary embedding is laid out, in words.
        saves: the ``rope_type`` under which plain transformers reloads a YaRN patch, or
            ``"patch again"``.
        positions: whether position methods are accepted: ``"yes"``, ``"window only"`` (with
            ``sliding_layers="scale"``) or ``"refused"``.
        checks: all checks, in order.
        remarks: what a user should know besides.
    """

    model_type: str
    class_name: str
    verdict: str
    reason: str = ""
    error: str = ""
    rotary: bool = True
    layout: str = ""
    saves: str = ""
    positions: str = ""
    checks: tuple[Check, ...] = ()
    remarks: tuple[str, ...] = ()


def check_family(model_type: str) -> FamilyResult:
    """Build the family's tiny model, patch it, and make every check."""
    found = FamilyResult(model_type, class_name(model_type), SUPPORTED)
    with _quiet():
        try:
            model = tiny_model(model_type)
        except NotBuildable as error:
            reason, _, _ = str(error).removeprefix(f"{model_type}: ").partition(". ")
            return replace(found, verdict=NOT_BUILDABLE, reason=reason, rotary=False)
        return _judged(model, found, _Kind(functools.partial(tiny_model, model_type)))


def check_class(cls: type[PreTrainedModel]) -> FamilyResult:
    """The same for a class outside of both mappings, by the checks of ``others``."""
    found = FamilyResult(cls.__name__, cls.__name__, SUPPORTED)
    with _quiet():
        try:
            model = tiny_of(cls)
        except NotBuildable as error:
            reason = str(error).removeprefix(f"{cls.__name__}: ").partition(". ")[0]
            return replace(found, verdict=NOT_BUILDABLE, reason=reason, rotary=False)
        kind = _Kind(functools.partial(tiny_of, cls), OtherSubject, OTHER_CHECKS)
        result = _judged(model, found, kind)
        return shortened(result) if result.verdict == REFUSED else result


def shortened(result: FamilyResult) -> FamilyResult:
    """With a reason that says the same of many classes: without their names and details."""
    reason = re.sub(r"^\w+: ", "", result.reason)
    reason = re.sub(r"^\w+(?= does not return)", "its rotary module", reason)
    reason = re.sub(r"^\w+(?= consists of)", "it", reason)
    details = r" \((?:[^()]|\([^()]*\))*\)"
    return replace(result, reason=re.sub(details, "", reason))


@dataclass(frozen=True)
class _Kind:
    """How models of a family are built and checked."""

    build: Callable[..., PreTrainedModel]
    subject: Callable[..., Subject] = Subject
    checks: tuple[Callable[[Any], Iterator[Check]], ...] = CHECKS


def _judged(model: PreTrainedModel, found: FamilyResult, kind: _Kind) -> FamilyResult:
    error = _refusal(model)
    if error is None:
        return _checked(found, kind)
    found = replace(found, verdict=REFUSED, reason=str(error), error=type(error).__name__)
    if not isinstance(error, rope_ext.NoRopeError):
        return _check_refused(model, found, kind)
    if _rotates_by_table(model):
        return replace(found, reason="rotates by a fixed table, not from frequencies")
    return replace(found, verdict=NO_ROPE, reason="", rotary=False)


def _refusal(model: PreTrainedModel, **options: Any) -> rope_ext.RopeExtError | None:
    try:
        with rope_ext.patched(model, "yarn", factor=FACTOR, **options):
            return None
    except rope_ext.RopeExtError as error:
        return error


def _check_refused(model: PreTrainedModel, refused: FamilyResult, kind: _Kind) -> FamilyResult:
    """Try again with a length or without the window, then with ``sliding_layers="scale"``."""
    told = {"original_max_position_embeddings": LENGTH}
    if _refusal(model, **told) is None:
        remark = "needs original_max_position_embeddings="
        return _checked(refused, kind, options=told, remarks=[remark])
    layers = len(getattr(model.config, "layer_types", None) or ())
    for off in ({"sliding_window": None}, {"layer_types": ["full_attention"] * layers}):
        try:
            opened = kind.build(**off)
        except NotBuildable:
            continue
        if _refusal(opened) is None:
            remark = f"with its window off ({_setting(off)}); refused with it: every layer slides"
            return _checked(refused, kind, overrides=off, remarks=[remark])
    options: dict[str, Any] = {"sliding_layers": "scale"}
    if getattr(text_config(model), "max_position_embeddings", None) is None:
        options["original_max_position_embeddings"] = LENGTH
    if _refusal(model, **options) is not None:
        return refused
    result = _checked(refused, kind, options=options)
    if result.verdict == FAILED:
        return result
    reason = f"every layer with RoPE has a window; {_setting(options)} scales it anyway"
    return replace(result, verdict=WINDOW_ONLY, reason=reason)


def _checked(
    found: FamilyResult,
    kind: _Kind,
    overrides: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    remarks: Iterable[str] = (),
) -> FamilyResult:
    """All checks, on a model that nothing has patched yet."""
    try:
        subject = kind.subject(kind.build(**(overrides or {})), options or {}, remarks)
    except NotBuildable as error:
        return replace(found, verdict=NOT_BUILDABLE, reason=str(error), error="", rotary=False)
    layout = _layout(subject.sites())
    checks = tuple(check for make in kind.checks for check in _made(make, subject))
    with subject.patched("yarn"):
        saves = saved_as(subject.model)
    remarks = list(subject.remarks)
    absent = [c.name.split()[1] for c in checks if c.passed is None and c.name.startswith("native")]
    if absent:
        remarks.append(f"not compared: transformers has no {', '.join(absent)} for it")
    if found.model_type in _KNOWN:
        remarks.append(_KNOWN[found.model_type])
    failed = [f"{check.name}: {check.detail}" for check in checks if check.passed is False]
    return replace(
        found,
        verdict=FAILED if failed else SUPPORTED,
        reason="; ".join(failed),
        layout=layout,
        saves=saves,
        positions=subject.positions,
        checks=checks,
        remarks=tuple(remarks),
    )


def _made(make: Callable[[Any], Iterator[Check]], subject: Subject) -> Iterator[Check]:
    """The checks of one function; an error in it is a check that failed."""
    try:
        yield from make(subject)
    except Exception as error:
        yield Check(make.__name__.strip("_"), False, last_line(error))


def _rotates_by_table(model: PreTrainedModel) -> bool:
    """Whether a family without ``inv_freq`` rotates by sines it has written down."""
    names = [name for name, _ in [*model.named_buffers(), *model.named_parameters()]]
    source = inspect.getsource(sys.modules[type(model).__module__])
    return any("embed_positions" in name for name in names) and "rotary" in source


def _layout(sites: list[RotarySite]) -> str:
    types = {site.layer_type for site in sites}
    modules = {site.name for site in sites}
    local = {site.local for site in sites}
    words = ["full + sliding sets" if len(local) == 2 else "sliding only" if True in local else ""]
    words += ["shared with sliding layers" if any(site.shared for site in sites) else ""]
    named = " + ".join(sorted(map(str, types)))
    words += [f"sets {named}" if len(types) > 1 and len(local) == 1 else ""]
    words += [f"{len(modules)} modules" if len(modules) > 1 else ""]
    words += ["complex" if any(site.columns.complex for site in sites) else ""]
    words += ["three axes" if any(site.columns.axis is not None for site in sites) else ""]
    words += ["pairs that do not rotate" if any((site.loaded == 0).any() for site in sites) else ""]
    return ", ".join(filter(None, words)) or "one set"


def _setting(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of the families on tiny configurations, none of ours on saving."""
    logger = logging.getLogger("rope_ext")
    level, verbosity = logger.level, transformers.logging.get_verbosity()
    logger.setLevel(logging.ERROR)
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()


def totals(results: list[FamilyResult], mapping: str = "causal-LM mapping") -> str:
    """The counts, in one paragraph."""
    count = Counter(result.verdict for result in results)
    positions = Counter(result.positions for result in _rotary(results))
    rotary = len(_rotary(results))
    share = count[SUPPORTED] / max(1, rotary)
    idle = sum(NOTHING_GAINED in result.remarks for result in results)
    return (
        f"{len(results)} classes in the {mapping}, of which {rotary} use RoPE and can be built: "
        f"{count[SUPPORTED]} supported ({share:.1%}), {count[WINDOW_ONLY]} window only, "
        f"{count[REFUSED]} refused, {count[FAILED]} failed. {idle} of the supported ones use RoPE "
        f"in sliding layers only, so the patch cannot extend their context. Position methods: "
        f"{positions[POSITIONS] / max(1, rotary):.1%}, or "
        f"{(positions[POSITIONS] + positions[POSITIONS_WINDOWED]) / max(1, rotary):.1%} with "
        f'`sliding_layers="scale"`.'
    )


_COLUMNS = ("families", "verdict", "positions", "remarks")
_USUAL = ("one set", "yarn", "")
"""What is said of a layout and of the ``rope_type`` of a saved patch only where it differs."""


def page(results: list[FamilyResult]) -> str:
    """The content of docs/FAMILIES.md."""
    causal = [result for result in results if result.model_type in model_types()]
    seeing = [result for result in results if result.model_type in image_text_types()]
    others = [result for result in results if result not in (*causal, *seeing)]
    left = [result for result in results if not result.rotary]
    return f"""# Families

Look up what `rope_ext.patch` does with your model's `model_type`.

* **supported**: the patched model passes every check of `tests/families/checks.py`: it equals
  transformers' own scaling, cached decoding equals recomputation, `unpatch` restores every bit, and
  a saved model reloads.
* **window only**: every layer with RoPE has a limited window; `patch` needs
  `sliding_layers="scale"`.
* **refused**: `patch` raises an error and leaves the model unchanged.

*Positions* is the verdict for position methods (`rerope`, `self_extend`, ...). Without a remark,
the model has one set of frequencies, and plain transformers reloads a saved YaRN patch.

## Causal language models

{totals(causal)}

{_markdown(_COLUMNS, _grouped(_rotary(causal)))}

## Vision-language models

{totals(seeing, "image-text mapping that are not in the causal one")} Only the language model is
extended. *{TEXT_ALONE.capitalize()}*: without images.

{_markdown(_COLUMNS, _grouped(_rotary(seeing)))}

## All other classes

{totals(others, "other modules that may rotate")} These are encoders, embedders, heads,
encoder-decoders, audio, vision and series. Where attention reads both directions, a position
method equals its dense formula in float64. *{ROTATIONS_ALONE.capitalize()}*: so the model itself
was not run.

{_markdown(("classes", *_COLUMNS[1:]), _grouped(_rotary(others)))}

## Without rotary embedding, or not built

`patch` examines each model when it is called: a class that was not built here is proved or refused
then, too.

{_markdown(("families", "verdict", "", "reason"), _grouped(left))}

{_not_examined()}

Each class is built as a tiny random model with a trained length of {LENGTH} tokens, patched with
factor {FACTOR} and run on {TOKENS}. `python -m tests.families.coverage --write docs/FAMILIES.md`
wrote this page with transformers {transformers.__version__} and torch {torch.__version__};
`tests/families/test_families.py` and `test_other_classes.py` compare its verdicts.
"""


def _not_examined() -> str:
    named = [f"`{module}` ({package})" for module, package in not_importable().items()]
    return f"Not examined, for want of a package: {', '.join(named) or 'none'}."


def _rotary(results: list[FamilyResult]) -> list[FamilyResult]:
    return [result for result in results if result.rotary]


def _row(result: FamilyResult) -> tuple[str, ...]:
    remarks = "; ".join(filter(None, (result.reason, *result.remarks)))
    name = f"`{result.model_type}`"
    cells = (result.class_name, result.verdict, result.positions, result.layout, result.saves)
    return name, *cells, remarks


def _grouped(results: list[FamilyResult]) -> Iterator[tuple[str, ...]]:
    """Rows for all families of which the same is to be said, the largest group first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        name, _, verdict, positions, layout, saves, remarks = _row(result)
        layout, saves = ("" if word in _USUAL else word for word in (layout, saves))
        saved = saves and f"saved as {saves}".replace(
            "saved as patch again", "patched again on load"
        )
        said = "; ".join(filter(None, (layout, saved, remarks)))
        groups.setdefault((verdict, positions, said), []).append(name)
    for cells in sorted(groups, key=lambda cells: -len(groups[cells])):
        yield ", ".join(groups[cells]), *cells


def _markdown(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table, without the columns whose header is empty."""
    lines = [header, ("---",) * len(header), *rows]
    kept = [i for i, title in enumerate(header) if title]
    return "\n".join("| " + " | ".join(line[i] for i in kept) + " |" for line in lines)


_POSITIONS = (POSITIONS, POSITIONS_WINDOWED, POSITIONS_REFUSED)


def outdated(text: str, results: list[FamilyResult]) -> list[str]:
    """Where the verdicts on a page differ from ``results``."""
    written = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`([^`]+)`", cells[0]) if line.startswith("| `") else ():
            written[name] = (cells[1], *[cell for cell in cells[2:3] if cell in _POSITIONS])
    found = {
        result.model_type: (result.verdict, *filter(None, (result.positions,)))
        for result in results
    }
    return [
        f"{name}: the page says {written.get(name)}, found {found.get(name)}"
        for name in sorted(written.keys() | found.keys())
        if written.get(name) != found.get(name)
    ]


@functools.cache
def _others() -> dict[str, type[PreTrainedModel]]:
    classes = [cls for module in rotating_modules() for cls in other_classes(module)]
    return {cls.__name__: cls for cls in classes}


def names() -> list[str]:
    """Everything on the page: model types of both mappings, then the names of other classes."""
    return [*model_types(), *image_text_types(), *_others()]


def check(name: str) -> FamilyResult:
    """Check a model type of both mappings, or another class by its name."""
    cls = _others().get(name)
    return check_family(name) if cls is None else check_class(cls)


def main() -> None:
    """Patch and check every class of transformers that rotates, or the families that are named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", type=Path, help="write the page here")
    given = parser.parse_args()
    if given.families and given.write:
        parser.error("a page is about all families; name none with --write")
    results = []
    families = given.families or names()
    processes = min(len(families), os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for result in pool.map(check, families):
            results.append(result)
            print(" | ".join(filter(None, _row(result))), flush=True)
            for made in result.checks if given.families else ():
                word = {True: "passed", False: "FAILED", None: "not made"}[made.passed]
                print(f"  {made.name}: {word}, {made.detail}")
    print(totals(results, "mappings and other modules"))
    if given.write is not None:
        given.write.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
