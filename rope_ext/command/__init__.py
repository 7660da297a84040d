"""Shared parts of the command lines: arguments, method options and terminal output."""
