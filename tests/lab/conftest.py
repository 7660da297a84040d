"""Fixtures of the laboratory's tests."""

from tests.helpers.fixtures import checkpoint, own_cache, small_pictures, texts

__all__ = ["checkpoint", "own_cache", "small_pictures", "texts"]
