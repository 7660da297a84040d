"""Benchmarks, most of them relative to the unpatched model."""
