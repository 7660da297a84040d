"""FlexAttention as it is compiled on CUDA: how many graphs there are, and never the dense form.

Here the same graphs run on the CPU, uncompiled, which refuses gradients only where it is asked.
"""

from __future__ import annotations

import functools
import re
import types
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from rope_ext.attention import cards, flash, flex
from rope_ext.attention import dispatch as attention
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.attention.cards import Card, Heads
from rope_ext.errors import OptionError
from rope_ext.methods.geometry import Distance
from tests.helpers.bands import dense

COLUMNS = 16


def turn(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions.double()[:, None] * 100.0 ** -(torch.arange(8) / 8)
    return angles.cos().float(), angles.sin().float()


def asked(
    rows: int, queries: int, keys: int, grads: bool = False, window: int = 40, **more
) -> tuple[list[torch.Tensor], Call]:
    generator = torch.Generator().manual_seed(keys)
    shapes = ((rows, 4, queries), (rows, 2, keys), (rows, 2, keys))
    made = [torch.randn(*shape, COLUMNS, generator=generator) for shape in shapes]
    at = torch.arange(keys)
    bands = [
        RotatedBand(Distance(0, window), turn(at[keys - queries :]), turn(at)),
        RotatedBand(Distance(window, None), turn(torch.tensor([window])), None),
    ]
    pairs = Pairs(slice(0, 8), slice(8, 16))
    return [x.requires_grad_(grads) for x in made], Call(bands, pairs, 0.3, **more)


@pytest.fixture
def graphs(monkeypatch) -> list[torch.fx.GraphModule]:
    """The graphs that are compiled, which run as they are."""
    made = []
    backend = lambda graph, inputs: made.append(graph) or graph  # noqa: E731
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(flex, "fuses", lambda x: True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    flex.compiled.cache_clear()
    yield made
    flex.compiled.cache_clear()


def check(tensors: list[torch.Tensor], call: Call) -> None:
    out, expected = flex.attend(*tensors, call), dense(*tensors, call)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    if tensors[0].requires_grad:
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
        ours, theirs = (torch.autograd.grad(x, tensors, weight) for x in (out, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_there_is_no_limit_of_recompilations(graphs) -> None:
    with torch._dynamo.config.patch(recompile_limit=1), torch.inference_mode():
        for queries in (60, 1):
            check(*asked(1, queries, 60))
            check(*asked(1, queries, 60, softcap=2.0))
    assert len(graphs) == 4


@pytest.mark.slow
def test_gradients_are_those_of_the_dense_form(graphs) -> None:
    check(*asked(2, 300, 300, grads=True))


KIB = 1024
A100 = Card((8, 0), 163 * KIB, True)
H100 = Card((9, 0), 227 * KIB, True)
RTX_3090 = Card((8, 6), 99 * KIB, True)
T4 = Card((7, 5), 64 * KIB, True)
NO_TRITON = Card((9, 0), 227 * KIB, False)
EVERYTHING = Call(
    [RotatedBand(Distance(0, None), None, None)], Pairs(slice(0, 0), slice(0, 0)), 0.3
)
CAPPED = replace(EVERYTHING, softcap=5.0)
half, bfloat16, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("card", "dtype", "columns", "call", "kernel", "reason"),
    [
        (A100, half, 128, EVERYTHING, "flex", None),
        (A100, single, 128, EVERYTHING, "flex", None),
        (A100, half, 128, CAPPED, "flex", None),
        (A100, half, 12, EVERYTHING, "reference", "16 columns or more.*multiple of 8.*have 12"),
        (A100, double, 64, EVERYTHING, "reference", "no float64"),
        (RTX_3090, half, 256, CAPPED, "flex", None),
        (RTX_3090, single, 128, EVERYTHING, "flex", None),
        (RTX_3090, single, 1024, EVERYTHING, "reference", "1024 columns.*99 KiB of shared memory"),
        (T4, half, 128, EVERYTHING, "flex", None),
        (T4, bfloat16, 128, EVERYTHING, "reference", "no bfloat16.*7.5.*capability 8.0"),
        (NO_TRITON, half, 128, EVERYTHING, "flash", None),
        (NO_TRITON, half, 128, CAPPED, "reference", "triton and a C compiler.*soft cap"),
    ],
)
def test_auto_knows_what_a_card_cannot_do(card, dtype, columns, call, kernel, reason) -> None:
    for queries in (1, 9):
        with FakeTensorMode():  # of a device that is not there
            query = torch.empty(1, 4, queries, columns, dtype=dtype, device="cuda")
        found, why = attention.chosen(query, query, call, card)
        assert found == kernel
        assert why is None if reason is None else re.search(reason, why)


def test_long_prompts_on_hopper_take_cudnn_unless_torch_is_told_otherwise(monkeypatch) -> None:
    def kernels(card, queries=2**14, columns=128) -> set[str]:
        monkeypatch.setattr(cards, "card", lambda device: card)
        with FakeTensorMode():
            x = torch.empty(1, 2, queries, columns, dtype=bfloat16, device="cuda")
        name = attention.chosen(x, x, EVERYTHING, card)[0]
        tiles = flash.tiles(Distance(4096, None), queries, queries)
        return {name, *(flash.kernel_of(tile, x, x) for tile in tiles)}

    assert kernels(H100) == kernels(NO_TRITON) == {"flash", "cudnn"}
    assert kernels(A100) == kernels(H100, columns=256) == {"flex", "flash"}
    assert kernels(H100, queries=6000) == {"flex", "flash"}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert kernels(H100) == {"flex", "flash"}
    with torch_deterministic():
        assert kernels(H100) == {"flex", "flash"}
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    assert kernels(H100) == {"flex", "flash"}
    with FakeTensorMode():
        x = torch.empty(1, 2, 1, 64, dtype=bfloat16, device="cuda")
    assert attention.chosen(x, x, EVERYTHING, NO_TRITON)[0] == "reference"  # FA4 would be slower


def test_graphs_choose_the_kernel_of_long_prompts() -> None:
    x = torch.zeros(1, 2, 2**13, 8)
    run = torch.compile(
        lambda x: x + int(flash.uses_cudnn(x, x, H100)), fullgraph=True, backend="eager"
    )
    assert torch.equal(run(x), x + 1)


@contextmanager
def torch_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("dtype", "columns", "more", "reason"),
    [
        (half, 12, {}, "heads of a multiple of 8.*have 12; use.*'auto'"),
        (half, 264, {}, "up to 256 columns.*have 264;"),
        (single, 64, {}, "float16 and bfloat16 on a GPU.*this is torch.float32"),
        (half, 64, {"bias": torch.zeros(2, 9)}, "no bias; use.*'auto'"),
        (half, 64, {"softcap": 2.0}, "no soft cap; use.*'auto'"),
    ],
)
def test_what_torchs_flash_kernel_cannot_have(dtype, columns, more, reason, monkeypatch) -> None:
    monkeypatch.setattr(cards, "card", lambda device: A100)
    with FakeTensorMode():
        x = torch.empty(1, 2, 9, columns, dtype=dtype, device="cuda")
    with pytest.raises(OptionError, match=reason):
        attention.attend(x, x, x, replace(EVERYTHING, **more), "flash")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("columns", [64, 80, 96, 128, 192, 256])
def test_sizes_of_the_kernel_fit_into_shared_memory(columns, size, bias) -> None:
    heads = Heads(columns, columns, size, bias)
    for card in (A100, RTX_3090, T4):
        made = cards.options(card, heads)
        assert made.pop("FORCE_USE_FLEX_ATTENTION")
        if not made:
            assert card == A100
            continue
        tile = [made[f"fwd_{x}"] for x in ("BLOCK_M", "BLOCK_N", "num_stages")]
        assert cards.forward_bytes(*tile, heads, card) < card.shared
        assert 128 % tile[0] == 128 % tile[1] == 0, "tiles divide the blocks of the mask"


def test_a_backward_pass_that_does_not_fit_is_refused_with_gradients_only() -> None:
    heads = Heads(256, 256, 4)
    assert cards.options(T4, heads) and cards.options(T4, heads, gradients=True) is None
    assert cards.options(RTX_3090, heads, gradients=True)


class OutOfResources(Exception):  # the name that Triton gave it
    """As Triton raises it when a kernel starts."""

    __module__ = "triton.runtime.errors"


def test_an_error_of_the_compiler_becomes_a_log_line(monkeypatch, caplog) -> None:
    """The kernel is found not to fit when it starts: another path computes the same, said once."""

    def fails(*_given: object) -> None:
        raise OutOfResources("out of resource: shared memory, Required: 151552")

    monkeypatch.setattr(flex, "fuses", lambda x: True)
    monkeypatch.setattr(flex, "compiled", lambda: fails)
    monkeypatch.setattr(attention, "chosen", lambda **given: ("flex", None))
    attention.log_once.cache_clear()
    tensors, call = asked(1, 5, 60)
    for _ in range(2):
        out = attention.attend(*tensors, call)
        torch.testing.assert_close(out, dense(*tensors, call), rtol=1e-5, atol=1e-5)
    (said,) = caplog.messages
    assert re.search("plain operations.*was not compiled.*shared memory", said)
    with pytest.raises(OptionError, match=r"not compiled.*shared memory.*kernel='auto'"):
        attention.attend(*tensors, call, "flex")


def test_a_card_is_a_constant_of_a_graph(monkeypatch) -> None:
    properties = types.SimpleNamespace(major=8, minor=6, shared_memory_per_block_optin=99 * KIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(cards, "compiles", lambda: True)
    cards.card_at.cache_clear()

    def asks(x: torch.Tensor) -> torch.Tensor:
        found = cards.card(torch.device("cuda", 0))
        return x + (found.shared if found.compiles else 0)

    compiled = torch.compile(asks, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == RTX_3090.shared
    cards.card_at.cache_clear()
