"""Shows the progress of measurements: as a bar, or as lines in a log file."""

import math
import time
from datetime import timedelta
from typing import Any

from rich.progress import Progress, TaskID

from rope_ext.command.terminal import first_process, stderr, tell


class _Lines(Progress):
    """Reports progress in a log file, with a line every 30 seconds."""

    _told = -math.inf  # report the first forward at once, with its time estimate

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        self.update(task_id, advance=advance)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        task = next(task for task in self.tasks if task.id == task_id)
        if time.monotonic() - self._told < 30 or not (task.total and task.completed):
            return
        self._told = time.monotonic()
        share = (task.remaining or 0) / task.completed  # before there is an estimate
        left = timedelta(seconds=round(task.time_remaining or (task.elapsed or 0) * share))
        tell(f"{task.description} {task.percentage:.0f} %, {left} left".lstrip())


def progress() -> Progress:
    """Return a progress bar for rank 0; without a terminal, a line every 30 seconds."""
    options: Any = {"console": stderr, "speed_estimate_period": 600}  # forwards are long
    if not (stderr.is_terminal or stderr.is_jupyter):
        return _Lines(**options, disable=True)
    return Progress(**options, disable=not first_process())
