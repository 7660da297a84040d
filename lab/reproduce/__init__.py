"""Reproduces published tables, one file each in ``tables``."""
