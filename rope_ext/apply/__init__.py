"""Puts methods in force: one file for each kind, which knows no single method."""
