"""The benchmark of GPUs, without one: what it says, and that all of its parts run."""

from __future__ import annotations

import json

import pytest
import torch

from lab.benchmarks import gpu


def test_a_wrong_kernel_is_found_and_the_others_go_on(monkeypatch, capsys) -> None:
    right = gpu.attend

    def wrong(query, *given, **more):
        out = right(query, *given, **more)
        return out * 1.01 if query.shape[2] == 5 else out

    monkeypatch.setattr(gpu, "attend", wrong)
    assert gpu.main(["--device", "cpu", "--small", "--parts", "exact"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["queries"] for line in lines if line.get("ok") is False] == [5]
    assert lines[-1]["failed"] == 1 and sum(line.get("ok", False) for line in lines) > 5


def test_flex_attention_that_falls_back_to_dense_logits_fails() -> None:
    query = torch.randn(1, 1, 20, 16)
    with gpu.never_dense(), pytest.raises(Exception, match="ran unfused"):
        torch.nn.attention.flex_attention.flex_attention(query, query, query)


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path, capsys) -> None:
    assert gpu.main(["--device", "cpu", "--small", "--output", str(tmp_path / "lines")]) == 0
    said = capsys.readouterr().out
    lines = [json.loads(line) for line in said.splitlines()]
    assert (tmp_path / "lines").read_text() == said
    assert {line["part"] for line in lines} == {"begin", *gpu.PARTS, "end"}
    assert not [line for line in lines if "error" in line and "ok" not in line]
    assert lines[-1]["failed"] == 0
