"""One file per task, registered on import; reports use the order here."""

# ruff: noqa: F401
# isort: off
from rope_eval.tasks.base import Task, all_tasks, build, chosen, from_file, option, register
from rope_eval.tasks.perplexity import Perplexity
from rope_eval.tasks.longppl import LongPPL
from rope_eval.tasks.passkey import Passkey
from rope_eval.tasks.haystack import Needle
from rope_eval.tasks.ruler import Ruler
from rope_eval.tasks.story import Hops, Mrcr
from rope_eval.tasks.nolima import NoLiMa
from rope_eval.tasks.helmet import Helmet
from rope_eval.tasks.embedding import Embedding
