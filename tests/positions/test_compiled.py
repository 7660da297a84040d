"""Forwards that torch.compile traces: everything in tensors, without a break, and the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

import rope_ext
from rope_ext.position.install import Installed
from rope_ext.rotary import context
from tests.helpers.graphs import static
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, GEOMETRIES, decoded, logits, patch
from tests.helpers.promises import pieces_of_rows_are_as_alone

pytestmark = pytest.mark.usefixtures("no_graphs")
SOME = [  # the others differ in numbers only
    pytest.param(name, marks=[] if name in ("rerope", "dpe") else [pytest.mark.slow])
    for name in GEOMETRIES
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
    assert context.forward_context.stack == []


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_tensors(name: str, side: str, ids, in_tensors) -> None:
    model = patch(tiny_llama(num_hidden_layers=1), name)
    rows = [ids[0, :55], ids[1, :44]]
    steps = [55] if side == "right" else [20, 30, *[1] * 5]
    pieces_of_rows_are_as_alone(model, rows, side, steps, static(model))


def test_rows_with_unequal_padding_under_a_bias_by_distance(ids) -> None:
    """Padding has positions below 0, which are no distance to a token."""
    model = rope_ext.patch(tiny_llama(num_hidden_layers=1), "t5", factor=4)
    torch.nn.init.normal_(model.model.rope_ext_bias.beta)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :7] = 0
    given = {"attention_mask": mask, "use_cache": False}
    right = logits(model, ids[:2, :40], **given)
    found = logits(torch.compile(model, backend="eager"), ids[:2, :40], **given)
    torch.testing.assert_close(found[mask.bool()], right[mask.bool()], **EXACT)


@pytest.mark.parametrize("tokens", [30, 4])
def test_positions_that_do_not_count_are_refused_when_the_graph_runs(tokens, ids, in_tensors):
    model, cache = patch(tiny_llama()), static(tiny_llama())
    logits(model, ids[:, :40], past_key_values=cache)
    for positions in (torch.arange(tokens), torch.arange(50, 50 + tokens), torch.arange(99) // 2):
        given = {"position_ids": positions[None, :tokens], "past_key_values": cache}
        with pytest.raises(RuntimeError, match="count the tokens of the attention mask"):
            logits(model, ids[:, :tokens], **given)
    assert context.forward_context.stack == []


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
@pytest.mark.parametrize("name", ["rerope", "dual_chunk"])
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
    monkeypatch.setattr(context, "is_exporting", lambda: True)


@pytest.mark.parametrize("name", ["rerope", "dual_chunk", "lm_infinite"])
@pytest.mark.parametrize("own_positions", [True, False])
def test_a_program_counts_the_tokens_of_padded_rows(
    name: str, own_positions: bool, ids, in_a_program
) -> None:
    model = patch(tiny_llama(num_hidden_layers=1), name)
    rows = [ids[0, :55], ids[1, :41]]
    steps = (10, 12, 28, *[1] * 5)
    pieces_of_rows_are_as_alone(model, rows, "left", steps, static(model), own_positions)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rerope", "dual_chunk"])
def test_graphs_with_dynamic_shapes_decode_padded_rows(name: str, ids) -> None:
    model = patch(tiny_llama(num_hidden_layers=1), name)
    run = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    rows = [ids[0, :55], ids[1, :44]]
    for steps in ([50, *[1] * 5], [51, *[1] * 4]):
        pieces_of_rows_are_as_alone(run, rows, "left", steps, static(model))
