"""What the sentence about a training says, on outcomes made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rope_eval.cases import Outcome
from rope_eval.reports.results import Results
from rope_eval.tasks.passkey import Passkey
from rope_eval.tasks.perplexity import Perplexity

PERPLEXITY, PASSKEY = SimpleNamespace(name=Perplexity.name, kind="loss"), Passkey()


def system(name: str) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, model="m", method="yarn", trained=512, adapted=name == "yarn, trained"
    )


def outcomes(task: str, name: str, values: list[float]) -> list[Outcome]:
    return [
        Outcome("", name, task, 4096, 0, 0.5, 0, str(number), (), number, value, 100)
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("losses", "found", "said"),
    [
        ((2.0, 1.5), (60, 20), ("perplexity: clearly lower (-39", "passkey: clearly lower (-40.0")),
        ((1.5, 2.0), (20, 60), ("perplexity: clearly higher", "passkey: clearly higher (+40.0")),
        (
            (2.0, 2.0),
            (60, 59),
            ("cannot tell whether it changed (+0.0", "tell whether it changed (-1"),
        ),
    ],
)
def test_a_change_is_said_where_it_is_clear(losses, found, said) -> None:
    names = ("unpatched", "yarn, before training", "yarn, trained")
    measured: list[Outcome] = []
    for name, loss, hits in zip(names, (3.0, *losses), (0, *found), strict=True):
        measured += outcomes("perplexity", name, [loss + 0.01 * (n % 3) for n in range(12)])
        measured += outcomes("passkey", name, [float(n < hits) for n in range(100)])
    systems = list(map(system, names))
    plan = SimpleNamespace(tasks=[PERPLEXITY, PASSKEY], lengths=[4096], systems=systems)
    sentence = Results(plan, measured).training(*systems[1:])
    assert sentence.startswith("Training under yarn: beyond 512 tokens, ")
    assert all(part in sentence for part in said)
