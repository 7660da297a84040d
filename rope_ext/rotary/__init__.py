"""Finds and patches a model's rotary modules, and tracks sequences and caches in a forward."""
