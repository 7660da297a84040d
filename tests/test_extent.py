"""Where the keys of a band lie, and which blocks it fills, against the mask of every token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rope_ext.attention import flex
from rope_ext.attention.extent import extent
from rope_ext.methods.geometry import ChunkGap, Distance, Sinks
from tests.helpers.bands import geometries, seen

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(geometries(), st.integers(1, 90), st.integers(0, 90), st.integers(0, 70))
def test_an_extent_has_every_key_that_is_seen_and_no_more_at_its_ends(
    geometry, queries, more, start
):
    keys = queries + more
    there = seen(geometry, queries, keys, start).any(0).nonzero().flatten().tolist()
    part = extent(geometry, queries, keys, start)
    assert 0 <= part.start <= part.stop <= keys
    if there:
        assert part.start <= there[0] and there[-1] == part.stop - 1
    else:
        assert part.start == part.stop
    if queries == 1:  # then nothing else lies in it, which is what a kernel without a mask needs
        assert there == list(range(part.start, part.stop))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(geometries(), st.integers(1, 700), st.integers(0, 700), st.integers(0, 300))
def test_a_mask_made_of_blocks_is_the_mask_of_every_token(geometry, queries, more, start):
    keys = queries + more
    expected = seen(geometry, queries, keys, start)
    made = flex.block_mask_of(geometry, queries, keys, start + more, start, CPU)
    assert made.shape[-2:] == (queries, keys)
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)
    assert torch.equal(made.mask_mod(None, None, rows, columns), expected)
    size, found = made.BLOCK_SIZE[0], torch.zeros_like(expected)
    for counts, indices, whole in (
        (made.kv_num_blocks, made.kv_indices, False),
        (made.full_kv_num_blocks, made.full_kv_indices, True),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            for column in indices[0, 0, row, :count].tolist():
                block = tuple(slice(x * size, x * size + size) for x in (row, column))
                assert not found[block].any(), "a block is listed once"
                found[block] = expected[block]
                if whole:  # the kernel does not ask the mask there
                    assert expected[block].shape == (size, size) and expected[block].all()
    assert torch.equal(found, expected)


class _Largest(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return out


@pytest.mark.parametrize(
    "geometry", [Distance(0, 4096), Distance(4096, None), ChunkGap(4096, 1, 1), Sinks(4, 4096)]
)
def test_a_mask_of_128k_tokens_takes_megabytes(geometry):
    """A byte for each of 1024 by 1024 blocks, eight in what sorting them makes."""
    with _Largest() as largest:
        flex.block_mask_of.__wrapped__(geometry, 2**17, 2**17, 0, 0, torch.device("meta"))
    assert largest.bytes <= 8 * 2**20 + 2**13


def test_masks_of_flex_made_in_inference_can_be_used_in_training() -> None:
    """A tensor made under inference_mode cannot be saved for a backward pass."""
    with torch.inference_mode():
        made = flex.block_mask_of.__wrapped__(Distance(3, 50), 200, 200, 0, 0, CPU)
    held = [cell.cell_contents for cell in made.mask_mod.__closure__]
    listed = [made.kv_num_blocks, made.kv_indices, made.full_kv_indices, made.q_indices]
    assert len(held) == 4 and not any(x.is_inference() for x in (*held, *listed))
