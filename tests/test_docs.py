"""The documentation: docstrings, the snippets in docs/, and the site that mkdocs builds."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import click
import griffe
import pytest
import torch
from mkdocs.config import load_config
from mkdocs.exceptions import PluginError
from transformers import AutoModelForCausalLM
from typer.main import get_command

import rope_ext
from rope_eval import command
from rope_eval.tune.options import CalibrationOptions, SearchOptions
from rope_ext.cli import app
from rope_ext.encodings.alibi import slopes
from rope_ext.fitting import supported
from rope_ext.methods import Method, Rope, all_encodings, all_methods
from tests.helpers.models import tiny_llama

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PUBLIC = {name: getattr(rope_ext, name) for name in rope_ext.__all__}
FUNCTIONS = [name for name, item in PUBLIC.items() if inspect.isfunction(item)]
METHODS = [cls for cls in all_methods() if cls.__module__.startswith("rope_ext.")]
OPTIONS = {"search": SearchOptions, "calibrate": CalibrationOptions}
RESULTS = [
    item
    for item in PUBLIC.values()
    if dataclasses.is_dataclass(item) and not issubclass(item, Method)
]


def documented(item: object) -> SimpleNamespace:
    """The docstring of ``item``: its text, and its sections by name."""
    docstring = griffe.Docstring(inspect.getdoc(item) or "")
    sections = docstring.parse("google", warnings=False)
    found = {section.kind.value: section.value for section in sections}
    return SimpleNamespace(
        text=" ".join(docstring.value.split()),
        parameters={part.name: part.description for part in found.get("parameters", ())},
        returns=[part.description for part in found.get("returns", found.get("yields", ()))],
        raises=[str(part.annotation) for part in found.get("raises", ())],
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_tells_arguments_results_and_errors(name: str) -> None:
    function, found = PUBLIC[name], documented(PUBLIC[name])
    stars = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    parameters = inspect.signature(function).parameters.values()
    told = dict(found.parameters)
    if name in OPTIONS:  # whose options are documented where they are defined
        told.pop("**options")
        told |= {
            option: text
            for part in reversed(OPTIONS[name].__mro__)
            for option, text in documented(part).parameters.items()
        }
    assert set(told) == {stars.get(p.kind, "") + p.name for p in parameters}
    assert all([*told.values(), *found.returns]) and found.returns
    assert found.raises or name == "methods"  # which cannot fail
    for error in re.findall(r"\w+", " ".join(found.raises)):
        assert issubclass(getattr(rope_ext.errors, error), rope_ext.RopeExtError)


@pytest.mark.parametrize("cls", METHODS, ids=lambda cls: cls.name)
def test_a_method_tells_its_options_and_its_source(cls: type[Method]) -> None:
    options = {}
    for part in reversed(cls.__mro__):
        options |= documented(part).parameters if "__doc__" in vars(part) else {}
    assert {field.name for field in dataclasses.fields(cls)} == set(options)
    assert all(options.values())
    assert cls.paper in documented(cls).text


@pytest.mark.parametrize("cls", RESULTS, ids=lambda cls: cls.__name__)
def test_a_result_tells_its_fields(cls: type) -> None:
    found = documented(cls).parameters
    assert list(found) == [field.name for field in dataclasses.fields(cls)]
    assert all(found.values())


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    for name, item in PUBLIC.items():
        assert "__doc__" in vars(item) or inspect.isfunction(item), name
        assert len(item.__doc__.split()) > 3, name


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


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


def test_every_command_in_the_docs_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options exist, and none that it needs is missing."""
    asked: list[str] = []
    monkeypatch.setattr(command, "main", lambda args, tasks: asked.extend(tasks))
    group = get_command(app)
    given = commands()
    assert len(given) > 40
    for line in given:
        name, *words = shlex.split(line.replace("MODEL", "some/model"))[1:]
        if name == "eval":
            command.call(words)
        elif name == "compare":
            command.call_preset(name, command.COMPARE, words)
        else:
            with click.Context(group, info_name="rope-ext") as outer:
                group.commands[name].make_context(name, words, parent=outer)
    assert {"perplexity", "passkey", "ruler"} <= {*asked}


LLAMA2 = Rope.geometric(base=10000, dim=128, length=4096)


@torch.no_grad()
def test_a_frequency_method_takes_the_ten_lines_of_the_page(own_registry, ids, tmp_path) -> None:
    lines, call, *_ = snippets("adding-a-method.md")
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
    shared = {"attention_factor": None, "temperature": None}
    assert described.options == {"factor": 4, **shared, "turns": 2}
    method = names["Step"](factor=4)
    turns = LLAMA2.inv_freq * 4096 / (2 * torch.pi)
    kept = torch.where(turns > 1, LLAMA2.inv_freq, LLAMA2.inv_freq / 4)
    torch.testing.assert_close(method.inv_freq(LLAMA2), kept)

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
    exec(snippets("adding-a-method.md")[2], names)
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
    lines, calls = snippets("adding-an-encoding.md")
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
    exec(source or snippets("adding-a-family.md")[0], names)
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
    exec(snippets("adding-a-family.md")[1], {"rope_ext": rope_ext, **own})

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


