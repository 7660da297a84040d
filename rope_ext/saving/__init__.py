"""Saves, loads and describes folders of patched models and of adapters."""
