"""FlexAttention as it is compiled on CUDA: how many graphs there are, and never the dense form.

Here the same graphs run on the CPU, uncompiled, which refuses gradients only where it is asked.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._subclasses.fake_tensor import FakeTensorMode

from rope_ext.attention import dispatch as attention
from rope_ext.attention import flex, fused, reference
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.errors import OptionError
from rope_ext.methods.geometry import Distance

COLUMNS = 16


def turn(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions.double()[:, None] * 100.0 ** -(torch.arange(8) / 8)
    return angles.cos().float(), angles.sin().float()


def asked(
    rows: int,
    queries: int,
    keys: int,
    grads: bool = False,
    window: int = 40,
    **more,
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


class Graphs:
    """A backend that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        self.made.append(graph)
        return graph

    def values(self) -> list:
        nodes = [node for graph in self.made for node in graph.graph.nodes]
        return [node.meta.get("example_value") for node in nodes]


@pytest.fixture
def graphs(monkeypatch) -> Graphs:
    made = Graphs()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=made))
    monkeypatch.setattr(fused, "fuses", lambda x: True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    fused._compiled.cache_clear()
    yield made
    fused._compiled.cache_clear()


def check(tensors: list[torch.Tensor], call: Call) -> None:
    out, expected = flex.attend(*tensors, call), reference.attend(*tensors, call)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    if tensors[0].requires_grad:
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
        ours, theirs = (torch.autograd.grad(x, tensors, weight) for x in (out, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_lengths_windows_and_soft_caps_share_their_graphs(graphs) -> None:
    """Two of the kernel (a band has all of the keys, or a part), a merge, and rotations.

    All numbers but sizes are tensors or fixed: a soft cap that is a symbol is what no kernel takes.
    """
    with torch.inference_mode():
        check(*asked(1, 300, 300, softcap=3.0))
        count = len(graphs.made)
        check(*asked(1, 500, 500, softcap=5.0, window=100))
        assert len(graphs.made) == count <= 6
        for keys, window in ((151, 40), (152, 40), (301, 100)):
            check(*asked(1, 1, keys, window=window))
            count = count if keys > 151 else len(graphs.made)
        assert len(graphs.made) == count <= 12
    check(*asked(2, 300, 300, grads=True))
    count = len(graphs.made)
    check(*asked(2, 500, 500, grads=True, window=100))
    assert len(graphs.made) == count <= 18
    assert not any(isinstance(x, (float, torch.SymFloat)) for x in graphs.values())


def test_beyond_the_limit_of_recompilations_it_raises(graphs) -> None:
    def grown(x, by):
        return x + len(by)

    with torch._dynamo.config.patch(recompile_limit=2):
        own, other = fused._compiled(grown, "one"), fused._compiled(grown, "other")
        own(torch.ones(2), "a")
        own(torch.ones(2), "ab")
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            own(torch.ones(2), "abc")
        assert len(graphs.made) == 2
        assert other(torch.ones(2), "a").tolist() == [2, 2], "each kind has a limit of its own"


def test_keys_are_turned_in_the_band_that_sees_them_only(monkeypatch) -> None:
    """Of 5000 cached keys, those of the window: the far ones are cached as they are wanted."""
    turned, rotate = [], Pairs.rotate

    def watched(self, x, by):
        if by is not None:
            turned.append(x.shape[2])
        return rotate(self, x, by)

    monkeypatch.setattr(Pairs, "rotate", watched)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # quicker
    for queries, expected in ((1, 40), (5, 44)):
        tensors, call = asked(2, queries, 5000)
        with torch.no_grad():
            out = flex.attend(*tensors, call)
        groups = 2 if queries == 1 else queries  # the heads of a key are rows of one call
        assert turned == [groups, expected, groups]
        turned.clear()
        torch.testing.assert_close(out, reference.attend(*tensors, call), rtol=1e-4, atol=1e-4)
        turned.clear()


def test_what_the_fused_kernel_cannot_have_goes_to_the_oracle(monkeypatch) -> None:
    """Heads of fewer than 16 columns, and float64, which FlexAttention refuses on CUDA."""
    monkeypatch.setattr(attention, "_BY_DEVICE", {"cpu": "flex"})
    monkeypatch.setattr(flex, "attend", lambda *given: pytest.fail("the fused kernel was asked"))
    tensors, _ = asked(1, 5, 9)
    heads = [x[..., :12] for x in tensors]
    few = Call([RotatedBand(Distance(0, None), None, None)], Pairs(slice(0, 0), slice(0, 0)), 0.3)
    for given in (heads, [x.double() for x in tensors]):
        torch.testing.assert_close(attention.attend(*given, few), reference.attend(*given, few))
    monkeypatch.undo()
    with FakeTensorMode():  # of a device that is not there
        heads, double = (
            [torch.empty(1, 4, 9, columns, dtype=dtype, device="cuda")] * 3
            for columns, dtype in ((12, torch.float16), (64, torch.float64))
        )
        for given, reason in (
            (heads, "heads of 16 columns or more.*torch.float16 with 12.*'auto'"),
            (double, "no float64.*'auto'"),
        ):
            with pytest.raises(OptionError, match=reason):
                attention.attend(*given, few, "flex")
