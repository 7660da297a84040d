"""Forwards that torch.compile traces: everything in tensors, without a break, and the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

import rope_ext
from rope_ext.attention import dispatch
from rope_ext.position.install import Installed
from rope_ext.rotary import calls
from rope_ext.rotary.context import forward_context
from tests.helpers.graphs import graphs, static, whole
from tests.helpers.models import tiny_llama
from tests.helpers.positions import (
    EXACT,
    FAMILIES,
    GEOMETRIES,
    METHODS,
    decoded,
    logits,
    padded,
    patch,
)
from tests.helpers.promises import pieces_of_rows_are_as_alone

pytestmark = pytest.mark.usefixtures("no_graphs")
SOME = [  # the others differ in numbers only
    pytest.param(name, marks=[] if name in ("rerope", "dpe") else [pytest.mark.slow])
    for name in METHODS
]


@pytest.mark.parametrize("name", SOME)
def test_what_a_graph_holds_is_what_the_eager_path_computes(name: str, ids, in_tensors) -> None:
    """Prefill, a chunk, a few tokens, one at a time; between them forwards that are not traced."""
    model, steps = patch(tiny_llama(num_hidden_layers=1), name), [40, 30, 5, *[1] * 5]
    ids = ids[:, : sum(steps)]
    right = logits(model, ids)
    torch.testing.assert_close(decoded(model, ids, steps, static(model)), right, **EXACT)
    cache, said = static(model), []
    pieces = ids.split(steps, dim=1)
    for number, piece in enumerate(pieces):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Installed, "traceable", lambda self, turn=number % 3: turn > 0)
            said.append(logits(model, piece, past_key_values=cache))
    torch.testing.assert_close(torch.cat(said, 1), right, **EXACT)
    assert forward_context.stack == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
@pytest.mark.parametrize("name", ["rerope", "alibi"])
def test_few_tokens_in_half_precision(dtype, kind: str, name: str, ids, in_tensors):
    """As far from float32 as rounding takes the eager path."""
    model = rope_ext.patch(FAMILIES[kind].model(), name, factor=4)
    right = logits(model, ids)
    model.to(dtype)
    steps = [40, 5, *[1] * 45]
    eager = (logits(model, ids).float() - right).norm()
    said = decoded(model, ids, steps, static(model))
    assert (said.float() - right).norm() < 1.5 * eager


def test_gradients_of_few_tokens_in_half_precision(ids, in_tensors) -> None:
    """The kernel has none for a sum of exponentials, with which bands are merged."""
    model, found = patch(tiny_llama(num_hidden_layers=1), "rerope"), []
    tokens, mask, positions = padded([ids[0, :12], ids[1, :7]], "left")
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype).zero_grad()
        given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        (model(tokens, **given).logits * mask[..., None]).pow(2).mean().backward()
        found.append(model.model.layers[0].self_attn.q_proj.weight.grad.float().clone())
    assert (found[0] - found[1]).norm() < 0.05 * found[0].norm()  # bfloat16 has 8 bits


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_tensors(name: str, side: str, ids, in_tensors) -> None:
    model = patch(tiny_llama(num_hidden_layers=1), name)
    rows = [ids[0, :55], ids[1, :44]]
    steps = [55] if side == "right" else [20, 30, *[1] * 5]
    pieces_of_rows_are_as_alone(model, rows, side, steps, static(model))


def test_tokens_behind_padding_on_the_right_count_without_it(ids, in_tensors) -> None:
    model, cache = patch(tiny_llama()), static(tiny_llama())
    mask = torch.ones(2, 51, dtype=torch.long)
    mask[1, 30:50] = 0
    logits(model, ids[:, :50], attention_mask=mask[:, :50], past_key_values=cache)
    given = {"position_ids": mask.sum(1, keepdim=True) - 1, "past_key_values": cache}
    said = logits(model, ids[:, 50:51], attention_mask=mask, **given)
    for row in range(2):
        alone = logits(model, ids[row, :51][mask[row].bool()][None])
        torch.testing.assert_close(said[row, -1], alone[0, -1], **EXACT)


@pytest.mark.parametrize("tokens", [30, 4])
def test_positions_that_do_not_count_are_refused_when_the_graph_runs(tokens, ids, in_tensors):
    model, cache = patch(tiny_llama()), static(tiny_llama())
    logits(model, ids[:, :40], past_key_values=cache)
    for positions in (torch.arange(tokens), torch.arange(50, 50 + tokens), torch.arange(99) // 2):
        given = {"position_ids": positions[None, :tokens], "past_key_values": cache}
        with pytest.raises(RuntimeError, match="count the tokens of the attention mask"):
            logits(model, ids[:, :tokens], **given)
    assert forward_context.stack == []


@pytest.mark.parametrize("tokens", [60, 12])
@pytest.mark.parametrize("name", ["rerope", "alibi"])
def test_tokens_at_the_same_position_in_tensors(name: str, tokens: int, ids, in_tensors) -> None:
    model = rope_ext.patch(tiny_llama(), name, factor=4)
    given = {"position_ids": (torch.arange(tokens) // 2)[None], "use_cache": False}
    given["attention_mask"] = torch.ones(1, tokens)
    row, other = ids[:1, :tokens], ids[:1, :tokens].clone()
    other[0, 9:] = ids[1, 9:tokens]
    said = logits(model, row, **given)
    torch.testing.assert_close(logits(model, other, **given)[:, :9], said[:, :9], **EXACT)


def test_fractions_of_tokens_are_refused_when_the_graph_runs(ids, in_tensors) -> None:
    model, halves = patch(tiny_llama()), torch.arange(90)[None] / 2
    with pytest.raises(RuntimeError, match="fractions"):
        logits(model, ids, position_ids=halves, attention_mask=torch.ones_like(ids))


@pytest.mark.slow
def test_the_operator_keeps_what_torch_asks_of_one() -> None:
    make = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 8, 4, generator=make) for heads in (4, 2, 2))
    places, sequences = torch.arange(8)[None], torch.zeros(1, 8, dtype=torch.long)
    plan = [1, 0, 0, 2**62, 0, 0, 1, 0, 2, 1, 1, 2, 4, 1]  # all keys, nothing turned
    slots = [places, sequences, torch.tensor(0)]
    given = (query, key, value, None, None, [], slots, plan, 0, 0.5, None, "auto")
    torch.library.opcheck(dispatch.operator, given)


class _Reads(TorchDispatchMode):
    """Whether an operator reads numbers of its tensors, also within operators of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.reading: set[str] = set()
        self.within: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "rope_ext":
            self.within.append(str(func.overloadpacket))
            with self:  # the function itself, since the operator would come here again
                out = OPDEFS[func.name()]._init_fn(*args, **(kwargs or {}))
            self.within.pop()
            return out
        if self.within and func in (_READ, torch.ops.aten.nonzero.default):
            self.reading.update(self.within)
        return func(*args, **(kwargs or {}))


