"""Adds to the written pages what follows from the code, when mkdocs builds the site.

* Formulas between dollar signs become MathML, and ``arXiv 2309.00071`` a link.
* A page in ``methods/`` or ``encodings/`` has the title, the formula and the path of the docstring,
  so that links work in a checkout, too. ``PAGE`` puts the docstring, the options and the measured
  rows below. A method or an encoding without a page stops the build.
* ``engines/index.md`` gets the table of methods and engines, from what ``rope_ext.export`` answers.
* ``api.md`` is filled from ``rope_ext.__all__``.
* Files outside of ``docs``, such as README.md, become pages, and their links those of the site.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import posixpath
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import griffe
from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from markdown.util import AtomicString
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils.meta import get_data
from transformers import LlamaConfig, LlamaForCausalLM

import rope_ext
from rope_eval.plots.pictures import draw
from rope_ext.engines.configs import PLUGIN_METHODS
from rope_ext.methods import Method, all_encodings, all_methods

ROOT = Path(__file__).parents[1]
PAGE = """\
# {title}

{lead}

{formula}

{doc}

{facts}

[Notation]({notation})

{picture}

## Measured

{measured}

[](){{ #rope_ext.{cls} }}

## Options

{options}
"""

PICTURE = """\
![{title} compared with the unpatched model]({name}.png)

{caption}
"""

FIXED = """\
Only values in the model's rotary buffers change, so speed, memory and cache are those of the
unpatched model."""
DYNAMIC = """\
A hook on the rotary module looks up the frequencies of every row, which takes a fraction of a
millisecond per forward ([measurements](../speed.md)). Memory and cache are those of the unpatched
model."""
POSITIONS = """\
Attention makes two or three calls of a flash kernel instead of one, which is somewhat slower.
Memory is linear in the length, and every cache of transformers works
([measurements](../speed.md))."""

FILES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "lab/README.md": "lab.md",
    "checkpoints/tiny-512/README.md": "checkpoint.md",
    "checkpoints/tiny-bytes-512/README.md": "checkpoint-bytes.md",
}
"""Files outside of ``docs`` that become pages."""

MEASURED = """\
{model}, not fine-tuned ([the full tables](../evidence.md) have the settings and the command;
†: scored after a lead-in, not decoded):
"""

UNTRAINED = """\
Perplexity at the trained length of 512 tokens right after `patch`, before any training
([all encodings and the command](index.md#what-a-fresh-patch-costs)):
"""

GROUPS = ("patching", "advice", "loading", "engines", "rope_eval", "methods", "encodings", "errors")
"""Modules in the order of the API page; those not named here come last."""


DOCUMENTED = {"methods": all_methods, "encodings": all_encodings}
OTHERS = ("from-scratch", "linear-attention")
"""Pages in ``encodings/`` about what ``patch`` does not offer."""


@event_priority(100)  # mkdocstrings copies the extensions in its own on_config
def on_config(config: MkDocsConfig) -> None:
    config.markdown_extensions.append(Typeset())
    for folder, classes in DOCUMENTED.items():
        pages = {path.stem for path in Path(config.docs_dir, folder).glob("*.md")}
        names = [cls.name for cls in classes()]
        missing, unknown = set(names) - pages, pages - {"index", *OTHERS, *names}
        if missing or unknown:
            raise PluginError(f"docs/{folder}: no page for {missing}, nothing for {unknown}")
        title = folder.capitalize()
        entries = next(entry[title] for entry in config.nav if title in entry)
        entries[1:1] = [f"{folder}/{name}.md" for name in names]


def on_files(files: Files, config: MkDocsConfig) -> None:
    for path, page in FILES.items():
        _, _, text = f"\n{(ROOT / path).read_text(encoding='utf-8')}".partition("\n# ")
        files.append(File.generated(config, page, content=f"# {text}"))


LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s(\"=,]+)([^)]*)\)")
"""A relative link or picture: mark, text, path, and the rest."""


def linked(markdown: str, source: str, page: str) -> str:
    """Links of a file in the repository, for its page: a file that is no page becomes code.

    Args:
        markdown: its text.
        source: its path in the repository.
        page: the path of its page in the site.
    """

    def moved(link: re.Match[str]) -> str:
        mark, text, path, rest = link.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if path not in FILES and (not path.startswith("docs/") or (ROOT / path).is_dir()):
            return f"`{path}`"
        target = FILES.get(path, path.removeprefix("docs/"))
        target = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"{mark}[{text}]({target}{rest})"

    return LINK.sub(moved, markdown)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    source = next((path for path, made in FILES.items() if made == uri), f"docs/{uri}")
    markdown = linked(markdown, source, uri)
    if uri == "methods/index.md":
        return markdown + _overview()
    if uri == "engines/index.md":
        return markdown + "\n".join(engine_table())
    if uri == "api.md":
        return markdown + "\n".join(_api())
    if uri == "FAMILIES.md":
        page.meta["hide"] = ["toc"]  # room for its table
    folder, _, name = uri.removesuffix(".md").rpartition("/")
    cls = next((cls for cls in DOCUMENTED.get(folder, list)() if cls.name == name), None)
    return markdown if cls is None else _page_of(cls, folder, markdown, page, config, files)


def _page_of(
    cls: type[Method], folder: str, markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    title, _, rest = markdown.removeprefix("# ").partition("\n")
    formula, _, _ = rest.partition("\nDocstring: ")
    name, code = cls.name, Path(inspect.getfile(cls)).relative_to(ROOT)
    names = ", ".join(f"`{one}`" for one in (name, *cls.aliases))
    facts, picture = {"Call": f'`rope_ext.patch(model, "{name}")`'}, ""
    if folder == "methods":
        method = cls(**page.meta.get("example", {"factor": 4}))
        files.append(File.generated(config, f"methods/{name}.png", content=_picture(method)))
        picture = PICTURE.format(title=title, name=name, caption=_caption(method))
        facts = {
            "Choose it for": cls.summary,
            "Call": f"`{_call(method)}`",
            "Saving": _saving(method),
            "Other engines": _engines(method),
            "Cost": _kind(method),
        }
    lead, _, doc = _prose(cls).partition("\n\n")
    facts["Names"] = f"{names}; `rope_ext.{cls.__name__}`, in `{code}`"
    return PAGE.format(
        title=title,
        lead=lead,
        formula=formula.strip(),
        doc=doc,
        notation="index.md#notation" if folder == "methods" else "index.md",
        facts="\n".join(f"* **{key}:** {value}" for key, value in facts.items()),
        picture=picture,
        measured=measured_tables(name) if folder == "methods" else untrained_table(name),
        cls=cls.__name__,
        options=_options(cls),
    )


def _model(method: Method) -> LlamaForCausalLM:
    """A tiny model with the rotary embedding of Llama 2; of Phi-3, where a table has 48 pairs."""
    dim = 2 * len(getattr(method, "long_factor", None) or range(64))
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=dim,
        head_dim=dim,
        intermediate_size=16,
        num_attention_heads=1,
        num_hidden_layers=1,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config)


def _picture(method: Method) -> bytes:
    kind = "angles" if method.kind == "frequency" else "distances"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "picture.png")
        draw(kind, _model(method), [method], path)
        return path.read_bytes()


def _caption(method: Method) -> str:
    base = "The rotary embedding of Llama 2 (4096 tokens, base 10000, 64 pairs)"
    if getattr(method, "long_factor", None):
        base = "The rotary embedding of Phi-3 (4096 tokens, base 10000, 48 pairs)"
    if method.kind == "frequency":
        return (
            f"{base}: the largest angle of each pair, compared with those seen in training. Pairs "
            f"above the shaded area have angles that the model has never seen."
        )
    return (
        f"{base}: the effective distance between the last token and each earlier token. Distances "
        f"above the shaded area do not occur in training."
    )


def _call(method: Method) -> str:
    """The call of ``patch``, without what is default anyway and with long lists cut."""
    words = [f'"{method.name}"']
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.name != "factor" and (value == field.default or not isinstance(value, tuple)):
            continue
        if isinstance(value, tuple):
            value = f"[{value[0]}, {value[1]}, ..., {value[-1]}]"
        words.append(f"{field.name}={value}")
    return f"rope_ext.patch(model, {', '.join(words)})"


def _saving(method: Method) -> str:
    with rope_ext.patched(_model(method), method) as model:
        notes = rope_ext.describe(model).notes
    return next(note for note in notes if note.startswith("saving: ")).removeprefix("saving: ")


def _engines(method: Method) -> str:
    found = _served(method).items()
    runs = [title for title, how in found if how != REFUSED and title != "transformers"]
    if method.name in PLUGIN_METHODS:
        return "vLLM, with a [plugin](../engines/index.md#position-methods-in-vllm)"
    return f"{', '.join(runs)} ([`rope_ext.export`][])" if runs else "none"


ENGINES = {
    **{"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp", "ollama": "Ollama"},
    **{"transformers": "transformers", "mlx": "mlx-lm"},
}
RUNS, TABLE, REFUSED = "runs", "by table", "refused"


def _served(method: Method) -> dict[str, str]:
    """How every engine, by title, runs a method on a Llama."""
    answers = {}
    with rope_ext.patched(_model(method), method) as model:
        for engine, title in ENGINES.items():
            try:
                options = {"plugin": False} if engine == "vllm" else {}
                settings = rope_ext.export(model, engine, **options).settings
            except rope_ext.ExportError:
                answers[title] = REFUSED
                continue
            table = "tensors" in settings or '"longrope"' in json.dumps(settings)
            answers[title] = TABLE if table else RUNS
    return answers


def engine_table() -> Iterator[str]:
    """Methods by engines; those that choose frequencies for each sequence also with a length."""
    engines = ENGINES.values()
    yield "\n| method | " + " | ".join(engines) + " |"
    yield "| --- |" + " --- |" * len(engines)
    for cls in all_methods():
        page = (ROOT / "docs" / "methods" / f"{cls.name}.md").read_text(encoding="utf-8")
        method = cls(**get_data(page)[1].get("example", {"factor": 4}))
        rows = [(method, "")]
        if getattr(method, "is_dynamic", False):
            rows.append((dataclasses.replace(method, length=16384), " with `length=`"))
        for each, more in rows:
            served = _served(each)
            cells = " | ".join(served[engine] for engine in engines)
            yield f"| [`{cls.name}`](../methods/{cls.name}.md){more} | {cells} |"


def _kind(method: Method) -> str:
    if method.is_dynamic:
        return DYNAMIC
    return FIXED if method.kind == "frequency" else POSITIONS


def untrained_table(name: str) -> str:
    """The row of an encoding in ``encodings/index.md``."""
    text = (ROOT / "docs/encodings/index.md").read_text(encoding="utf-8")
    table = text[text.index("| encoding | `tiny-512` |") :].partition("\n\n")[0].splitlines()
    head, rule, unpatched, *rows = table
    row = next(row for row in rows if f"`{name}`" in row.split("|")[1])
    cells = [line.strip("|").split("|") for line in (head, rule, unpatched, row)]
    kept = [place for place, cell in enumerate(cells[-1]) if cell.strip()]  # not all have a fit
    lines = (f"|{'|'.join(line[place] for place in kept)}|" for line in cells)
    return "\n".join((UNTRAINED, *lines))


def measured_tables(name: str) -> str:
    """The rows of a method on every model in ``evidence.md``."""
    text = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    made = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        model, _, _ = section.partition("\n")
        defaults, _, _ = section.partition("\n### ")  # later tables are of longer factors
        columns: list[tuple[str, ...]] = []
        for table in re.findall(r"(?:^\| .*\n)+", defaults, re.MULTILINE):
            head, _, *lines = table.splitlines()
            rows = {line.split("|")[1].strip(" `"): line for line in lines}
            if name in rows:
                shown = [rows[each] for each in ("unpatched", name) if each in rows]
                cells = ([cell.strip() for cell in x[1:-1].split("|")] for x in (head, *shown))
                first, *others = zip(*cells, strict=True)
                columns += others if columns else [("method", *first[1:]), *others]
        if columns:
            made.append("\n".join((MEASURED.format(model=model), *_turned(columns))))
    return "\n\n".join(made) or "Not measured on a pretrained model."


def _turned(columns: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """A table with its columns as rows, which fits a narrow screen."""
    for number, (label, *values) in enumerate(columns):
        label = label.replace("last column", "longest text")
        if label.replace(",", "").isdigit():
            label = f"perplexity to {label} tokens"
        yield f"| {label} | {' | '.join(values)} |"
        if not number:
            yield "| --- |" + " --- |" * len(values)


def _options(cls: type[Method]) -> str:
    texts = dict(_documented(cls))
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING
        default = "required" if required else f"`{field.default!r}`"
        text = " ".join(texts[field.name].split()).replace("|", "\\|")
        lines.append(f"| `{field.name}` | {default} | {text} |")
    return "\n".join(lines)


def sections(item: Any) -> list[griffe.DocstringSection]:
    """The sections of a docstring."""
    docstring = griffe.Docstring(referenced(inspect.getdoc(item) or ""))
    return docstring.parse("google", warnings=False)


def _documented(cls: type[Method]) -> Iterator[tuple[str, str]]:
    """Options and their meaning, those of base classes first, so that a class can say more."""
    for base in reversed(cls.__mro__):
        if "__doc__" not in vars(base):
            continue
        for section in sections(base):
            if section.kind is griffe.DocstringSectionKind.parameters:
                yield from ((part.name, part.description) for part in section.value)


def _prose(cls: type[Method]) -> str:
    kind = griffe.DocstringSectionKind.text
    return "\n\n".join(section.value for section in sections(cls) if section.kind is kind)


def _overview() -> str:
    lines = []
    for kind in ("frequency", "position"):
        title = f"{kind.capitalize()} methods"
        lines += [f"\n## {title}\n", "| method | choose it for | source |", "| --- | --- | --- |"]
        lines += [
            f"| [`{cls.name}`]({cls.name}.md) | {cls.summary} | {cls.paper} |"
            for cls in all_methods()
            if cls.kind == kind
        ]
    return "\n".join(lines)


def _api() -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for name in rope_ext.__all__:
        package, inner, *_ = getattr(rope_ext, name).__module__.split(".")
        module = package if package == "rope_eval" else inner
        groups.setdefault(module, []).append(name)
    classes = {cls.__name__: cls for cls in (*all_methods(), *all_encodings())}
    for module in sorted(groups, key=lambda m: GROUPS.index(m) if m in GROUPS else len(GROUPS)):
        doc = inspect.getdoc(importlib.import_module(_module(module))) or ""
        lead, _, _ = doc.partition("\n\n")
        yield f"\n## {module.capitalize()}\n\n{referenced(lead)}\n"
        for name in sorted(groups[module], key=lambda name: name[0].isupper()):  # functions first
            if name not in classes:
                defined = getattr(rope_ext, name)  # where it is defined: other paths lead there
                path = f"{defined.__module__}.{defined.__qualname__}"
                yield f"[](){{ #rope_ext.{name} }}\n\n::: {path}\n"
    yield "\n## Methods and encodings\n\n| class | name | choose it for |\n| --- | --- | --- |"
    for name, cls in classes.items():
        yield f"| [`{name}`][rope_ext.{name}] | `{cls.name}` | {cls.summary} |"


def _module(group: str) -> str:
    return group if group == "rope_eval" else f"rope_ext.{group}"


def referenced(text: str) -> str:
    """Sphinx's roles as Markdown: a link to what is public, else code."""
    return re.sub(r":(?:func|class|meth|attr):`([\w.]+)`", _reference, text)


def _reference(role: re.Match[str]) -> str:
    name = role[1].removeprefix("rope_ext.")
    return f"[`{role[1]}`][rope_ext.{name}]" if name in rope_ext.__all__ else f"`{role[1]}`"


class References(griffe.Extension):
    """The same for the docstrings that mkdocstrings shows."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = referenced(obj.docstring.value)


PAPER = r"arXiv (\d{4}\.\d{5})|kexue\.fm/archives/\d+"


class Typeset(Extension):
    """Formulas and papers in Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:
        # After code (190), before everything that a formula could be taken for.
        md.inlinePatterns.register(_Formula(r"\$\$(.+?)\$\$|\$([^$]+)\$", md), "formula", 185)
        md.inlinePatterns.register(_Paper(PAPER, md), "paper", 70)


class _Formula(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        block, inline = m.groups()
        formula = (block or inline).replace(r"\ln ", r"\ln\, ")  # else set as one word
        mathml = convert(formula, display="block" if block else "inline")
        return self.md.htmlStash.store(mathml), *m.span()


class _Paper(InlineProcessor):
    ANCESTOR_EXCLUDES = ("a",)

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element, int, int]:
        link = Element("a", href=f"https://arxiv.org/abs/{m[1]}" if m[1] else f"https://{m[0]}")
        link.text = AtomicString(m[0])
        return link, *m.span()