@pytest.mark.parametrize(
    ("there", "instead", "error"),
    [
        ('"inv_freq"', '"frequencies"', rope_ext.NoRopeError),
        ("* self.attention_scaling", "", rope_ext.UnsupportedModelError),
        ("forward(self, x, position_ids)", "forward(self, x, places)", rope_ext.RopeExtError),
        ("max_position_embeddings: int = 32", "", rope_ext.UnsupportedModelError),
    ],
)
def test_what_the_page_asks_of_a_family_is_asked(there: str, instead: str, error: type) -> None:
    source = snippets("adding-a-family.md")[0]
    assert there in source
    if there == '"inv_freq"':
        source = source.replace("self.inv_freq", "self.frequencies")
    if "position_ids" in there:
        source = source.replace("position_ids[", "places[").replace("position_ids=", "places=")
    model = own_model(source.replace(there, instead))
    with pytest.raises(error):
        rope_ext.patch(model, "yarn", factor=4)


class Links(HTMLParser):
    """What a page is made of: ids, and what the browser loads with it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids, self.loaded, self.tags = set(), [], set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.tags.add(tag)
        self.ids.add(values.get("id"))
        if tag in ("script", "img", "iframe"):
            self.loaded.append(values.get("src") or "")
        if tag == "link" and values.get("rel") != "canonical":
            self.loaded.append(values.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Links]:
    """The pages that `make docs` builds, by path; mkdocs itself follows every link."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's advertisement, as make docs
    built = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return {str(page.relative_to(folder)): Links(page) for page in folder.rglob("*.html")}


@pytest.mark.slow
def test_the_site(site) -> None:
    """Formulas and pictures of methods, public names, and nothing loaded from a network."""
    for cls in all_methods():
        page = site[f"methods/{cls.name}.html"]
        assert "math" in page.tags and f"{cls.name}.png" in page.loaded
    pages = {cls.__name__: f"methods/{cls.name}.html" for cls in all_methods()}
    for name in rope_ext.__all__:
        assert f"rope_ext.{name}" in site[pages.get(name, "api.html")].ids
    assert "iframe-worker.js" in site["index.html"].loaded  # search in pages opened from disk
    for path, page in site.items():
        loaded = [source for source in page.loaded if not source.startswith("data:")]
        assert not [source for source in loaded if "//" in source], path


def test_every_encoding_has_a_page_and_a_row() -> None:
    overview = (ROOT / "docs/encodings/index.md").read_text(encoding="utf-8")
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for cls in all_encodings():
        page = f"{cls.name}.md"
        assert f"[`{cls.name}`]({page})" in overview and f"encodings/{page}\n" in nav
        text = (ROOT / "docs/encodings" / page).read_text(encoding="utf-8")
        assert f'rope_ext.patch(model, "{cls.name}"' in text and cls.paper in text


def test_the_page_of_an_encoding_says_what_a_fresh_patch_costs() -> None:
    hooks = load_config(str(ROOT / "mkdocs.yml")).hooks["docs/hooks.py"]
    for cls in all_encodings():
        *_, rule, unpatched, row = hooks.untrained_table(cls.name).splitlines()
        assert unpatched.startswith("| unpatched | ") and f"`{cls.name}`" in row.split("|")[1]
        assert row.count("|") == unpatched.count("|") == rule.count("|")
        assert ("with `fit`" in hooks.untrained_table(cls.name)) == (cls.name in supported())
    assert hooks.untrained_table("linear-attention") == ""


def test_the_table_of_engines_says_how_each_runs_a_method() -> None:
    hooks = load_config(str(ROOT / "mkdocs.yml")).hooks["docs/hooks.py"]
    lines = list(hooks.engine_table())
    head = [cell.strip() for cell in lines[0].strip().strip("|").split("|")]
    assert head[1:] == ["vLLM", "SGLang", "llama.cpp", "Ollama", "transformers", "mlx-lm"]
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines[2:]}
    rows = {name: [cell.strip() for cell in cells] for name, cells in rows.items()}
    assert rows["[`yarn`](../methods/yarn.md)"] == ["runs"] * 6
    assert rows["[`resonance`](../methods/resonance.md)"] == ["by table"] * 6
    assert rows["[`rerope`](../methods/rerope.md)"] == ["refused"] * 6
    assert rows["[`llama3`](../methods/llama3.md)"][:3] == ["runs", "runs", "by table"]
    assert rows["[`dynamic_ntk`](../methods/dynamic_ntk.md) with `length=`"] == ["runs"] * 6
    assert set(rows["[`dynamic_yarn`](../methods/dynamic_yarn.md)"]) == {"refused"}
    assert all(any(f"`{cls.name}`" in name for name in rows) for cls in all_methods())


def test_a_method_without_a_page_stops_the_build(own_registry) -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    hooks = config.hooks["docs/hooks.py"]
    exec(snippets("adding-a-method.md")[0], {"__name__": __name__})
    with pytest.raises(PluginError, match=r"no page for \['step'\]"):
        hooks.on_config(config)


def test_what_was_measured_is_found_in_the_tables_of_the_demonstration() -> None:
    hooks = load_config(str(ROOT / "mkdocs.yml")).hooks["docs/hooks.py"]
    tables = "".join((ROOT / path).read_text(encoding="utf-8") for path in hooks.TABLES)
    for cls in METHODS:
        if cls.name != "longrope":  # needs a table of its own first
            *_, unpatched, row = hooks.measured_table(cls.name).splitlines()
            assert unpatched.startswith("| unpatched | ") and f"{unpatched}\n" in tables
            assert row.startswith(f"| `{cls.name}` | ") and f"{row}\n" in tables
