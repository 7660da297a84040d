"""The benchmark of drafts counts the forwards that they save."""

from __future__ import annotations

import pytest

from lab.benchmarks.drafts import DRAFTED, measure

pytestmark = pytest.mark.slow


def test_it_counts_forwards_with_and_without_drafts() -> None:
    found = {x.draft: x for x in measure("yarn", 4, [64], count=1, new=12, bits=8)}
    assert found["none"].per_forward == 1
    assert 1 < found["draft model, yarn"].per_forward <= 1 + DRAFTED
    assert found["prompt lookup"].new == 12


def test_the_draft_model_may_have_another_method() -> None:
    """A draft in an engine is extended by its configuration, which expresses no position method."""
    options = {"count": 1, "new": 8, "bits": 8, "draft_method": "yarn"}
    found = {x.draft: x for x in measure("self_extend", 4, [600], **options)}
    assert found["draft model, yarn"].per_forward > 1
