"""Rows that are padded differently decode in one call, and read from the device few times."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

import rope_ext
from rope_ext.attention import placed
from rope_ext.forward.positions import stored_rotation
from rope_ext.position.attend import LAYER
from rope_ext.position.segments import BatchMask
from tests.helpers.models import tiny_llama

ROWS = 6
LENGTH = 90


class _Host(torch.Tensor):
    """What was copied from the device, and all that is made of it."""


class _Reads(TorchFunctionMode):
    """How often the host waits for a tensor that is not its own: as a GPU makes it wait."""

    READING = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.count = self.most = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if not any(isinstance(x, _Host) for x in args):
            copied = name == "cpu"
            self.count += copied or name in self.READING
            if copied and args[0].dtype == torch.long:
                self.most = max(self.most, args[0].numel())
            if copied:
                return func(*args, **(kwargs or {})).as_subclass(_Host)
        return func(*args, **(kwargs or {}))


class _Scalars(TorchDispatchMode):
    """How often a number of a tensor is read, or their count depends on one."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        return func(*args, **(kwargs or {}))


class _Calls(TorchDispatchMode):
    """Operators of torch, and copies to the device "meta", which stands for a GPU."""

    count = uploads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        to = (kwargs or {}).get("device")
        host = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu"
        self.uploads += host and to is not None and to.type == "meta"
        return func(*args, **(kwargs or {}))


def batch(rows: int, padded: bool = True) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(rows if padded else 0):
        mask[row, : 5 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def begun(model, given: dict[str, torch.Tensor]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    return cache


def step(model, given: dict[str, torch.Tensor], cache: DynamicCache, tokens: int = 1):
    mask = torch.nn.functional.pad(given["attention_mask"], (0, tokens), value=1)
    ids = torch.arange(7, 7 + tokens).expand(len(mask), -1)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits


@pytest.mark.parametrize("method", ["rerope", "self_extend", "dual_chunk", "lm_infinite", "string"])
def test_rows_together_are_rows_alone(method) -> None:
    options = {"factor": 1.9} if method == "string" else {"factor": 2}
    model = rope_ext.patch(tiny_llama(), method, **options)
    for tokens in (1, 3):
        given = batch(3)
        out = step(model, given, begun(model, given), tokens)
        for row in range(3):
            alone = {name: x[row : row + 1, 5 * row :] for name, x in given.items()}
            expected = step(model, alone, begun(model, alone), tokens)
            torch.testing.assert_close(out[row : row + 1], expected, rtol=2e-4, atol=2e-4)


def test_more_rows_are_no_more_calls(monkeypatch) -> None:
    """One call in each layer, and operators that do not grow with the layers by the row."""
    model = rope_ext.patch(tiny_llama(), "rerope", factor=2)
    calls, few = [], placed.attend_few
    monkeypatch.setattr(placed, "attend_few", lambda *x: calls.append(1) or few(*x))
    counts = []
    for rows in (2, ROWS):
        given = batch(rows)
        cache = begun(model, given)
        with _Calls() as made:
            step(model, given, cache)
        counts.append(made.count)
        assert len(calls) == model.config.num_hidden_layers
        calls.clear()
    shared = 25  # for each further row, to see once which tokens it has
    assert counts[1] - counts[0] <= shared * (ROWS - 2)


def test_a_step_reads_from_the_device_a_few_times_whatever_the_rows_and_layers() -> None:
    """The mask, and the positions of the new tokens; what else there is is known."""
    for padded, rows, layers in ((True, 2, 2), (True, ROWS, 3), (False, 1, 2), (False, 4, 2)):
        model = rope_ext.patch(tiny_llama(num_hidden_layers=layers), "rerope", factor=2)
        given = batch(rows, padded)
        cache = begun(model, given)
        native = _Reads()
        with native:
            step(tiny_llama(num_hidden_layers=layers), given, DynamicCache())
        with _Reads() as reads:
            step(model, given, cache)
        assert reads.count - native.count <= 2, (padded, rows, layers)
        assert 0 < reads.most <= rows, "positions of new tokens, not those of all keys"


@pytest.mark.parametrize("padded", [False, True])
def test_a_step_in_a_graph_reads_nothing(padded: bool, in_tensors) -> None:
    model, given = rope_ext.patch(tiny_llama(), "rerope", factor=2), batch(2, padded)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 2)
    mask = given["attention_mask"] if padded else None
    with torch.no_grad():
        model(given["input_ids"], attention_mask=mask, past_key_values=cache)
        counts = []
        for one in (tiny_llama(), model):
            longer = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
            at = cache if one is model else StaticCache(config=model.config, max_cache_len=LENGTH)
            positions = torch.full((2, 1), LENGTH)
            with _Scalars() as scalars:
                one(
                    given["input_ids"][:, :1],
                    attention_mask=longer,
                    position_ids=positions,
                    past_key_values=at,
                )
            counts.append(scalars.count)
    assert counts[1] == 0 <= counts[0]


@pytest.mark.parametrize("method", ["rerope", "dual_chunk", "string"])
def test_constants_are_copied_to_a_device_once(method) -> None:
    """Also where the first to ask does so in inference mode, and another one trains."""
    model = rope_ext.patch(tiny_llama(), method, factor=1.9)
    layer, there = model.model.layers[0].self_attn.__dict__[LAYER], torch.device("meta")
    t, like = torch.arange(5, device=there), [torch.empty(1, 5, 16, device=there)] * 2

    def ask() -> None:
        for _, *turns in layer.rotated.rotations:
            for of in turns:
                of.at(t, torch.float32)
        stored_rotation(layer.map, layer.layout.site, t[None], like)

    with _Calls() as first, torch.inference_mode():
        ask()
    with _Calls() as second:
        ask()
    assert first.uploads > 0 == second.uploads
    assert not layer.map.inv_freq(layer.layout.site, there).is_inference()


def test_a_dense_mask_is_moved_to_each_device_once() -> None:
    mask = BatchMask(None, given=torch.ones(1, 1, 4, 4, dtype=torch.bool))
    here, there = torch.device("cpu"), torch.device("meta")
    assert mask.dense_on(there).device == there and mask.dense_on(here) is mask.given
    assert mask.dense_on(there) is mask.dense_on(there)
