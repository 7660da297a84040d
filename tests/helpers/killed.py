"""A command of rope-ext that is killed in the middle of a line that it writes, at the same one."""

from __future__ import annotations
