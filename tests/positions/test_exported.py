"""What AOTInductor, ONNX and another process make of an exported program (docs/saving.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rope_ext
from tests.helpers.models import tiny_llama

CLOSE = {"atol": 1e-4, "rtol": 0}  # other kernels, float32
BARE = {"use_cache": False}
PROMPT_LENGTHS = 40, 300
REFUSED = {
    "rerope": {"factor": 4},
    "alibi": {},
    "yarn": {"factor": 4, "bias": "alibi"},
    "ntk": {"factor": 4, "layers": [0]},
}


def program(model: Any, tokens: torch.Tensor) -> torch.export.ExportedProgram:
    free = torch.export.Dim("tokens", min=17, max=512)
    shapes = {"input_ids": {1: free}, "use_cache": None}
    with torch.no_grad():
        return torch.export.export(model, (tokens,), BARE, dynamic_shapes=shapes, strict=False)


def patched(name: str, **options: Any) -> torch.nn.Module:
    return rope_ext.patch(tiny_llama(num_hidden_layers=1), name, **options)


@pytest.mark.parametrize(("name", "options"), REFUSED.items(), ids=REFUSED)
def test_attention_that_onnx_cannot_hold_is_refused_with_the_cure(
    name: str, options: dict[str, Any], ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patched(name, **options)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"ONNX has no operator.*'yarn'"):
        program(model, ids[:1, :40])
    monkeypatch.undo()
    positions = torch.arange(20).repeat(2)[None]  # two documents, which a graph does not keep apart
    said = model(ids[:1, :40], position_ids=positions, **BARE).logits
    torch.testing.assert_close(said[:, :20], model(ids[:1, :20], **BARE).logits, **CLOSE)
    torch.testing.assert_close(said[:, 20:], model(ids[:1, 20:40], **BARE).logits, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("yarn", {}), ("dynamic_yarn", {"length": 256})])
def test_onnx_under_frequency_methods(
    name: str, options: dict[str, int], ids, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, longest = patched(name, factor=4, **options), ids.repeat(1, 5)[:1]
    free = {"input_ids": {1: torch.export.Dim("tokens", max=512)}, "use_cache": None}
    with torch.no_grad():
        torch.onnx.export(
            model,
            (longest[:, :40],),
            tmp_path / "model.onnx",
            kwargs=BARE,
            dynamo=True,
            dynamic_shapes=free,
        )
        session = runtime.InferenceSession(tmp_path / "model.onnx")
        for length in PROMPT_LENGTHS:
            tokens = longest[:, :length]
            said, *_ = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})
            right = model(tokens, **BARE).logits
            torch.testing.assert_close(torch.from_numpy(said), right, **CLOSE)


@pytest.mark.slow
@torch.no_grad()
def test_aotinductor_under_a_position_method(ids, tmp_path: Path) -> None:
    model, longest = patched("rerope", factor=4), ids.repeat(1, 5)[:1]
    path = torch._inductor.aoti_compile_and_package(
        program(model, longest[:, :40].clone()), package_path=str(tmp_path / "model.pt2")
    )
    compiled = torch._inductor.aoti_load_package(path)
    for length in PROMPT_LENGTHS:
        tokens = longest[:, :length].clone()
        torch.testing.assert_close(
            compiled(tokens, **BARE).logits, model(tokens, **BARE).logits, **CLOSE
        )
