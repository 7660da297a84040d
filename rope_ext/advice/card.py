"""Writes a model card for a saved or merged model."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from rope_ext.advice.describe import call_text, describe
from rope_ext.engines import serving_commands
from rope_ext.errors import ExportError
from rope_ext.patching import current_patch
from rope_ext.saving.drafts import write_whole
from rope_ext.saving.folder import read_saved
from rope_ext.version import __version__

_MARK = "<!-- written by rope-ext card; sha256 "
"""Ends a card, followed by the digest of the text above it: an edited card is never replaced."""


def model_card(
    folder: str | Path, base: str | None = None, report: str | Path | None = None
) -> str:
    """Return a model card in Markdown: method, lengths, how to load and serve, and results."""
    saved = read_saved(folder)
    state, found = current_patch(saved.model), describe(saved.model)
    if state is None:
        raise ExportError(
            f"the configuration in {folder} does not extend the model, so there is nothing to "
            f"write on a card; save a patched model there first"
        )
    name = " ".join(Path(folder).resolve().name.split()) or "model"
    head = ["---", "library_name: transformers", "tags:", "- rope_ext", "- long-context"]
    if base and not Path(base).exists():  # a local path is useless to readers
        head.append(f"base_model: {json.dumps(base)}")
    plain = saved.source == "rope_parameters" or state.record.plain
    loader = "AutoModelForCausalLM.from_pretrained" if plain else "rope_ext.from_pretrained"
    package = "from transformers import AutoModelForCausalLM" if plain else "import rope_ext"
    lines = [
        *(*head, "---", "", f"# {name}", ""),
        f"{found.model}, extended from {found.length} to {found.target_length} tokens with "
        f"`{call_text(state.record.method)}` ({state.method.paper}) by rope_ext {__version__}.",
        *("", "```python", package, "", f"model = {loader}({json.dumps(name)})", "```"),
    ]
    commands = serving_commands(replace(saved, name=name))
    lines += ["", "```bash", *commands, "```"] if commands else []
    if report is not None:
        try:
            table = (Path(report) / "table.md").read_text(encoding="utf-8").strip()
        except OSError:
            raise ExportError(
                f"{report} has no table.md; give the output folder of rope-ext compare or "
                f"rope-ext eval"
            ) from None
        lines += ["", "## Evaluation", "", table]
    return "\n".join(lines) + "\n"


def write_card(
    folder: str | Path, base: str | None = None, report: str | Path | None = None
) -> Path:
    """Write a model card to ``README.md`` in the folder; replaces an earlier card only if unedited.

    ``base`` names the model that was extended; ``report``, the output folder of ``rope-ext
    compare`` or ``rope-ext eval``, has a ``table.md`` to include.
    """
    path, text = Path(folder) / "README.md", model_card(folder, base, report)
    if path.exists():
        before, mark, end = path.read_text(encoding="utf-8", errors="replace").rpartition(_MARK)
        if not mark or _end(before) != mark + end:
            raise ExportError(
                f"{path} exists and is not an unedited card of rope_ext; move it away to write one"
            )
    write_whole(path, f"{text}{_end(text)}")
    return path


def _end(text: str) -> str:
    return f"{_MARK}{hashlib.sha256(text.encode()).hexdigest()} -->\n"
