"""The page of the field has every system that is here, and a status and an answer in every row."""

from __future__ import annotations

import re
from pathlib import Path

from rope_ext.methods import all_encodings, all_methods, method_class
from rope_ext.methods.temperature import TEMPERATURES

PAGE = Path(__file__).parents[2] / "docs/field.md"


def tables() -> dict[str, list[list[str]]]:
    """Cells of all rows by the last column of their head, which names the kind of a table."""
    found: dict[str, list[list[str]]] = {}
    for block in PAGE.read_text("utf-8").split("\n\n"):
        if block.startswith("| "):
            head, line, *rows = (
                [cell.strip() for cell in row.split("|")[1:-1]] for row in block.splitlines()
            )
            assert set(line) == {"---"} and {len(row) for row in rows} == {len(head)}
            found.setdefault(head[-1], []).extend(rows)
    return found


def test_every_system_of_this_package_has_a_row() -> None:
    here = " ".join(row[3] for row in tables()["measured"])
    named = [cls.name for cls in (*all_encodings(), *all_methods(), method_class("rope"))]
    for name in named:
        assert f"`{name}`" in here, name
    assert all(f'temperature="{name}"' in here for name in TEMPERATURES if name != "constant")


def test_every_system_has_a_status_and_a_source() -> None:
    for system, _, source, status, measured in tables()["measured"]:
        assert re.match(r"\*\*(here|in part|not here)\*\*: .", status), system
        assert source, system
        assert bool(measured) != status.startswith("**not here**"), system


def test_every_claim_is_answered_by_a_linked_number_or_not_at_all() -> None:
    claims = tables()["page, command"]
    assert len(claims) > 40
    for claim, source, answer, number, page in claims:
        assert source and answer and number, claim
        assert "](" in page or answer == "cannot tell", claim
        if answer not in ("cannot tell", "see there"):
            assert re.search(r"\d", number), claim
