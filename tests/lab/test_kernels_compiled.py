"""Triton compiles the kernels of FlexAttention for GPUs that are not there: they must fit."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from lab.benchmarks import kernels
from rope_ext.attention.cards import SLACK

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs the package triton, which torch for CPUs comes without",
)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("card", ["7.5", "8.6", "9.0"])
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


HEADS = {  # columns of queries and keys, of values, those that are not rotated, groups, tokens
    "64": (64, 64, 0, 4, 1),
    "128": (128, 128, 0, 4, 1),
    "128, 16 tokens": (128, 128, 0, 7, 16),
    "256, 16 tokens": (256, 256, 0, 4, 16),
    "MLA": (192, 128, 128, 1, 1),
}


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("card", ["8.6", "9.0"])
@pytest.mark.parametrize("heads", HEADS)
def test_the_decoding_kernel_fits_without_spills(card: str, heads: str, tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, card.replace(".", ""), *map(str, HEADS[heads])],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shared, stack = map(int, done.stdout.split()[-2:])
    assert shared <= kernels.CARDS[card].shared
    assert stack == 0, "registers are spilled"


COMPILED = """
import pathlib, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rope_ext.attention import decode, decode_kernel

card, columns, value_columns, rest, groups, tokens = map(int, sys.argv[1:])
pairs = (columns - rest) // 2
padded = (max(triton.next_power_of_2(x), 16) for x in (pairs, max(rest, 1), value_columns))
pairs2, rest2, dv2 = padded
tiles = decode.tiles(groups * tokens, 2 * pairs2 + rest2 * bool(rest), dv2, 2)
options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
constants = tiles | dict(
    KV=8, GROUPS=groups, TOKENS=tokens, BANDS=2, QUERY_ROTATED=3, KEY_ROTATED=1,
    HAS_TEMPERATURE=False, HAS_BIAS=False, HAS_CAP=False, PAIRS=pairs, PAIRS2=pairs2, FIRST=0,
    SECOND=pairs, STEP=1, REST=rest, REST2=rest2, REST_AT=2 * pairs, DV=value_columns, DV2=dv2,
    SPLITS=decode.SPLITS, PRECISION="tf32",
)
kernel, types, aligned = decode_kernel.split_kernel, {}, {}
strides = "qb qh qt kb kh kn vb vh vn query_band query_row key_band".split()
for index, name in enumerate(kernel.arg_names):
    if name in constants:
        types[name] = "constexpr"
        continue
    integers = ("LOW", "HIGH", "ORIGIN", "FILLED")
    pointer = "*bf16" if name in "QKV" else "*i32" if name in integers else "*fp32"
    number = "fp32" if name in ("scale", "softcap") else "i32"
    types[name] = pointer if name.isupper() else number
    if name.isupper() or name in strides:
        aligned[(index,)] = [["tt.divisibility", 16]]
at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
target = GPUTarget("cuda", card, 32)
made = triton.compile(ASTSource(kernel, types, at, aligned), target=target, options=options)
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(made.asm["cubin"])
    file.flush()
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
print(made.metadata.shared, re.search(r"STACK:(\\d+)", usage)[1])
"""
