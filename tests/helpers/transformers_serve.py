"""Runs ``transformers serve`` in a process, and writes folders for it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext
from tests.helpers.checkpoint import save_checkpoint

TRANSFORMERS = "from transformers.cli.transformers import main; main()"  # as the installed command
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def saved(folder: Path, method: str | None, **options: Any) -> Path:
    """Save a tiny checkpoint under a method, with a chat template."""
    save_checkpoint(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    if method is not None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        rope_ext.patch(model, method, **options).save_pretrained(folder)
    return folder


def commands(folder: Path) -> list[list[str]]:
    """Return the commands in the docs: transformers' own, and the one for any patch."""
    page = Path(__file__).parents[2] / "docs" / "engines" / "beside.md"
    found = re.findall(r"\$ (transformers|rope-ext) (serve .*)", page.read_text(encoding="utf-8"))
    starts = {"transformers": ["-c", TRANSFORMERS], "rope-ext": ["-m", "rope_ext"]}
    return [
        [sys.executable, *starts[program], *words.replace("FOLDER", str(folder)).split()]
        for program, words in found
    ]
