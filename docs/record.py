"""``python docs/record.py OUT.svg COMMAND ...``: what a command prints, as a picture."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

from rich.console import Console
from rich.text import Text

WIDTH = 100


def main() -> None:
    out, *words = sys.argv[1:]
    size = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1"}
    done = subprocess.run(
        words, env=os.environ | size, stdout=subprocess.PIPE, text=True, check=True
    )
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    typed = shlex.join([os.path.basename(words[0]), *words[1:]])
    console.print(Text(f"$ {typed}", style="bold green"))
    console.print(Text.from_ansi(done.stdout.strip("\n")))
    drawn = console.export_svg(title="rope_ext")
    # A picture in a page loads no fonts from a network.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    with open(out, "w", encoding="utf-8") as file:
        file.write(drawn.replace("Fira Code", "monospace"))


if __name__ == "__main__":
    main()
