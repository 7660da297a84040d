"""One file per task. Importing it registers it: reports have this order."""

# isort: off
from rope_ext.measure.tasks.base import (
    Option,
    Task,
    all_tasks,
    build,
    chosen,
    from_file,
    option,
    options,
    register,
)
from rope_ext.measure.tasks.perplexity import Perplexity
from rope_ext.measure.tasks.longppl import LongPPL
from rope_ext.measure.tasks.passkey import Passkey
from rope_ext.measure.tasks.needle import Needle
from rope_ext.measure.tasks.ruler import Ruler
# isort: on

__all__ = [
    "LongPPL",
    "Needle",
    "Option",
    "Passkey",
    "Perplexity",
    "Ruler",
    "Task",
    "all_tasks",
    "build",
    "chosen",
    "from_file",
    "option",
    "options",
    "register",
]
