"""The documentation: docstrings, the snippets in docs/, and the site that mkdocs builds."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.main import get_command

import rope_ext
from rope_ext.cli import app
from rope_ext.encodings import Encoding, InputEncoding
from rope_ext.encodings.alibi import slopes
from rope_ext.methods import Rope, all_encodings, all_methods
from tests.helpers.models import tiny_llama

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def snippets(section: str) -> list[str]:
    """The examples in a section of docs/adding.md."""
    _, _, text = (DOCS / "adding.md").read_text("utf-8").partition(f"\n## {section}\n")
    return re.findall(r"```python\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)


def commands() -> list[str]:
    """Every ``rope-ext`` command with arguments in the README, the docs and the model cards."""
    found = set()
    for page in (*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("checkpoints/*/*.md")):
        text = re.sub(r"\\\n\s*", " ", page.read_text("utf-8"))
        blocks = re.findall(r"```(?:bash|shell|console)\n(.*?)```", text, re.DOTALL)
        lines = [*"".join(blocks).splitlines(), *re.findall(r"`(rope-ext [^`\n]+)`", text)]
        lines = [re.split(r" (?:#|&&|>) ", line.removeprefix("$ "))[0] for line in lines]
        found |= {line.strip() for line in lines if re.match(r"rope-ext \S+ (?!TASK).*--", line)}
    return sorted(found)


def test_every_command_in_the_docs_can_be_typed() -> None:
    """Its options exist, and none that it needs is missing."""
    group = get_command(app)
    given = commands()
    assert len(given) > 25
    for line in given:
        name, *words = shlex.split(line.replace("MODEL", "some/model"))[1:]
        with click.Context(group, info_name="rope-ext") as outer:
            command = group.get_command(outer, name)
            assert command is not None, line
            command.make_context(name, words, parent=outer)


def test_the_versions_that_are_named_are_those_that_are_tested() -> None:
    lowest = re.search(r"transformers>=([\d.]+)", (ROOT / "pyproject.toml").read_text())[1]
    pins = re.findall(r"^transformers==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    text = (DOCS / "using.md").read_text("utf-8")
    assert f"transformers {lowest} to" in text and f"transformers {max(pins)}\n" in text


def test_files_that_the_docs_name_are_there() -> None:
    names = r"`((?:rope_ext|eval|recipes|lab|tests|docs|checkpoints)/[\w./-]+)`"
    for page in DOCS.rglob("*.md"):
        for path in re.findall(names, page.read_text("utf-8")):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_the_tests_that_the_guide_for_contributors_names_are_there() -> None:
    named = re.findall(r"^\| `(test_\w+)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M)
    sources = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    assert named
    for name in named:
        assert any(f"def {name}(" in source for source in sources), name


def hooks(base: type) -> Iterator[tuple[str, str]]:
    """What a class defines, each with its docstring, or the comment above it."""
    lines = inspect.getsource(base).splitlines()
    for node in ast.parse("\n".join(lines)).body[0].body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, ast.get_docstring(node) or ""
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, lines[node.lineno - 2]


@pytest.mark.parametrize("base", [Encoding, InputEncoding])
def test_a_hook_of_encodings_names_one_that_uses_it(base: type) -> None:
    encodings = {cls.name: cls for cls in all_encodings() if issubclass(cls, base)}
    found = dict(hooks(base))
    for hook, text in found.items():
        users = {
            name
            for name, cls in encodings.items()
            if any(hook in vars(each) for each in cls.__mro__[: cls.__mro__.index(base)])
        }
        named = set(re.findall(r"``(\w+)``", text)) & encodings.keys()
        assert named <= users, hook
        assert named or not users, hook
    assert len(found) > 5


def how_it_works(section: str) -> str:
    _, _, text = (DOCS / "how-it-works.md").read_text("utf-8").partition(f"\n## {section}\n")
    return text.partition("\n## ")[0]


def test_the_glossary_names_files_and_what_they_define() -> None:
    rows = [
        line.split("|")[-2].strip() for line in how_it_works("Words").splitlines() if "|" in line
    ]
    places = [cell for cell in rows[2:] if cell]  # below the title and the rule
    assert places
    for cell in places:
        path, _, name = cell.strip("`").partition(": ")
        file = ROOT / "rope_ext" / path
        assert file.is_file(), cell
        tree = ast.parse(file.read_text("utf-8"))
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        assert not name or name in classes, cell


def test_the_reading_list_names_files() -> None:
    paragraphs = how_it_works("What to read first").split("\n\n")
    [items] = [text for text in paragraphs if text.startswith("* ")]
    lists = [re.findall(r"`([^`]+)`", item) for item in items.split("\n* ")]
    assert all(lists)
    for name in itertools.chain(*lists):
        assert (ROOT / "rope_ext" / name).with_suffix(".py").is_file(), name


@torch.no_grad()
def test_a_frequency_method_takes_the_ten_lines_of_the_page(own_registry, ids, tmp_path) -> None:
    lines, call = snippets("A frequency method")
    assert len([line for line in lines.splitlines() if line.strip()]) <= 10
    names = {"__name__": __name__}
    exec(lines, names)
    model = tiny_llama()  # 64 tokens, 8 pairs: turns of 10.2, 3.22, 1.02, 0.32, ...
    exec(call, {"rope_ext": rope_ext, "model": model})  # factor=4, turns=2
    theta = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    expected = torch.cat((theta[:2], theta[2:] / 4))
    torch.testing.assert_close(model.model.rotary_emb.inv_freq.double(), expected)

    described = rope_ext.describe(model)
    assert (described.method, described.target_length) == ("step", 256)
    assert described.options["turns"] == 2

    logits = model(ids).logits
    model.save_pretrained(tmp_path)
    # Frequencies are divided by the table again, which rounds in float32.
    for load in (rope_ext.from_pretrained, AutoModelForCausalLM.from_pretrained):
        again = load(str(tmp_path)).eval()
        torch.testing.assert_close(again(ids).logits, logits, rtol=0, atol=1e-4)
    rope_ext.unpatch(model)
    assert (model(ids).logits - logits).abs().max() > 0.01


@torch.no_grad()
def test_a_position_method_takes_the_lines_of_the_page(own_registry, ids, tmp_path) -> None:
    names = {"__name__": __name__}
    exec(snippets("A position method")[0], names)
    model = tiny_llama()
    rope_ext.patch(model, "halved", factor=2)
    rerope = tiny_llama()
    rope_ext.patch(rerope, "leaky_rerope", factor=2, window=16, k=2, log_n=False)  # the same map
    logits = model(ids).logits
    # The same angles, from other sums of float32.
    torch.testing.assert_close(logits, rerope(ids).logits, rtol=0, atol=1e-4)
    model.save_pretrained(tmp_path)
    again = rope_ext.from_pretrained(str(tmp_path))
    torch.testing.assert_close(again(ids).logits, logits, rtol=0, atol=0)


@torch.no_grad()
def test_an_encoding_takes_the_one_file_of_the_page(own_registry, ids, tmp_path) -> None:
    lines, calls = snippets("An encoding")
    names = {"__name__": __name__}
    exec(lines, names)
    assert names["Slope"].adds()  # bias= accepts it

    model, alibi = tiny_llama(), tiny_llama()
    rope_ext.patch(model, "slope", clip=1000)
    rope_ext.patch(alibi, "alibi")
    learned = [p for name, p in model.named_parameters() if ".rope_ext_bias." in name]
    assert len(learned) == model.config.num_hidden_layers
    for parameter in learned:
        parameter.copy_(slopes(len(parameter)))
    logits = model(ids).logits
    # The same bias, as long as nothing is clipped.
    torch.testing.assert_close(logits, alibi(ids).logits, rtol=0, atol=1e-4)
    model.save_pretrained(tmp_path)
    again = rope_ext.from_pretrained(str(tmp_path)).eval()
    torch.testing.assert_close(again(ids).logits, logits, rtol=0, atol=0)

    model = tiny_llama()
    unpatched = model(ids).logits
    exec(calls, {"rope_ext": rope_ext, "model": model, **names})
    assert rope_ext.describe(model).method == "yarn"
    with_bias = model(ids).logits
    rope_ext.unpatch(model)
    with rope_ext.patched(model, "yarn", factor=4):
        assert (model(ids).logits - with_bias).abs().max() > 0.01
    torch.testing.assert_close(model(ids).logits, unpatched, rtol=0, atol=0)


def own_model(source: str = "") -> torch.nn.Module:
    names = {"__name__": __name__}
    exec(source or snippets("A family")[0], names)
    torch.manual_seed(0)
    model = names["OwnModel"](names["OwnConfig"]()).eval()
    for parameter in model.parameters():  # large enough for positions to matter
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@torch.no_grad()
def test_the_family_of_the_page_is_patched() -> None:
    model, tokens = own_model(), torch.arange(100)[None] * 7 % 64
    unpatched = model(tokens)[0]
    own = {"OwnModel": type(model), "OwnConfig": type(model.config)}
    exec(snippets("A family")[1], {"rope_ext": rope_ext, **own})

    with rope_ext.patched(model, "yarn", factor=4):
        logits = model(tokens)[0]
    twin = own_model()  # the same, by hand
    method, rope = rope_ext.YaRN(factor=4), Rope.geometric(base=10000, dim=32, length=32)
    twin.rotary_emb.inv_freq.copy_(method.inv_freq(rope))
    twin.rotary_emb.attention_scaling = method.attention_scaling(rope)
    # The configuration has no base; read off float32 frequencies it is good to about 1e-6.
    torch.testing.assert_close(logits, twin(tokens)[0], rtol=0, atol=1e-3)
    assert (logits - unpatched).abs().max() > 0.1

    told = {"original_max_position_embeddings": 100}
    with rope_ext.patched(model, "rerope", factor=4, window=100, log_n=False, **told):
        torch.testing.assert_close(model(tokens)[0], unpatched, rtol=1e-4, atol=1e-4)
    with rope_ext.patched(model, "rerope", factor=4):
        assert (model(tokens)[0] - unpatched).abs().max() > 0.1
    torch.testing.assert_close(model(tokens)[0], unpatched, rtol=0, atol=0)


@pytest.mark.parametrize("value", [math.nan, 0.0, 1e-38, 1e30])
def test_a_family_whose_frequencies_were_not_loaded_is_refused(value: float) -> None:
    model = own_model()
    model.rotary_emb.inv_freq.fill_(value)
    with pytest.raises(rope_ext.UnsupportedModelError, match="_init_weights"):
        rope_ext.patch(model, "yarn", factor=4)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages that `make docs` builds, by path; mkdocs itself follows every link."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's advertisement, as make docs
    built = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return {
        str(page.relative_to(folder)): page.read_text("utf-8") for page in folder.rglob("*.html")
    }


def loaded(page: str) -> list[str]:
    """What a browser loads with a page."""
    tags = re.findall(r"<(?:script|img|iframe|link)\b[^>]*>", page)
    links = [
        re.findall(r'\b(?:src|href)="?([^"\s>]*)', tag) for tag in tags if "canonical" not in tag
    ]
    return [link for found in links for link in found if not link.startswith("data:")]


@pytest.mark.slow
def test_the_site(site) -> None:
    """Formulas and pictures of methods, public names, and nothing loaded from a network."""
    for cls in all_methods():
        assert f"{cls.name}.png" in loaded(site[f"methods/{cls.name}.html"])
    pages = {cls.__name__: f"methods/{cls.name}.html" for cls in all_methods()}
    pages |= {cls.__name__: f"encodings/{cls.name}.html" for cls in all_encodings()}
    assert all("<math" in site[page] for page in pages.values())
    for name in rope_ext.__all__:
        assert re.search(rf'id="?rope_ext\.{name}\b', site[pages.get(name, "api.html")]), name
    assert "iframe-worker.js" in loaded(site["index.html"])  # search in pages opened from disk
    for path, page in site.items():
        assert not [source for source in loaded(page) if "//" in source], path
