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
from rope_ext.measure.tasks.babilong import Babilong
from rope_ext.measure.tasks.mrcr import Mrcr
from rope_ext.measure.tasks.hops import Hops
from rope_ext.measure.tasks.nolima import NoLiMa
from rope_ext.measure.tasks.helmet import Helmet
from rope_ext.measure.tasks.longbench import LongBench
from rope_ext.measure.tasks.infinitebench import InfiniteBench
# isort: on

__all__ = [
    "Babilong",
    "Helmet",
    "Hops",
    "InfiniteBench",
    "LongBench",
    "LongPPL",
    "Mrcr",
    "Needle",
    "NoLiMa",
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
