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


def command(folder: Path) -> list[str]:
    """Return the command in the docs."""
    page = Path(__file__).parents[2] / "docs" / "engines" / "beside.md"
    words = re.search(r"\$ transformers (serve .*)", page.read_text(encoding="utf-8"))[1]
    given = [str(folder) if word == "FOLDER" else word for word in words.split()]
    return [sys.executable, "-c", TRANSFORMERS, *given]
