"""Options shared by all evaluations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rope_eval.data.prompts import Chat
from rope_eval.options import option
from rope_ext.command.arguments import (
    method_names,
    parse_compose,
    parse_length,
    parse_lengths,
    split,
)
from rope_ext.errors import OptionError

Api = Literal["completions", "text"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BEFORE = "before"
"""Instead of a method: the adapter's method, without the adapter's weights."""
LARGEST_SEED = 2**32 - 1  # NumPy's


def batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    if not re.fullmatch("[0-9]{1,15}", text):
        raise OptionError(f"--batch-size {text!r} is not valid; give auto or a number of rows")
    return int(text)


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(split(texts))


class Server(NamedTuple):
    """A deployment to measure: its name in the report, its address, and its name of the model."""

    label: str
    url: str
    served_model_name: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of every evaluation; ``rope-ext eval`` has an option for each field, with its help.

    The unpatched model is always measured, too, and the trained length if some lengths are longer.
    With ``url``, ``models`` contains the tokenizer and ``methods`` is ``("unpatched",)``.
    """

    models: tuple[str, ...]
    methods: tuple[str, ...] = option(
        MISSING,
        "method names, separated by commas; repeatable. 'unpatched' is the model alone, 'adapter' "
        "the patch that the adapter was trained with, 'before' that patch without the adapter",
        _names,
        *("--method", "--methods"),
        repeat=True,
    )
    lengths: tuple[int, ...] = option(
        MISSING,
        "context lengths, such as 512,4k,8k",
        parse_lengths,
        *("--lengths", "--length"),
        repeat=True,
    )
    factor: float = option(4.0, "extension factor: target length / trained length")
    adapter: str | None = option(None, "PEFT adapter to use with every method")
    options: Mapping[str, Mapping[str, Any]] = option(
        {},
        "METHOD.NAME=VALUE, NAME=VALUE for a single method, or METHOD=FILE.json; repeatable",
        list,
        "--option",
        repeat=True,
    )
    trained_length: int | None = option(
        None, "override the trained length in the config", parse_length
    )
    compose: bool | Literal["raise"] = option(
        False,
        "with existing RoPE scaling: apply on top of it (stack, or no value), or raise its factor",
        parse_compose,
    )
    dtype: Dtype = option(  # noqa: RUF009
        "auto", "auto (float32 on CPU), float32, bfloat16 or float16"
    )
    attn: str | None = option(
        None, "attention implementation, such as sdpa, eager, flash_attention_2"
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:1 or mps")
    seed: int = option(0, "random seed", least=0)
    batch_size: int | None = option(None, "rows per forward, or auto; default: auto", batch_size)
    chat: Chat = option("auto", "use the chat template")  # noqa: RUF009
    force: bool = option(
        False, "also measure lengths beyond a method's target, or an adapter with another method"
    )
    output: Path = option(Path("runs/eval"), "directory for the results", Path)  # noqa: RUF009
    resume: bool = option(False, "resume the run in --output")
    overwrite: bool = option(False, "delete the results in --output")
    finetune: bool = option(False, "print the training command as the next step")
    url: str | tuple[str, ...] | None = option(
        None,
        "instead of a model and methods, the address of an OpenAI-compatible server, such as "
        "http://HOST:PORT/v1; repeat it to compare deployments on the same prompts",
        _names,
        repeat=True,
    )
    served_model_name: str | tuple[str, ...] | None = option(
        None,
        "model name on the server; one for every --url, separated by commas",
        _names,
        *("--served-model-name", "--served-as"),
        repeat=True,
    )
    tokenizer: str | None = option(None, "directory or Hub ID of the tokenizer of the served model")
    api: Api = option(  # noqa: RUF009
        "completions",
        "completions sends token IDs; text sends text, for servers that accept no IDs",
    )
    concurrency: int = option(4, "number of concurrent requests")
    retries: int = option(8, "retries of a failed request, with increasing delays", least=0)
    timeout: float = option(1800.0, "timeout of a request in seconds, with its retries")

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(method_names(self.methods)))

    @property
    def servers(self) -> list[Server]:
        """The servers to measure; none if a model is measured in this process."""
        urls = _several(self.url)
        names = _several(self.served_model_name)
        names = names * len(urls) if len(names) == 1 else names
        found = []
        for url, name in zip(urls, names, strict=False):  # require_server checks that counts match
            label = name if names.count(name) == 1 else f"{name} at {url}"
            found.append(Server(label, url, name))
        return found

    def to_json(self) -> dict[str, Any]:
        """The settings that determine the results, as plain data."""
        # What no result depends on.
        left = {"output", "resume", "overwrite", "force", "finetune"}
        left |= {"concurrency", "retries", "timeout"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left}


def _several(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else given or ()


def require_seed(seed: int) -> None:
    """Raise OptionError for a seed that not all random generators accept."""
    if type(seed) is not int or not 0 <= seed <= LARGEST_SEED:
        raise OptionError(
            f"seed={seed!r} is not valid; it must be a whole number from 0 to {LARGEST_SEED}"
        )
