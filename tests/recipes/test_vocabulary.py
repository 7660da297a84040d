"""Tokens without an embedding: they are found before training, or named when data contain them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from recipes import finetune
from recipes.stream import DataError
from tests.helpers.recipe_runs import arguments

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}"
)


@pytest.fixture
def larger(checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """Save the checkpoint of 400 embeddings with more tokens."""

    def save(*tokens: str, template: str | None = None, **special: str) -> Path:
        folder = tmp_path / "larger"
        folder.mkdir()
        for file in checkpoint.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens([f"unused{i}" for i in range(400 - len(tokenizer))])
        tokenizer.add_special_tokens({"additional_special_tokens": list(tokens), **special})
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return folder

    return save


def test_tokens_that_no_row_has_are_noted(
    larger: Callable[..., Path], texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = larger("<a>", "<b>", "<c>", pad_token="<pad>")
    finetune.main(arguments(model, texts, tmp_path / "run"))
    told = capsys.readouterr().err
    assert told.count("beyond the model's 400 embeddings, such as ") == 1
    assert sum(f"'{token}' (" in told for token in ("<pad>", "<a>", "<b>", "<c>")) == 3
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("special", "template", "token"),
    [
        ({"eos_token": "<end>"}, None, "<end>"),
        ({}, CHATML, "<|im_start|>"),
    ],
)
def test_tokens_that_every_row_has_are_refused(
    special: dict[str, str],
    template: str | None,
    token: str,
    larger: Callable[..., Path],
    refused: Callable[..., None],
) -> None:
    model = larger("<|im_start|>", template=template, **special)
    name = token.replace("|", r"\|")
    chat = "text" if template is None else "chat"
    refused(
        f"'{name}' .40.., and the model has 400 embeddings; give --model", model=model, format=chat
    )


def test_a_token_in_the_data_is_named(larger: Callable[..., Path], tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": "one two <a> three " * 50}) for _ in range(9)))
    model = larger("<a>")
    with pytest.raises(
        DataError, match=r"a row has the token '<a>' \(400\).*400 embeddings; remove"
    ):
        finetune.main(arguments(model, texts, tmp_path / "run"))