_READ = torch.ops.aten._local_scalar_dense.default


def test_operators_that_read_numbers_are_tagged_so_for_cuda_graphs(ids, in_tensors) -> None:
    model = patch(tiny_llama(num_hidden_layers=1))
    tokens, mask, positions = padded([ids[0, :40], ids[1, :30]], "left")
    with _Reads() as reads:
        logits(model, tokens, attention_mask=mask, position_ids=positions)
        with torch.enable_grad():
            model(ids[:, :30], use_cache=False).logits.sum().backward()
    ours = {name: getattr(torch.ops.rope_ext, name).default for name in torch.ops.rope_ext}
    assert {"bands", "bands_backward", "held"} <= ours.keys()
    tagged = {str(x.overloadpacket) for x in ours.values() if UNSAFE in x.tags}
    assert tagged == reads.reading == {"rope_ext.bands"}


UNSAFE = torch.Tag.cudagraph_unsafe


# --- with dynamo ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", GEOMETRIES)
def test_generate_with_a_static_cache_compiles_one_graph_for_all_steps(name: str, ids) -> None:
    model = patch(tiny_llama(num_hidden_layers=1), name)
    tokens, mask, _ = padded([ids[0, :60], ids[1, :49]], "left")
    new: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    given = {"attention_mask": mask, "pad_token_id": 0, **new}
    right = model.generate(tokens, **given)
    for _ in range(2):  # the second request finds the graph of the first
        said = model.generate(
            tokens, cache_implementation="static", compile_config=whole(), **given
        )
        assert torch.equal(said, right)
    assert graphs() == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_prefill_and_decoding_compile_whole(ids) -> None:
    model = patch(tiny_llama(num_hidden_layers=1), "dual_chunk")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    right = logits(model, ids)
    torch.testing.assert_close(logits(compiled, ids), right, **EXACT)
    for graphs_by_then in (4, 4):  # an empty cache of the model's, of one's own, a chunk, a token
        steps = [40, 30, *[1] * 20]
        said = decoded(compiled, ids, steps, static(model))
        torch.testing.assert_close(said, right, **EXACT)
        assert graphs() == graphs_by_then
    assert not counters["graph_break"]


@pytest.mark.slow
def test_inductor_decodes_in_one_graph(ids) -> None:
    model = patch(tiny_llama(num_hidden_layers=1), "rerope")
    right = logits(model, ids[:, :60])
    compiled, cache = torch.compile(model, fullgraph=True), static(model)
    said = [logits(model, ids[:, :50], past_key_values=cache)]
    said += [logits(compiled, ids[:, i : i + 1], past_key_values=cache) for i in range(50, 60)]
    torch.testing.assert_close(torch.cat(said, 1), right, **EXACT)
    assert graphs() == 1


