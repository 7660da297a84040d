"""Shared by several test files: models, reference implementations, and programs to run."""
