"""Runs small models in real engines and returns their log-probabilities."""

import http.client
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

import torch

from rope_ext.engines import llama_server
from rope_ext.errors import ExportError, first_line

_EXACT = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
_EXACT += ("--parallel", "1", "--threads", "1")
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
    command = [sys.executable, "-c", _RUN, llama_server.__file__, *words, *_EXACT]
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
                lines = [line for line in log if line.strip()]
                if "No module named 'xllamacpp'" in lines[-1]:
                    raise ExportError(
                        "llama.cpp needs the package xllamacpp, which is not installed; install it "
                        'with: pip install "rope-ext[engines]"'
                    )
                said = " / ".join(line.rstrip("\n") for line in lines[-3:])
                raise ExportError(f"llama.cpp's server did not start: {said}")
            yield address.split()[1]
        finally:
            try:
                process.communicate(timeout=_SECONDS)  # closing stdin stops it
            finally:
                process.kill()


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
    url, found = f"{address.rstrip('/')}/v1/completions", torch.full((vocabulary,), torch.nan)
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with _DIRECT.open(request, timeout=_SECONDS) as answer:
            text = answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")[:_SHOWN]
        raise ExportError(f"{url} returned status {error.code}: {reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ExportError(f"{url} does not respond ({error}); is the server running?") from error
    try:
        given = json.loads(text)["choices"][0]["logprobs"]
        if "content" in given:
            entries = given["content"][0]["top_logprobs"]
            pairs = [(entry.get("id", entry["token"]), entry["logprob"]) for entry in entries]
        else:
            pairs = list(given["top_logprobs"][0].items())
    except (ValueError, KeyError, IndexError, TypeError):
        raise ExportError(
            f"{address} returned no log-probabilities: {text[:_SHOWN]}; give --url the address of "
            f"vLLM, SGLang or llama.cpp with the miniature, without a path"
        ) from None
    for token, value in pairs:
        # An ID, or a token name of a miniature: t17, token_id:17.
        digits = re.search(r"\d+$", str(token))  # special tokens may be returned as empty text
        if digits is not None and value > _NO_CHANCE:
            found[int(digits[0])] = value
    return found


def llama_cpp(
    words: Sequence[str], prompts: Sequence[Sequence[int]], vocabulary: int
) -> torch.Tensor:
    """Return log-probabilities of llama.cpp run with a command line, ``[prompts, vocabulary]``."""
    with serving(words) as address:
        return torch.stack([completed(address, prompt, vocabulary) for prompt in prompts])


def mlx(folder: str | Path, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return log-probabilities of mlx-lm for the model in a folder, ``[prompts, vocabulary]``.

    Each prompt begins the last one.
    """
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
        logits = model(mx.array([prompts[-1]]))[0, mx.array([len(p) - 1 for p in prompts])]
        return torch.tensor(logits.astype(mx.float32).tolist()).log_softmax(-1)
    except (TypeError, ValueError) as error:  # raised for a base that is not a number
        raise ExportError(
            f"mlx-lm cannot run this folder ({first_line(error)}); write the config.json of "
            f"rope_ext.export(model, 'mlx') into it, if export supports the patch"
        ) from error
