"""The page of all systems has every one that is here."""

from __future__ import annotations

from pathlib import Path

from rope_ext.methods import all_encodings, method_class
from rope_ext.methods.temperature import TEMPERATURES

PAGE = Path(__file__).parents[2] / "docs/encodings/field.md"


def test_every_encoding_and_temperature_has_a_row() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    here = " ".join(row.split("|")[-2] for row in rows)
    assert len({row.count("|") for row in rows}) == 1
    for name in [cls.name for cls in all_encodings()] + [method_class("rope").name]:
        assert f"`{name}`" in here
    assert all(f'temperature="{name}"' in here for name in TEMPERATURES if name != "constant")
