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
    fit_without_spills(DECODING, [card], HEADS[heads])


# Bands, bits of those that rotate keys, columns, groups, queries; then whether there are sinks,
# whether a window and a soft cap, and whether it is float16 in place of bfloat16. The last ones
# also say whether each token is a page, as in transformers.
PAGES = {
    "decoding, 128": (2, 0b01, 128, 4, 1, 0, 0, 0),
    "decoding, 64": (2, 0b01, 64, 3, 1, 0, 0, 0),
    "decoding, 256": (2, 0b01, 256, 4, 1, 0, 0, 0),
    "decoding, groups of 20": (2, 0b01, 128, 20, 1, 0, 0, 0),
    "decoding, no keys": (3, 0, 128, 4, 1, 0, 0, 0),
    "decoding, five bands": (5, 0b01110, 128, 7, 1, 0, 0, 0),
    "prompts, 128": (2, 0b01, 128, 4, 512, 1, 0, 0),
    "prompts, 80": (2, 0b01, 80, 1, 512, 0, 0, 0),
    "prompts, 256": (2, 0b01, 256, 4, 512, 0, 0, 0),
    "prompts, no keys": (3, 0, 128, 4, 512, 0, 0, 0),
    "prompts, five bands": (5, 0b01110, 64, 7, 512, 0, 0, 0),
    "decoding, with limits": (2, 0b01, 128, 4, 1, 1, 1, 0),
    "decoding, float16": (2, 0b01, 128, 4, 1, 0, 0, 1),
    "prompts, with limits": (2, 0b01, 128, 4, 512, 1, 1, 0),
    "prompts, float16": (2, 0b01, 128, 4, 512, 0, 0, 1),
    "decoding, pages of a token": (2, 0b01, 128, 4, 1, 0, 0, 0, 1),
    "prompts, pages of a token": (2, 0b01, 128, 4, 512, 0, 0, 0, 1),
}


@pytest.mark.slow
@needs_triton
@pytest.mark.every
@pytest.mark.parametrize("pages", PAGES)
def test_the_kernel_on_pages_fits_without_spills(pages: str) -> None:
    fit_without_spills(ON_PAGES, ["8.0", "8.6", "8.9", "9.0"], PAGES[pages])


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("numbers", [(128, 16, 0), (256, 16, 1)], ids=str)
def test_the_merge_of_splits_fits_without_spills(numbers: tuple[int, ...]) -> None:
    fit_without_spills(MERGE, ["8.0", "8.6", "8.9", "9.0"], numbers)


FEW_BYTES = {"8.6": 64, "8.9": 64}
"""Of a thread's stack: 8 are used in decoding with 128 columns, 32 in prompts with 256."""


def fit_without_spills(program: str, cards: list[str], numbers: tuple[int, ...]) -> None:
    """A program defines what is compiled for every card."""
    names = ",".join(card.replace(".", "") for card in cards)
    done = subprocess.run(
        [sys.executable, "-c", program + COMPILED, names, *map(str, numbers)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    used = [tuple(map(int, line.split())) for line in done.stdout.splitlines()[-len(cards) :]]
    for card, (shared, stack) in zip(cards, used, strict=True):
        assert shared <= kernels.CARDS[card].shared, card
        assert stack <= FEW_BYTES.get(card, 0), f"registers are spilled for {card}"


ON_PAGES = """
import sys
from types import SimpleNamespace
from rope_ext.attention import paged, paged_kernel

bands, rotated, columns, groups, queries, sinks, limits, half, *lone = map(int, sys.argv[2:])
tables = SimpleNamespace(low=range(bands), rotated=rotated, temperature=1)
constants = paged.tile(queries, groups, columns)
options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
constants |= paged.constants(tables, groups, 8, 1 if lone else 16, columns // 2, columns)
constants |= dict(WINDOW=45 * limits, HAS_PAGES_OF=True, HAS_SINKS=bool(sinks))
constants |= dict(HAS_CAP=bool(limits))
constants |= dict(PRECISION="tf32")
kernel, types, aligned = paged_kernel.paged_kernel, {}, {}
integers = "PAGES PAGES_OF LENGTHS STARTS LOW HIGH QUERY KEY KEY_STEP".split()
halves = ["Q", "K", "V"] + ["OUT"] * (constants["SPLITS"] == 1)
for index, name in enumerate(kernel.arg_names):
    if name in constants:
        types[name] = "constexpr"
        continue
    dtype = "*fp16" if half else "*bf16"
    pointer = dtype if name in halves else "*i32" if name in integers else "*fp32"
    if lone and name == "PAGES":
        pointer = "*i64"
    number = "fp32" if name in ("scale", "softcap") else "i32"
    types[name] = pointer if name.isupper() else number
    if number == "i32" and name != "requests":
        aligned[(index,)] = [["tt.divisibility", 16]]
"""


MERGE = """
import sys
from rope_ext.attention import paged_kernel

columns, splits, sinks = map(int, sys.argv[2:])
options = {}
constants = dict(HEADS=32, SPLITS=splits, DV=columns, DV2=columns, HAS_SINKS=bool(sinks))
kernel, types, aligned = paged_kernel.merge_kernel, {}, {}
for name in kernel.arg_names:
    pointer = "*bf16" if name == "OUT" else "*i32" if name == "STARTS" else "*fp32"
    types[name] = "constexpr" if name in constants else pointer if name.isupper() else "i32"
"""


DECODING = """
import sys
import triton
from rope_ext.attention import decode, decode_kernel

columns, value_columns, rest, groups, tokens = map(int, sys.argv[2:])
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
"""


COMPILED = """
import pathlib, re, subprocess, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
for card in map(int, sys.argv[1].split(",")):
    target = GPUTarget("cuda", card, 32)
    made = triton.compile(ASTSource(kernel, types, at, aligned), target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [tool, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True).stdout
    print(made.metadata.shared, re.search(r"STACK:(\\d+)", usage)[1])
"""
