"""Runs cases on an OpenAI-compatible server instead of a model in this process.

Prompts have the same tokens as for a local model: they are sent as token IDs, or as text that the
tokenizer encodes to the same IDs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import torch

from rope_eval.cases import Case, Result, loss, share_found, tail
from rope_eval.data.prompts import beginning, encode
from rope_eval.options import refuse
from rope_eval.settings import Settings
from rope_eval.systems import System
from rope_ext.command.terminal import tell
from rope_ext.errors import MeasureError, OptionError, first_line, optional
from rope_ext.saving import checkpoints as models

KEY = "OPENAI_API_KEY"
"""Environment variable with the server's API key, if it requires one."""
_ROUNDING = 1e-3  # of a log-probability of 0 in 16 bits


def require_server(settings: Settings) -> None:
    """Raise an error unless the options of a server are complete, or none is given."""
    if settings.url is None:
        for name in ("served_model_name", "tokenizer"):
            if getattr(settings, name) is not None:
                flag = name.replace("_", "-")
                raise OptionError(f"--{flag} is for a server; give --url its address")
        return
    urls = [settings.url] if isinstance(settings.url, str) else settings.url
    names = settings.served_model_name or ()
    count = 1 if isinstance(names, str) else len(names)
    addresses = [urlsplit(url) for url in urls]
    hosts = [a.hostname if a.scheme in ("http", "https") else None for a in addresses]
    wrong = next((url for url, host in zip(urls, hosts, strict=True) if not host), None)
    secret = any(address.username or address.password for address in addresses)
    refuse(
        (wrong is not None, f"--url {wrong!r} is not valid; give an address such as "
         f"http://HOST:PORT/v1"),
        (secret, f"--url holds a password, which reports would show; set it as {KEY} in the "
         f"environment"),
        (not count, "--url needs the name of the model on the server; give --served-model-name "
         "NAME"),
        (count not in (1, len(urls)), f"--served-model-name gives {count} names for {len(urls)} "
         f"addresses; give one, or one for every --url, as NAME,NAME"),
        (len(set(settings.servers)) < len(urls), "a server is given twice; give --url each just "
         "once, or other names"),
        (not settings.models, "--url needs the tokenizer of the served model, with which prompts "
         "are made; give --tokenizer a directory or Hub ID"),
        (not settings.timeout > 0, "--timeout must be a number of seconds above 0"),
        (settings.batch_size is not None, "--batch-size is for a model in this process; give "
         "--concurrency"),
    )  # fmt: skip
    _openai()


def served_identity(settings: Settings) -> dict[str, Any]:
    """Return what a server's results depend on besides the case; empty without a server."""
    if settings.url is None:
        return {}
    return {"url": settings.url, "served_as": settings.served_model_name, "api": settings.api}


class UnusableAnswer(Exception):
    """A response with status 200 that is empty or inconsistent."""


