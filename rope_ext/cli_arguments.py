"""Arguments shared by several commands."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="Model directory or Hub ID.")]
Factor = Annotated[float, typer.Option(help="Extension factor: target length / trained length.")]
PatchedWith = Annotated[str | None, typer.Option(help="Patch the model with this method first.")]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="Method option, such as yarn.beta_fast=16, or a JSON file of options, such as "
        "longrope=found.json. Repeatable.",
    ),
]
Dtype = Annotated[
    str, typer.Option(help="Dtype: auto (float32 on CPU), float32, bfloat16 or float16.")
]
TrainedLength = Annotated[
    int | None, typer.Option(help="Override the trained length in the config.")
]
Text = Annotated[
    list[str] | None,
    typer.Option(
        help="Text file, .jsonl, .parquet or directory. Repeatable. Default: the Python standard "
        "library."
    ),
]
TrainText = Annotated[
    list[str] | None,
    typer.Option(
        help="Text file, .jsonl, .parquet or directory. Repeatable. Default: the Python standard "
        "library, without the files that evaluation uses by default."
    ),
]
Target = Annotated[str, typer.Option(help="Target context length in tokens, such as 32k.")]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1, mps ...")]
Compose = Annotated[bool, typer.Option(help="Apply on top of existing RoPE scaling.")]
