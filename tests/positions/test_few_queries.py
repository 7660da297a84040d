"""Which kernel few queries get on a GPU, where FlexAttention reads keys one after another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rope_ext.attention import cards, products
from rope_ext.attention.call import Call, Pairs
from rope_ext.position import attend

HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "kernel", "biased", "softcap", "way"),
    [
        (HALF, "auto", False, None, "segments"),  # torch's flash kernel splits the keys
        (HALF, "flash", False, None, "segments"),
        (HALF, "flex", False, None, "few"),
        (HALF, "auto", True, None, "few"),
        (HALF, "auto", False, 30.0, "few"),
        (SINGLE, "auto", False, None, "few"),
        (SINGLE, "reference", False, None, "segments"),
    ],
)
def test_a_token_without_a_kernel_that_splits_its_keys_attends_by_products(
    monkeypatch, dtype, kernel, biased, softcap, way
) -> None:
    monkeypatch.setattr(cards, "card", lambda device: cards.Card((9, 0), 2**17, True))
    call = Call((), Pairs(slice(0), slice(0)), 1, softcap=softcap)
    layer = SimpleNamespace(
        scored=False, biased=biased or None, layout=None, map=SimpleNamespace(kernel=kernel)
    )
    mask = SimpleNamespace(
        few=True, padded_rows=False, rotated_segments=lambda *given: [], keys=9, step=None
    )
    with FakeTensorMode(), torch.no_grad():  # of a device that is not there
        query = torch.empty(1, 4, 1, 64, dtype=dtype, device="cuda")
        asked = SimpleNamespace(query=query, key=query, value=query, call=call, softcap=softcap)
        assert attend.way_of(asked, layer, mask) == way
        with torch.enable_grad():  # which products of half precision do not have
            assert attend.way_of(asked, layer, mask) == "segments"
        mask.padded_rows = True
        assert attend.way_of(asked, layer, mask) == ("few" if kernel != "reference" else way)


def test_rows_of_weights_begin_at_multiples_of_16_bytes() -> None:
    x = torch.rand(2, 3, 4, 13)
    for given, apart in ((x, 16), (x.half(), 16), (x[..., :11].half(), 16), (x[..., :9], 12)):
        found = products.aligned(given)
        assert torch.equal(found, given) and found.stride() == (12 * apart, 4 * apart, apart, 1)
        value = torch.rand(2, 3, given.shape[-1], 8, dtype=given.dtype)
        torch.testing.assert_close(products.product(found, value), given @ value)
    even = x[..., :8].half()
    assert products.aligned(even) is even
