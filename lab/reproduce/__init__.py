"""Published tables as commands: one file each in ``tables``."""
