"""Texts, prompts and facts of which tasks are made."""
