"""Runs small models in real engines and returns their log-probabilities."""

import http.client
import itertools
import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rope_ext.engines import llama_server
from rope_ext.errors import ExportError, first_line

EXACT = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
"""Flags that make llama.cpp compute attention in float32; its default is half precision."""
_NO_CHANCE = -1e30  # llama.cpp's log-probability for a probability of zero
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Keeps the script's directory out of sys.path: its files shadow libraries.
_RUN = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
_SHOWN = 300  # characters to quote from a server's response
_SECONDS = 120  # timeout for requests, and for shutting down a server


@contextmanager
def serving(words: Sequence[str]) -> Iterator[str]:
    """Run llama.cpp's server in a child process inside a ``with`` block; yields its address."""
    command = [sys.executable, "-c", _RUN, llama_server.__file__, *words]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert process.stdout is not None
            address = next((line for line in process.stdout if line.startswith("address ")), None)
            if address is None:
                process.wait(_SECONDS)
                log.seek(0)
                raise _failure(log.read())
            yield address.split()[1]
        finally:
            try:
                process.communicate(timeout=_SECONDS)  # closing stdin stops it
            finally:
                process.kill()


def _failure(log: str) -> ExportError:
    if "No module named 'xllamacpp'" in log:
        return ExportError(
            "llama.cpp needs the package xllamacpp, which is not installed; install it with: "
            'pip install "rope-ext[engines]"'
        )
    lines = [line for line in log.splitlines() if line.strip()]
    return ExportError(f"llama.cpp's server did not start: {' / '.join(lines[-3:])}")


def completed(
    address: str,
    prompt: Sequence[int],
    vocabulary: int,
    top: int | None = None,
    model: str | None = None,
) -> torch.Tensor:
    """Return the ``top`` next-token log-probabilities after ``prompt`` from an OpenAI-style server.

    Float32, ``[vocabulary]``; NaN for tokens that the server did not return. Raises ExportError if
    it cannot be reached, returns an error, or does not identify tokens.
    """
    body = {
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 1.0,
        "logprobs": vocabulary if top is None else top,
        "return_tokens_as_token_ids": True,  # vLLM; other servers return text
        "cache_prompt": True,  # llama.cpp; prompts share all but their last token
    } | ({} if model is None else {"model": model})
    answer = _post(f"{address.rstrip('/')}/v1/completions", body)
    found = torch.full((vocabulary,), torch.nan)
    try:
        given = answer["choices"][0]["logprobs"]
        if "content" in given:
            entries = given["content"][0]["top_logprobs"]
            pairs = [(entry.get("id", entry["token"]), entry["logprob"]) for entry in entries]
        else:
            pairs = list(given["top_logprobs"][0].items())
    except (KeyError, IndexError, TypeError):
        raise ExportError(
            f"{address} returned no log-probabilities: {str(answer)[:_SHOWN]}; give --url the "
            f"address of vLLM, SGLang or llama.cpp with the miniature, without a path"
        ) from None
    for token, value in pairs:
        # An ID, or a token name of a miniature: t17, token_id:17.
        digits = re.search(r"\d+$", str(token))  # special tokens may be returned as empty text
        if digits is not None and value > _NO_CHANCE:
            found[int(digits[0])] = value
    return found


def _post(url: str, body: dict) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with _DIRECT.open(request, timeout=_SECONDS) as answer:
            data = answer.read()
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")[:_SHOWN]
        raise ExportError(f"{url} returned status {error.code}: {reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ExportError(f"{url} does not respond ({error}); is the server running?") from error
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def by_start(prompts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Group consecutive prompts that differ only in the last token: shared prefix, last tokens."""
    for start, group in itertools.groupby(prompts, lambda prompt: list(prompt[:-1])):
        yield start, [prompt[-1] for prompt in group]


def llama_cpp(
    words: Sequence[str], prompts: Sequence[Sequence[int]], vocabulary: int
) -> torch.Tensor:
    """Return log-probabilities of llama.cpp run with a command line, ``[prompts, vocabulary]``."""
    with serving([*words, *EXACT, "--parallel", "1", "--threads", "1"]) as address:
        return torch.stack([completed(address, prompt, vocabulary) for prompt in prompts])


def mlx(folder: str | Path, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return log-probabilities of mlx-lm for the model in a folder, ``[prompts, vocabulary]``."""
    try:
        import mlx.core as mx
        from mlx_lm.utils import load_model
    except ImportError:
        raise ExportError(
            "mlx-lm is not installed; install it with: pip install mlx-lm, and without an Apple "
            'GPU also "mlx[cpu]"'
        ) from None
    try:
        model, _ = load_model(Path(folder))
        rows = []
        for start, tails in by_start(prompts):
            logits = model(mx.array([[*start, tail] for tail in tails]))[:, -1]
            rows.append(torch.tensor(logits.astype(mx.float32).tolist()).log_softmax(-1))
        return torch.cat(rows)
    except (TypeError, ValueError) as error:  # raised for a base that is not a number
        raise ExportError(
            f"mlx-lm cannot run this folder ({first_line(error)}); write the config.json of "
            f"rope_ext.export(model, 'mlx') into it, if export supports the patch"
        ) from error
