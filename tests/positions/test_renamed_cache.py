"""transformers 5.24 calls the cache of a decoder ``cache``, which only a paged one was before."""

from __future__ import annotations

from transformers import DynamicCache

from rope_ext.forward.context import cache_among, is_paged


def test_a_cache_is_found_under_both_names() -> None:
    cache = DynamicCache()
    assert cache_among({"past_key_values": cache}) is cache
    assert cache_among({"cache": cache}) is cache
    assert cache_among({}) is None


def test_only_what_is_no_cache_of_transformers_is_paged() -> None:
    assert is_paged({"cache": object()})
    assert not is_paged({"cache": DynamicCache()}) and not is_paged({"past_key_values": object()})
