"""A command of rope-ext that is killed in the middle of a line that it writes, at the same one."""

from __future__ import annotations

import signal
import subprocess
import sys

# The system ends a process that lets a file grow beyond the limit, unless it takes that for an
# error as Python does. Nothing but the log may be written: no bytecode, no core.
_LIMITED = """
import resource, signal, sys
from rope_ext.cli import app
sys.dont_write_bytecode = True
size = int(sys.argv.pop(1))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
app()
"""


def kill_beyond(size: int, words: list[str]) -> None:
    """Run ``rope-ext`` with ``words`` until a file of it would have more than ``size`` bytes."""
    command = [sys.executable, "-c", _LIMITED, str(size), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGXFSZ, done.stderr[-3000:]