def test_padding_without_positions_of_its_own(ids, in_tensors) -> None:
    """As classification and evaluation call a model: rows of one row of positions."""
    model = patch(tiny_llama(num_hidden_layers=1), "rerope")
    rows = [ids[0, :55], ids[1, :44]]
    for side in ("left", "right"):
        tokens, mask, _ = padded(rows, side)
        said = logits(model, tokens, attention_mask=mask, use_cache=False)
        for row, one in enumerate(rows):
            right = logits(model, one[None])[0]
            torch.testing.assert_close(said[row][mask[row].bool()], right, **EXACT)


# --- exported ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param("rerope", marks=pytest.mark.slow), "dual_chunk"])
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_exported_program_reads_prompts_of_any_length(
    name: str, masked: bool, ids, tmp_path
) -> None:
    model, free = patch(tiny_llama(num_hidden_layers=1), name), {1: torch.export.Dim.DYNAMIC}
    short, long = ids[:, :40].clone(), ids.repeat(1, 5)  # torch would ask for a view each time

    def given(tokens: torch.Tensor) -> dict[str, Any]:
        mask = {"attention_mask": torch.ones_like(tokens)} if masked else {}
        return {"use_cache": False, **mask}

    shapes = {"input_ids": free, "use_cache": None, **({"attention_mask": free} if masked else {})}
    with torch.no_grad():
        program = torch.export.export(
            model, (short,), given(short), dynamic_shapes=shapes, strict=False
        )
        torch.export.save(program, tmp_path / "program.pt2")
        loaded = torch.export.load(tmp_path / "program.pt2").module()
        for tokens in (long, short):
            said = loaded(tokens, **given(tokens)).logits
            torch.testing.assert_close(said, logits(model, tokens), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_the_exporter_of_transformers_decodes_in_a_static_cache(name: str, ids) -> None:
    model = patch(tiny_llama(num_hidden_layers=1), name)
    right = logits(model, ids[:1, :60])
    options = {"use_cache": True, "cache_implementation": "static", "max_length": 64}
    model.generation_config = GenerationConfig(
        **options, cache_config={"batch_size": 1, "max_cache_len": 64}
    )
    exporter = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=64)
    program = exporter.export(
        input_ids=ids[:1, :1], cache_position=torch.tensor([0]), strict=False
    ).module()
    said = [
        program(input_ids=token, cache_position=torch.tensor([place]))
        for place, token in enumerate(ids[:1, :60].split(1, dim=1))
    ]
    torch.testing.assert_close(torch.cat(said, 1), right, **EXACT)


@pytest.fixture
def in_a_program(in_tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an exported program would hold: of the tokens in a cache it knows their number."""
    monkeypatch.setattr(calls, "is_exporting", lambda: True)


@pytest.mark.parametrize("name", ["rerope", "dual_chunk", "lm_infinite"])
@pytest.mark.parametrize("own_positions", [True, False])
def test_a_program_counts_the_tokens_of_padded_rows(
    name: str, own_positions: bool, ids, in_a_program
) -> None:
    model = patch(tiny_llama(num_hidden_layers=1), name)
    rows = [ids[0, :55], ids[1, :41]]
    steps = (10, 12, 28, *[1] * 5)
    pieces_of_rows_are_as_alone(model, rows, "left", steps, static(model), own_positions)


def test_a_program_refuses_positions_that_do_not_count_one_by_one(ids, in_a_program) -> None:
    model, cache = patch(tiny_llama(num_hidden_layers=1)), static(tiny_llama())
    logits(model, ids[:, :20], past_key_values=cache)
    places = torch.tensor([[20, 21, 30, 31]])
    with pytest.raises(RuntimeError, match="count the tokens"):
        logits(model, ids[:, 20:24], past_key_values=cache, position_ids=places)


def test_gradients_where_first_tokens_lie_at_the_end_of_a_short_row(ids, in_tensors) -> None:
    """Each of their slots is written once, whatever the padding."""
    model = patch(tiny_llama(num_hidden_layers=1), "lm_infinite", sinks=10).double()
    tokens, mask, positions = padded([ids[0, :12], ids[1, :7]], "left")

    def gradients(*given: torch.Tensor) -> list[torch.Tensor]:
        ids, mask, positions = given
        model.zero_grad()
        out = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        (out * mask[..., None]).sum().backward()
        return [p.grad for p in model.parameters()]

    found = gradients(tokens, mask, positions)
    alone = [
        gradients(*(x[row : row + 1, mask[row].bool()] for x in (tokens, mask, positions)))
        for row in range(2)
    ]
    for both, *apart in zip(found, *alone, strict=True):
        torch.testing.assert_close(both, sum(apart))
