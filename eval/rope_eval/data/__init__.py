"""Texts, prompts and facts for the tasks."""