class Served:
    """Models behind OpenAI-compatible servers, each a system; ``name`` is that of their tokenizer.

    ``api="completions"`` sends token IDs (vLLM, SGLang, llama.cpp), ``"text"`` the prompt as text
    (``transformers serve``).
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.settings, self.openai = settings, _openai()
        self.tokenizer = models.load_tokenizer(name)
        self.servers = {server.label: server for server in settings.servers}

    @contextmanager
    def applied(self, system: System) -> Iterator[None]:
        self.server = self.servers[system.label]
        self.others: set[str] = set()
        with self.openai.OpenAI(
            base_url=self.server.url,
            api_key=os.environ.get(KEY) or "none",
            max_retries=self.settings.retries,
            timeout=self.settings.timeout,
        ) as self.client:
            yield

    def results(
        self, system: System, batches: Sequence[Sequence[Case]]
    ) -> Iterator[list[tuple[Case, Result]]]:
        """Yield the results of all cases, each as soon as it is available."""
        cases, failed = [case for batch in batches for case in batch], []
        self._check_context(cases)
        pool = ThreadPoolExecutor(self.settings.concurrency)
        waiting = {pool.submit(self._result, case): case for case in cases}
        api = self.openai
        # With these, every other request would fail, too.
        final = (api.APIConnectionError, api.AuthenticationError, api.PermissionDeniedError)
        final = (*final, api.NotFoundError)
        try:
            for done in as_completed(waiting):
                case = waiting[done]
                try:
                    result = done.result()
                except (api.OpenAIError, UnusableAnswer, ValueError) as error:
                    said = first_line(error)[:300]
                    if isinstance(error, final) and not isinstance(error, api.APITimeoutError):
                        raise MeasureError(
                            f"{self.server.url} does not answer for "
                            f"{self.server.served_model_name!r} ({said}); check --url, "
                            f"--served-model-name and {KEY}; --resume keeps what is finished"
                        ) from error
                    failed.append(f"{case.task} at {case.length} tokens: {said}")
                else:
                    yield [(case, result)]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if failed:
            raise MeasureError(
                f"{len(failed)} of {len(waiting)} requests failed; the first: {failed[0]}. The "
                f"others are finished and kept; when the server is well, --resume asks for the rest"
            )

    def _check_context(self, cases: Sequence[Case]) -> None:
        """Raise MeasureError if the server reports a context shorter than a case."""
        try:
            listed = self.client.with_options(max_retries=0).models.list().data
        except (self.openai.OpenAIError, AttributeError, ValueError):
            return  # not all servers provide this list
        longest = max((case.tokens for case in cases), default=0)
        for model in listed or ():
            most = getattr(model, "max_model_len", None)  # vLLM and SGLang
            if model.id == self.server.served_model_name and type(most) is int and most < longest:
                raise MeasureError(
                    f"{self.server.url} takes {most} tokens, and a prompt has {longest} with its "
                    f"answer; start the server with a longer context, or give shorter --lengths"
                )

    def _result(self, case: Case) -> Result:
        if case.mode == "loss":
            return loss(case, self._losses(case)[-tail(case) :])
        if case.mode == "write":
            text = self._written(case.ids, case.count)
            return Result(share_found(case, text), len(encode(self.tokenizer, text)), text)
        # Greedy decoding writes the answer exactly if each of its tokens is the argmax.
        text = self._written(case.ids[: -case.count], case.count)
        wanted = self.tokenizer.decode(case.ids[-case.count :], skip_special_tokens=True)
        return Result(float(text.strip() == wanted.strip()), case.count, text)

    def _written(self, ids: Sequence[int], count: int) -> str:
        """Return the greedily decoded text after these tokens, up to ``count`` tokens."""
        text = self._choice(ids, count).get("text")
        if not isinstance(text, str):
            raise UnusableAnswer("the answer has no text")
        prompt = self.tokenizer.decode(list(ids), skip_special_tokens=True).strip()
        if prompt and prompt in text:
            raise UnusableAnswer("the answer repeats the prompt")
        tokens = len(encode(self.tokenizer, text))
        if tokens > 2 * count + 16:  # text may be encoded to more tokens than were generated
            raise UnusableAnswer(f"{tokens} tokens are too many for an answer of {count}")
        return text

    def _choice(self, ids: Sequence[int], count: int, **body: Any) -> dict[str, Any]:
        """Return the first choice of a response that is consistent with the request."""
        name = self.server.served_model_name
        body |= {"model": name, "prompt": self._prompt(ids), "temperature": 0, "max_tokens": count}
        answer: Any = self.client.post("/completions", cast_to=object, body=body)
        try:
            choice, usage = dict(answer["choices"][0]), dict(answer.get("usage") or {})
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise UnusableAnswer(f"the answer has no choices: {str(answer)[:200]}") from None
        other = answer.get("model") or name
        if other != name and other not in self.others:
            self.others.add(other)
            tell(f"note: {self.server.url} answers as {other!r}, not as {name!r}", "yellow")
        read, written = (usage.get(f"{kind}_tokens") for kind in ("prompt", "completion"))
        if (read or len(ids)) != len(ids) or (written or 0) > count:
            raise UnusableAnswer(
                f"it says that it read {read} of {len(ids)} and wrote {written} of {count} tokens"
            )
        return choice

    def _losses(self, case: Case) -> torch.Tensor:
        """Return negative log likelihoods of all tokens except the first, float64, nats."""
        logprobs = self._choice(case.ids, 1, echo=True, logprobs=1).get("logprobs")
        given = (logprobs or {}).get("token_logprobs") or []
        found = given[1 : len(case.ids)]
        if len(found) < len(case.ids) - 1 or any(value is None for value in found):
            raise MeasureError(
                f"{self.server.url} does not return the log-probabilities of a prompt (echo=True, "
                f"logprobs=1), which {case.task} needs; leave it out for this server"
            )
        usable = all(type(value) in (int, float) and value <= _ROUNDING for value in found)
        if not usable or len(given) > len(case.ids) + 1:  # and that of the token which it writes
            raise UnusableAnswer("its log-probabilities are not those of the prompt")
        return -torch.tensor(found, dtype=torch.float64, device="cpu")

    def _prompt(self, ids: Sequence[int]) -> Any:
        """Return token IDs, or text that the server's tokenizer encodes to these IDs."""
        ids, start = list(ids), len(beginning(self.tokenizer))  # the server adds it
        if self.settings.api == "completions":
            return ids
        how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        for part in (ids[start:], ids):
            text = self.tokenizer.decode(part, **how)
            if self.tokenizer(text, verbose=False)["input_ids"] == ids:
                return text
        raise MeasureError(
            f"a prompt of {len(ids)} tokens would become others as text; give --api completions"
        )


def _openai() -> Any:
    return optional("openai", "--url needs", "rope-ext[server]")
