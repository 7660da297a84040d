"""What the README says is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rope_ext
from rope_eval.plots.style import numbers_of
from rope_ext.cli import app
from rope_ext.methods import all_encodings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_first_example_runs(tmp_path, monkeypatch, capsys) -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert "512 -> 2048 tokens by yarn" in capsys.readouterr().out


def test_the_diagnosis_is_what_the_command_prints() -> None:
    advice = page("advice.md")
    words = re.search(r"\$ rope-ext (diagnose .*)\n", advice).group(1)
    result = CliRunner().invoke(app, words.replace("checkpoints", f"{ROOT}/checkpoints").split())
    assert f"{words}\n{result.stdout}```" in advice


@pytest.mark.parametrize("method", rope_ext.methods(), ids=lambda method: method.name)
def test_every_method_is_in_the_table_as_the_code_has_it(method: rope_ext.MethodInfo) -> None:
    assert f"| `{method.name}` | {method.summary} | {method.paper} |" in README


def test_it_counts_methods_and_encodings() -> None:
    methods, encodings = len(rope_ext.methods()), len(all_encodings())
    assert f"{methods} methods, among them" in README and f"[{encodings} other encodings]" in README


def test_the_count_of_families_is_that_of_the_generated_page() -> None:
    found = re.findall(r"(\d+) supported \(([\d.]+)%\)", page("FAMILIES.md"))
    assert len(found) == 2
    for text in (README, page("using.md")):
        assert all(f"{count} ({share} %)" in text for count, share in found)


def test_the_count_of_families_with_images_is_that_of_the_generated_page() -> None:
    rows = re.findall(r"^\| image (changes|generate yarn) \| (\d+) ", page("FAMILIES.md"), re.M)
    made = dict(rows)
    said = rf"{made['changes']}\s+of the .*{made['generate yarn']} of them in a batch"
    assert re.search(said, page("using.md"), re.DOTALL)


def test_its_pictures_and_links_are_there() -> None:
    """They are absolute: relative ones break on the page of a package index."""
    assert re.findall(r"\]\((?!http|#)([^)]+)\)", README) == []
    links = re.findall(r"rope-ext/rope-ext/(?:blob/)?main/([^)#]+)[)#]", README)
    assert len(links) > 30
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_models_it_names_are_supported() -> None:
    rows = re.findall(
        r"^\| `\w+` \| (\w+)ForCausalLM \| supported ", page("FAMILIES.md"), re.MULTILINE
    )
    (named,) = re.findall(r"are supported, among them (.*?) without its sliding", README, re.DOTALL)
    for name in re.split(r",\s+|\s+and\s+", named):
        plain = re.sub(r"[^a-z0-9]", "", name.lower())
        assert plain in {row.lower() for row in rows}, name


def test_the_share_of_position_methods_is_that_of_the_generated_page() -> None:
    found = re.search(r"Position methods: ([\d.]+)% by default, ([\d.]+)%", page("FAMILIES.md"))
    for text in (README, page("using.md")):
        assert all(f"({share} %" in text for share in found.groups())


def test_its_table_is_part_of_that_of_the_demonstration() -> None:
    rows = re.findall(r"^\| .*<br>.*\|$", README, re.MULTILINE)
    assert len(rows) > 4
    assert set(rows) <= set(page("demonstration.md").splitlines())


def test_it_is_one_screen_that_sells() -> None:
    assert len(README.splitlines()) <= 165


def tables(section: str) -> dict[tuple[str, int], tuple[float, float]]:
    """Perplexity and share of passkeys in the tables of the demonstration, by row and length."""
    text = page("demonstration.md").split(f"\n## {section}\n")[1].split("\n## ")[0]
    lengths, found = [512, 1024, 2048, 4096], {}
    for row in re.findall(r"^\| (.*<br>.*) \|$", text, re.MULTILINE):
        name, *cells = row.split(" | ")
        for length, cell in zip(lengths, cells, strict=True):
            perplexity, share = re.fullmatch(r"([\d.]+) \[.*<br>(\d+)% \[.*", cell).groups()
            system = "none" if name == "unpatched" else name.strip("`")
            found[system, length] = float(perplexity), int(share) / 100
    return found


def test_the_picture_of_perplexity_is_that_of_the_table() -> None:
    table = tables("tiny-512")
    shown = numbers_of(ROOT / "docs" / "perplexity.png")
    assert len(shown) == 9 * 4
    for entry in shown:
        value, _ = table[entry["system"], entry["length"]]
        assert entry["value"] == pytest.approx(value, rel=0.01), entry  # of another machine


@pytest.mark.parametrize(
    ("picture", "section"), [("passkey", "tiny-512"), ("passkey-bytes", "tiny-bytes-512")]
)
def test_the_pictures_of_passkeys_are_those_of_the_tables(picture: str, section: str) -> None:
    table, shares = tables(section), {}
    for entry in numbers_of(ROOT / "docs" / f"{picture}.png"):
        shares.setdefault((entry["system"], entry["length"]), []).append(entry["value"])
    assert len(shares) == 9 * 4 and {len(depths) for depths in shares.values()} == {5}
    for place, depths in shares.items():
        assert sum(depths) / 5 == pytest.approx(table[place][1], abs=0.051), place  # one passkey
