"""``python -m rope_ext``: the command line."""

from rope_ext.cli import app

app(prog_name="rope-ext")
