"""Reports what was measured of methods on pretrained models, without fine-tuning.

``make evidence`` measures the models, and ``make evidence-pages`` writes ``evidence.json``: for
each model its shape, and the methods by name with their numbers by factor.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rope_ext.methods import Method

_MODELS: Sequence[Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("evidence.json").read_text(encoding="utf-8")
)
UNPATCHED = "unpatched"
_BASELINES = (UNPATCHED, "cut")
_TIMES = {"2": "twice", "4": "four times"}
_CANDIDATES = (
    "rerope self_extend leaky_rerope dual_chunk dpe jet_long lampe yarn dynamic_yarn mrrope"
)
"""Methods for use without fine-tuning, in order of results on the bundled checkpoints."""
_LONG_EMBED = "without training on embedders with RoPE (LongEmbed, arXiv 2404.12096)"
_EMBEDDERS = {
    "self_extend": f"found more than NTK and PI {_LONG_EMBED}.",
    "ntk": f"found more than PI, and less than self_extend, {_LONG_EMBED}.",
}
"""The same for embedders, with what was published."""


def three_digits(value: float) -> str:
    """Format a perplexity with three digits, such as ``7.50`` and ``1,060``."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:#.3g}"


def measured_models(
    config: Any = None, trained: int | None = None, embeds: bool = False
) -> Sequence[Mapping[str, Any]]:
    """Return the models to judge by: the one of this shape and trained length, or else all.

    A model's own measurements say more than those of others, so they count alone. An embedder
    (``embeds``) is judged by embedders, if some were measured, and other models never are.
    """
    kind = [model for model in _MODELS if bool(model.get("embeds")) == embeds]
    kind = kind or [model for model in _MODELS if not model.get("embeds")]
    same = [
        model
        for model in kind
        if model["trained"] == trained
        and all(getattr(config, name, None) == value for name, value in model["shape"].items())
    ]
    return same or kind


def factor_measured(model: Mapping[str, Any], factor: float, method: str = UNPATCHED) -> str | None:
    """Return the factor whose numbers answer for ``factor``: the next measured one, or the largest.

    With a ``method``, only factors at which it was measured; None if there are none.
    """
    known = sorted(model["methods"].get(method, {}).get("at", {}), key=float)
    return next((one for one in known if float(one) >= factor), known[-1] if known else None)


def sentence(
    name: str, factor: float = 2, models: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Summarize a method's results at ``factor`` on each model that it was measured on.

    The numbers are those of the model's next measured factor, and say which. Passkeys that were
    not decoded are said to be so: the method was scored after a lead-in, it did not write them.
    """
    parts = []
    for model in measured_models() if models is None else models:
        found = model["methods"].get(name, {})
        said = []
        if at := factor_measured(model, factor, name):
            said += _at(found["at"][at], model["methods"][UNPATCHED]["at"][at], at)
        if "within" in found:
            said.append(f"{found['within']} % perplexity within {model['within']} tokens")
        if said:
            parts.append(f"{model['model']}: {', '.join(said)}")
    return "; ".join(parts) or "Not measured on a pretrained model"


def _at(numbers: Mapping[str, Any], unpatched: Mapping[str, Any], factor: str) -> list[str]:
    """Say what was measured beyond the trained length: perplexity, passkeys and questions."""
    said = []
    where = f"at {_TIMES[factor]} its length"
    if "perplexity" in numbers:
        said.append(
            f"perplexity {three_digits(numbers['perplexity'])} {where} (unpatched "
            f"{three_digits(unpatched['perplexity'])})"
        )
    if passkey := numbers.get("passkey"):
        how = "" if passkey["decoded"] else " (scored after a lead-in, not decoded)"
        said.append(f"{passkey['found']} of {passkey['of']} passkeys there{how}")
    if retrieval := numbers.get("retrieval"):
        other = unpatched["retrieval"]
        chance = "" if retrieval.get("clear", True) else ", too close to tell"
        said.append(
            f"{retrieval['found']} of {retrieval['of']} questions {where} (unpatched "
            f"{other['found']}{chance}, and {other['cut']} if every text is cut at its window)"
        )
    return said


def ranked(factor: float = 2, models: Sequence[Mapping[str, Any]] | None = None) -> list[str]:
    """Rank methods by passkeys, then by perplexity to one decimal, at the factor asked for.

    Only numbers of the same factor are compared: each model's next measured one, or its largest. If
    any passkeys of a model were decoded, only decoded ones count there. A method without numbers
    comes after those that have them. Questions that an embedder found count where the difference
    from the unpatched model is clear; otherwise the method counts as equal to it. Equal methods
    stay in the published order.
    """
    judged = measured_models() if models is None else models
    embedders = [model for model in judged if model.get("embeds")]
    more = (name for model in embedders for name in model["methods"] if name not in _BASELINES)
    first = _EMBEDDERS if embedders else ()
    names = dict.fromkeys([*first, *_CANDIDATES.split(), *more])

    def key(name: str) -> tuple[float, int, float]:
        keys = 0
        perplexities = 0.0
        missing = 0
        for model in judged:
            at = str(factor_measured(model, factor))
            numbers = model["methods"].get(name, {}).get("at", {}).get(at, {})
            passkey = numbers.get("passkey")
            if passkey and (passkey["decoded"] or not _any_decoded(model, at)):
                keys += passkey["found"]
            if retrieval := numbers.get("retrieval"):
                equal = model["methods"][UNPATCHED]["at"][at]["retrieval"]
                keys += (retrieval if retrieval["clear"] else equal)["found"]
            perplexities += round(numbers.get("perplexity", 0.0), 1)
            missing += "perplexity" not in numbers and "retrieval" not in numbers
        return -keys, missing, perplexities

    return sorted(names, key=key)


def _any_decoded(model: Mapping[str, Any], factor: str) -> bool:
    every = (found.get("at", {}).get(factor, {}) for found in model["methods"].values())
    return any(numbers.get("passkey", {}).get("decoded") for numbers in every)


def why(method: Method, factor: float, models: Sequence[Mapping[str, Any]]) -> str:
    """Return the reasons to choose a method: its summary, and a line with its measurements.

    For embedders, a line between them says what was published.
    """
    lines = [f"{method.summary} ({method.paper})."]
    if any(model.get("embeds") for model in models) and method.name in _EMBEDDERS:
        lines.append(_EMBEDDERS[method.name])
    lines.append(f"{sentence(method.name, factor, models)} (docs/evidence.md).")
    return "\n".join(lines)
