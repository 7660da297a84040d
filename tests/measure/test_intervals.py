"""Intervals: published values, coverage, and judgements by cases made to mislead them."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from rope_eval.cases import Outcome
from rope_eval.reports.intervals import (
    mcnemar,
    mean_interval,
    paired_ends,
    paired_rates,
    rate_interval,
    sum_ends,
)
from rope_eval.reports.recommendation import Recommendation, Scores
from rope_eval.reports.results import Results
from rope_eval.reports.summary import (
    TOO_FEW,
    Estimate,
    difference,
    estimate,
    estimate_perplexity,
    is_clear,
    rate_difference,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2527, 0.3676),  # Newcombe 1998, Statistics in Medicine 17, 857, table I
        (15, 148, 0.0578, 0.1617),
        (0, 20, 0.0, 0.1684),
        (1, 29, 0.0009, 0.1776),
    ],
)
def test_exact_rates_of_the_literature(
    successes: int, trials: int, low: float, high: float
) -> None:
    assert rate_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("documents", [4, 8, 20])
@pytest.mark.parametrize("spread", [0.0, 0.5], ids=["equal", "weighted"])
@pytest.mark.parametrize("skew", [0.01, 0.5])
def test_means_are_covered_as_often_as_intervals_say(
    documents: int, spread: float, skew: float
) -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(0, skew, (20_000, documents))
    low, high = sum_ends([(values, rng.lognormal(0, spread, values.shape))])
    truth = math.exp(skew**2 / 2)
    # The bar is .93; of 20,000 samples the standard error is .0018.
    assert np.mean((low <= truth) & (truth <= high)) > 0.93


def answered(values: np.ndarray) -> list[Outcome]:
    """Outcomes of questions, asked in several prompts each; values ``[prompts, questions]``."""
    return [
        Outcome("k", "s", "t", 9, None, None, 0, f"{row} {at}", (), 1 + at, float(value), 1)
        for row, answers in enumerate(values)
        for at, value in enumerate(answers)
    ]


@pytest.mark.parametrize("prompts", [1, 4])
def test_a_question_in_several_prompts_or_lengths_counts_once(prompts: int) -> None:
    """Equal systems whose answers to a question are alike in all of its prompts."""
    rng = np.random.default_rng(0)
    outside, clear, samples = 0, 0, 400
    for _ in range(samples):
        one, other = (rng.random((2, 1, 60)) < 0.5).repeat(prompts, 1)
        found = estimate(answered(one), "rate")
        outside += not found.low <= 0.5 <= found.high
        clear += is_clear(difference(answered(one), answered(other), "rate"))
    assert outside / samples < 0.05 and clear / samples < 0.05
    assert found.count == 60 and found.value == one.mean()


def test_no_perplexity_is_below_1() -> None:
    found = estimate_perplexity([0.01, 0.0, 0.02, 0.3])
    assert found.low == 1 < found.value < found.high


def test_few_documents_have_no_interval() -> None:
    assert mean_interval([1.0, 2.0, 3.0]) is None and paired_rates([1] * 3, [0] * 3) is None
    assert estimate_perplexity([1.0, 2.0, 3.0]).note == TOO_FEW
    assert not is_clear(rate_difference([0.6, 0.6], [0.4, 0.4]))


def test_equal_partial_scores_leave_doubt() -> None:
    low, high = paired_rates([0.5] * 20, [0.5] * 20)
    assert low < -0.1 and high > 0.1


def test_what_is_smaller_than_the_smallest_effect_is_not_clear() -> None:
    assert not is_clear(Estimate(2e-7, 1e-7, 3e-7, 20))
    assert is_clear(Estimate(0.006, 0.001, 0.011, 20))


def test_mcnemar() -> None:
    assert mcnemar(4, 0) == pytest.approx(0.125) and mcnemar(6, 0) == pytest.approx(0.03125)
    assert mcnemar(3, 3) == 1 and mcnemar(0, 0) == 1


@pytest.mark.parametrize("trials", [5, 6, 12, 40])
def test_equal_systems_are_rarely_called_different(trials: int) -> None:
    rng = np.random.default_rng(1)
    for unlike in (0.1, 0.4, 1.0):
        differ = rng.random((20_000, trials)) < unlike
        one = rng.integers(0, 2, differ.shape)
        low, high = paired_ends(one, np.where(differ, 1 - one, one))
        assert np.mean((low > 0) | (high < 0)) < 0.06


# The recommendation

EASY = [1.0, 2.0, 3.0, 1.5, 2.5, 2.0]


def scores(beyond: float, within: float, passes: int, inside: int = 20, of: int = 20) -> Scores:
    """Losses above ``EASY``, and how many passkeys are found beyond and within."""

    def losses(by: float) -> list[float]:
        return [loss + by * (1 + 0.1 * (i % 2)) for i, loss in enumerate(EASY)]

    trials = [[1.0] * n + [0.0] * (of - n) for n in (inside, passes)]
    return Scores({512: losses(within), 1024: losses(beyond)}, {512: trials[0], 1024: trials[1]})


def test_passkeys_found_by_luck_throw_no_method_out() -> None:
    """The unpatched model finds 4 of 15 within, the better method none of them."""
    measured = {
        "unpatched": scores(2.0, 0.0, 0, 4, 15),
        "dynamic_yarn": scores(0.6, 0.0, 3, 4, 15),
        "leaky_rerope": scores(0.4, 0.02, 13, 0, 15),
    }
    found = Recommendation(measured, 512)
    assert found.beyond.best.name == "leaky_rerope" and found.cheap.best.name == "leaky_rerope"
    assert "the unpatched model finds 27% [8, 55], less than half" in str(found)


def test_the_best_the_cheap_and_the_served_are_named() -> None:
    measured = {
        "unpatched": scores(2.0, 0.0, 0),
        "dear": scores(0.1, 0.2, 20),
        "cheap": scores(0.5, 0.01, 20),
        "served": scores(0.9, 0.0, 20),
    }
    found = Recommendation(measured, 512, {"served": ["vllm"]})
    picks = (found.beyond, found.cheap, found.served)
    assert [pick.best.name for pick in picks] == ["dear", "cheap", "served"]
    assert found.choice.name == "dear"  # the others are clearly worse beyond
    beyond, cost, engines = found.bullets
    assert beyond.startswith("Beyond 512 tokens, dear is best")
    assert "Best that costs at most 5%: cheap, perplexity" in cost
    assert engines.startswith("Best that an engine can serve (vllm): served, perplexity")


def test_of_equals_the_one_that_is_cheap_and_served_is_continued_with() -> None:
    plain, dear = scores(2.0, 0.0, 0), scores(0.1, 0.2, 20)
    measured = {"unpatched": plain, "dear": dear, "cheap": scores(0.1, 0.0, 20)}
    found = Recommendation(measured, 512, {"dear": ["vllm"], "cheap": ["vllm"]})
    assert found.beyond.best.name == "dear" and found.choice.name == "cheap"


def test_what_helps_is_best_not_what_buys_perplexity_with_passkeys() -> None:
    forgets, infinite = scores(0.1, 0.0, 0), Scores({512: EASY, 1024: [math.inf] * len(EASY)})
    measured = {"unpatched": scores(2.0, 0.0, 12), "helps": scores(0.9, 0.0, 11)}
    passes = {512: [1.0] * 20, 1024: [1.0] * 20}
    infinite = Scores(infinite.losses, passes)
    for name, other in {"forgets": forgets, "infinite": infinite}.items():
        for both in ({name: other, **measured}, {**measured, name: other}):
            found = Recommendation(both, 512)
            assert found.beyond.best.name == found.choice.name == "helps"
            assert str(found).startswith("Beyond 512 tokens, helps is best: ")
            assert "Not significantly different" not in str(found)
        found = str(Recommendation({"unpatched": measured["unpatched"], name: other}, 512))
        assert found.startswith(f"{name} does not help beyond")


def test_one_method_is_not_called_the_best() -> None:
    """It may well help: there is nothing that it is better than but the model itself."""
    alone = {"unpatched": scores(2.0, 0.0, 0), "a": scores(0.5, 0.0, 20)}
    for plain in (0, 9):
        found = str(Recommendation(alone | {"unpatched": scores(2.0, 0.0, plain)}, 512))
        assert found.startswith("Beyond 512 tokens, a helps") and "best" not in found.lower()
    same = {"unpatched": scores(0.5, 0.0, 9), "a": scores(0.5, 0.0, 11)}
    worse = {"unpatched": scores(0.5, 0.0, 9), "a": scores(0.9, 0.0, 9)}
    for measured, start in ((same, "Cannot tell whether a helps"), (worse, "a does not help")):
        found = str(Recommendation(measured, 512, {}))
        assert found.startswith(start) and not re.search("best|any|No method", found)


def test_a_cost_in_perplexity_says_nothing_of_passkeys() -> None:
    """Perplexity stays within 5 % while half of the passkeys are gone, and the other way round."""
    plain = scores(2.0, 0.0, 0, inside=20)
    forgets = scores(0.5, 0.01, 20, inside=10)
    found = Recommendation({"unpatched": plain, "forgets": forgets}, 512)
    assert found.beyond.best.costs_little is True and found.beyond.best.loses_passkeys
    assert not found.beyond.best.cheap and found.cheap is None
    assert "at most 5% of perplexity" in found.bullets[1]
    assert "clearly fewer passkeys" in found.bullets[1]
    dear = scores(0.5, 0.2, 20, inside=20)
    found = Recommendation({"unpatched": plain, "dear": dear}, 512)
    assert found.beyond.best.costs_little is False and not found.beyond.best.loses_passkeys
    assert "more than 5% of perplexity" in found.bullets[1]


def test_the_cost_is_that_at_the_longest_trained_length_as_in_the_table() -> None:
    """Passkeys that are lost at a shorter length are no cost at this one, and do not hide it."""
    losses = {length: EASY for length in (256, 512)} | {1024: [loss + 1 for loss in EASY]}
    better = losses | {1024: EASY}

    def keys(*found: int) -> dict[int, list[float]]:
        lengths = (256, 512, 1024)
        return {n: [1.0] * k + [0.0] * (50 - k) for n, k in zip(lengths, found, strict=True)}

    plain = Scores(losses, keys(50, 50, 0))
    for found, clear in (((20, 50, 50), False), ((50, 40, 50), True)):
        measured = {"unpatched": plain, "yarn": Scores(better, keys(*found))}
        assert Recommendation(measured, 512).beyond.best.loses_passkeys is clear
    few = {"unpatched": Scores(losses, keys(50, 9, 0)), "yarn": Scores(better, keys(50, 9, 50))}
    assert "at 512 tokens the unpatched model finds 18%" in str(Recommendation(few, 512))


def test_an_embedder_without_a_clear_loss_is_not_said_to_lose_none() -> None:
    def asked(inside: int, beyond: int) -> Scores:
        return Scores(
            {}, {n: [1.0] * k + [0.0] * (50 - k) for n, k in ((512, inside), (1024, beyond))}
        )

    measured = {"unpatched": asked(40, 5), "dear": asked(10, 50), "cheap": asked(36, 40)}
    cost = Recommendation(measured, 512, things="questions").bullets[1]
    assert "Best that shows no clear loss: cheap" in cost and "loses none" not in cost
    del measured["cheap"]
    measured["dearer"] = asked(9, 50)
    cost = Recommendation(measured, 512, things="questions").bullets[1]
    assert cost.endswith("Every method clearly loses some.")


@pytest.mark.parametrize("cost", [0.12, 0.2])
def test_a_cost_whose_interval_reaches_beyond_5_percent_is_not_called_little(cost: float) -> None:
    costs = [0.0, 0.0, cost, 0.0, cost, 0.0]  # two documents out of six pay for all
    dear = Scores({512: [a + b for a, b in zip(EASY, costs, strict=True)], 1024: EASY})
    plain = Scores({512: EASY, 1024: [loss + 1 for loss in EASY]})
    found = Recommendation({"unpatched": plain, "dear": dear}, 512)
    assert found.cheap is None and (found.beyond.best.cost.value < 0.05) == (cost == 0.12)
    assert "cannot tell whether at most 5% of perplexity" in found.bullets[1]
    plain = Scores({512: EASY[:3], 1024: [9.0] * 3})
    for more in (0, cost):
        few = Scores({512: [loss + more for loss in EASY[:3]], 1024: EASY[:3]})
        found = str(Recommendation({"unpatched": plain, "a": few}, 512))
        assert "cannot tell whether at most 5%" in found


def test_what_finds_clearly_fewer_passkeys_is_not_best() -> None:
    measured = {
        "unpatched": scores(2.0, 0.0, 0),
        "smooth": scores(0.1, 0.0, 2),
        "finder": scores(0.3, 0.0, 19),
    }
    assert Recommendation(measured, 512).beyond.best.name == "finder"


def test_ties_are_called_ties_and_nothing_is_said_without_evidence() -> None:
    tied = {"unpatched": scores(2.0, 0.0, 0), "a": scores(0.5, 0.0, 20), "b": scores(0.5, 0.0, 19)}
    assert "Not significantly different: b" in str(Recommendation(tied, 512))
    same = {"unpatched": scores(0.5, 0.0, 9), "a": scores(0.5, 0.0, 11), "b": scores(0.5, 0.0, 9)}
    assert str(Recommendation(same, 512)).startswith("Cannot tell whether any method helps")
    worse = same | {"a": scores(0.9, 0.0, 9), "b": scores(0.9, 0.0, 9)}
    assert str(Recommendation(worse, 512)).startswith("No method helps beyond 512 tokens")
    assert str(Recommendation(same, 2048)).startswith("No recommendation: no length beyond")


def test_a_model_without_finite_losses_gets_no_method() -> None:
    broken = Scores({512: [math.inf] * 6, 1024: [math.inf] * 6})
    found = Recommendation({"unpatched": broken, "a": broken}, 512)
    assert "within 512 tokens the loss of the unpatched model is NaN or infinite" in str(found)
    assert found.broken and found.choice is None
    beyond = Scores({512: EASY, 1024: [math.inf] * 6})  # which a method may well help
    assert not Recommendation(
        {"unpatched": beyond, "a": Scores({512: EASY, 1024: EASY})}, 512
    ).broken


def test_equal_methods_are_rarely_recommended() -> None:
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(400):
        measured = {
            name: Scores({512: EASY, 1024: rng.normal(2, 0.3, 6).tolist()})
            for name in ("unpatched", "a", "b", "c", "d")
        }
        found = Recommendation(measured, 512)
        wrong += found.beyond.best.helps
    assert wrong / 400 < 0.08  # 5 %, and 2.7 standard errors


def test_the_interval_of_a_suite_covers_where_one_task_has_few_prompts() -> None:
    tasks, covered = [SimpleNamespace(name="few"), SimpleNamespace(name="many")], 0
    for few, many in np.random.default_rng(0).binomial([10, 1000], 0.3, (400, 2)):
        of = {"few": Estimate(few / 10, 0, 1, 10), "many": Estimate(many / 1000, 0, 1, 1000)}
        results = SimpleNamespace(suites={"s": tasks}, estimates={(n, "", 9): of[n] for n in of})
        found = Results.average(results, "s", "", 9)
        covered += found.low <= 0.3 <= found.high
    assert covered >= 0.94 * 400
