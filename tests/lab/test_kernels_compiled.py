"""Triton compiles the kernels of FlexAttention for GPUs that are not there: they must fit."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from lab.benchmarks import kernels
from rope_ext.attention.cards import SLACK


def test_the_table_has_the_most_bytes_of_each_phase() -> None:
    case = {"heads": "128", "dtype": "float16", "phase": kernels.TRAIN, "kind": "bias"}
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64, "stages": 3}
    backward = {"BLOCK_M1": 64, "BLOCK_N1": 64, "stages": 2}
    lines = [
        {**case, "card": "8.6", "kernels": [{"shared": shared, **tiles}, {"shared": 9, **backward}]}
        for shared in (1024, 122_880, 8)
    ]
    lines.append({**case, "card": "7.5", "refused": "too large"})
    assert kernels.table(lines).splitlines()[2:] == [
        "| float16 128 prefill |  | 122,880 (131,072) |",
        "| float16 128 backward | refused | 9 |",
    ]


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs the package triton, which torch for CPUs comes without",
)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("card", ["7.5", "8.0", "8.6", "9.0"])
def test_kernels_compile_and_fit(card, tmp_path) -> None:
    """To machine code for one card, where none of float32 takes long; else to shared memory."""
    output = tmp_path / "lines"
    command = [sys.executable, "-m", "lab.benchmarks.kernels", "--small", "--cards", card]
    command += ["--output", str(output), *(["--whole"] if card == "8.6" else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) == len(kernels.cases([card], small=True))
    for line in lines:
        assert line["ok"] and line["kernels"], line
        for kernel in filter(kernels.of_attention, line["kernels"]):
            expected = kernels.estimate(line, kernel)
            assert expected is None or kernel["shared"] <= expected + SLACK


@pytest.mark.slow
@needs_triton
def test_a_decoding_step_launches_few_kernels() -> None:
    """Five kernels and three products in place of torch's attention; the model has seven more."""
    command = [sys.executable, "-m", "lab.benchmarks.launches", "--methods", "rerope"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    made, products = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert 7 < made <= 7 + 5
    assert products == 7 + 3
