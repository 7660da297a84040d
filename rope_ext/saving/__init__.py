"""Saves and loads patched models and adapters."""
