"""Arguments that several commands have in common."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="Folder or Hub id.")]
Factor = Annotated[float, typer.Option(help="How many times the trained length.")]
PatchedWith = Annotated[str | None, typer.Option(help="Patch it with this method first.")]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="One option of one method, such as yarn.beta_fast=16, or all in a file, such as "
        "longrope=found.json; repeat.",
    ),
]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16 or float16.")]
TrainedLength = Annotated[
    int | None, typer.Option(help="If the configuration does not say it rightly.")
]
Text = Annotated[
    list[str] | None,
    typer.Option(
        help="Text, .jsonl, .parquet or folder to read; repeat. Default: Python's own library."
    ),
]
TrainText = Annotated[
    list[str] | None,
    typer.Option(
        help="Text, .jsonl, .parquet or folder; repeat. Default: Python's own library, but for "
        "the part that is measured by default."
    ),
]
Target = Annotated[str, typer.Option(help="Context to reach in tokens, such as 32k.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps ...")]
Compose = Annotated[
    bool, typer.Option(help="Go on although the checkpoint scales its own rotary embedding.")
]
