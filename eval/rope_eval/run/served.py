"""Runs cases on an OpenAI-compatible server instead of a model in this process.

Prompts have the same tokens as for a local model: they are sent as token IDs, or as text that the
tokenizer encodes to the same IDs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch

from rope_eval.cases import Case, Result, loss, share_found, tail
from rope_eval.data.prompts import beginning, encode
from rope_eval.options import refuse
from rope_eval.server import KEY, Client, Completion, RequestError, require_url, served_context
from rope_eval.settings import Settings
from rope_eval.systems import System
from rope_ext.command.terminal import tell
from rope_ext.errors import MeasureError, OptionError, first_line
from rope_ext.saving import checkpoints as models

_NOTES = 8  # about each server
_LONGEST_TIMEOUT = 1_000_000  # seconds
_LONGEST_TOKEN = 1000  # characters


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
    for url in urls:
        require_url(url, "an address such as http://HOST:PORT/v1")
    refuse(
        (not count, "--url needs the name of the model on the server; give --served-model-name "
         "NAME"),
        (count not in (1, len(urls)), f"--served-model-name gives {count} names for {len(urls)} "
         f"addresses; give one, or one for every --url, as NAME,NAME"),
        (len(set(settings.servers)) < len(urls), "a server is given twice; give --url each just "
         "once, or other names"),
        (not settings.models, "--url needs the tokenizer of the served model, with which prompts "
         "are made; give --tokenizer a directory or Hub ID"),
        (not 0 < settings.timeout <= _LONGEST_TIMEOUT, f"--timeout must be a number of seconds "
         f"above 0, up to {_LONGEST_TIMEOUT}"),
        (settings.batch_size is not None, "--batch-size is for a model in this process; give "
         "--concurrency"),
    )  # fmt: skip


def served_identity(settings: Settings) -> dict[str, Any]:
    """Return what a server's results depend on besides the case; empty without a server."""
    if settings.url is None:
        return {}
    return {"url": settings.url, "served_as": settings.served_model_name, "api": settings.api}


class Served:
    """Models behind OpenAI-compatible servers, each a system; ``name`` is that of their tokenizer.

    ``api="completions"`` sends token IDs (vLLM, SGLang, llama.cpp), ``"text"`` the prompt as text
    (``transformers serve``).
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer = models.load_tokenizer(name)
        self.servers = {server.label: server for server in settings.servers}

    @contextmanager
    def applied(self, system: System) -> Iterator[None]:
        self.server = self.servers[system.label]
        self.notes: set[str] = set()
        self.unpenalized = True  # whether it takes repetition_penalty
        self.client = Client(self.server.url, self.settings.timeout, self.settings.retries)
        try:
            yield
        finally:
            self.client.close()

    def results(
        self, system: System, batches: Sequence[Sequence[Case]]
    ) -> Iterator[list[tuple[Case, Result]]]:
        """Yield the results of all cases, each as soon as it is available."""
        cases = [case for batch in batches for case in batch]
        failed = []
        self._check_context(cases)
        pool = ThreadPoolExecutor(self.settings.concurrency)
        waiting = {pool.submit(self._result, case): case for case in cases}
        try:
            for done in as_completed(waiting):
                case = waiting[done]
                try:
                    result = done.result()
                except ValueError as error:
                    said = first_line(error)
                    if isinstance(error, RequestError) and error.hopeless:
                        raise MeasureError(
                            f"{self.server.url} does not answer for "
                            f"{self.server.served_model_name!r} ({said}); check --url, "
                            f"--served-model-name and {KEY}; --resume keeps what is finished"
                        ) from error
                    failed.append(f"{case.task} at {case.length} tokens: {said}")
                else:
                    yield [(case, result)]
        finally:
            # After an error or Ctrl-C, nobody waits for requests under way: ``close`` ends them.
            pool.shutdown(wait=False, cancel_futures=True)
        if failed:
            raise MeasureError(
                f"{len(failed)} of {len(waiting)} requests failed; the first: {failed[0]}. The "
                f"others are finished and kept; when the server is well, --resume asks for the rest"
            )

    def _check_context(self, cases: Sequence[Case]) -> None:
        """Raise MeasureError if the server reports a context shorter than a case."""
        try:
            answer = self.client.get("/models")
        except RequestError:
            return  # not all servers provide this list
        most = served_context(answer, self.server.served_model_name)
        longest = max((case.tokens for case in cases), default=0)
        if most is not None and most < longest:
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
        text = self._completion(ids, count).text()
        prompt = self.tokenizer.decode(list(ids), skip_special_tokens=True).strip()
        if prompt and prompt in text:
            raise RequestError("the answer repeats the prompt")
        most = 2 * count + 16  # text may be encoded to more tokens than were generated
        if len(text) > most * _LONGEST_TOKEN:  # do not tokenize megabytes
            raise RequestError(f"{len(text)} characters are too many for an answer of {count}")
        tokens = len(encode(self.tokenizer, text))
        if tokens > most:
            raise RequestError(f"{tokens} tokens are too many for an answer of {count}")
        return text

    def _completion(self, ids: Sequence[int], count: int, **body: Any) -> Completion:
        """Return a completion that is consistent with the request."""
        name = self.server.served_model_name
        body |= {"model": name, "prompt": self._prompt(ids), "temperature": 0, "max_tokens": count}
        found = Completion.from_json(self._posted(body))
        if found.model not in (None, name):
            self._note(f"answers as {found.model!r}, not as {name!r}")
        read = len(ids) if found.read is None else found.read
        if read < len(ids) or (found.written or 0) > count:
            raise RequestError(
                f"it says that it read {read} of {len(ids)} and wrote {found.written} of {count} "
                f"tokens"
            )
        if read > len(ids):  # such as a beginning-of-sequence token
            self._note(
                f"counts {read - len(ids)} more tokens than each prompt has, such as a "
                f"beginning-of-sequence token"
            )
        return found

    def _posted(self, body: Mapping[str, Any]) -> Any:
        """Post a request for greedy decoding; servers take penalties from the model otherwise."""
        body = {**body, "presence_penalty": 0, "frequency_penalty": 0}
        if not self.unpenalized:
            return self.client.post("/completions", body)
        try:
            return self.client.post("/completions", {**body, "repetition_penalty": 1.0})
        except RequestError as error:
            if error.status not in (400, 422):
                raise
            found = self.client.post("/completions", body)
            self.unpenalized = False  # OpenAI has no such field
            self._note("takes no repetition_penalty, so that of its model holds, if it has one")
            return found

    def _note(self, what: str) -> None:
        """Tell once what is unusual about the server's answers."""
        if what not in self.notes and len(self.notes) < _NOTES:
            self.notes.add(what)
            tell(f"note: {self.server.url} {what}", "yellow")

    def _losses(self, case: Case) -> torch.Tensor:
        """Return negative log likelihoods of all tokens except the first, float64, nats."""
        # One new token, since servers refuse none.
        found = self._completion(case.ids, 1, echo=True, logprobs=1)
        length = len(case.ids)
        added = 0 if found.read is None else found.read - length
        values = found.prompt_log_probs(length, added)
        return -torch.tensor(values, dtype=torch.float64, device="cpu")

    def _prompt(self, ids: Sequence[int]) -> Any:
        """Return token IDs, or text that the server's tokenizer encodes to these IDs."""
        ids = list(ids)
        start = len(beginning(self.tokenizer))  # the server adds these tokens
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
