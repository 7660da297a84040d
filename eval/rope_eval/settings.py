"""The options that all evaluations share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rope_eval.data.prompts import Chat
from rope_eval.options import option
from rope_ext.command.arguments import (
    parse_compose,
    parse_length,
    parse_lengths,
    parse_options,
    split,
)
from rope_ext.errors import OptionError

Api = Literal["completions", "text", "chat"]
UNPATCHED = "none"
"""In place of a method: the model as it is, which every evaluation measures, too."""
BEFORE = "before"
"""In place of a method: the one under which the adapter was trained, without its weights."""
LARGEST_SEED = 2**32 - 1  # NumPy's
MEASURED, RUN, ASKED = "models and methods", "execution", "evaluation"
SERVED = "server (instead of --model and --method)"
"""Groups of options in ``rope-ext eval --help``."""


def batch_size(text: str) -> int | None:
    """``auto`` as None.

    Raises:
        OptionError: it is neither that nor a number.
    """
    if text == "auto":
        return None
    if not re.fullmatch("[0-9]{1,15}", text):
        raise OptionError(f"--batch-size {text!r} is not valid; give auto or a number of rows")
    return int(text)


def trained_length(text: str | None) -> int | None:
    """``--trained-length`` in tokens, if it is given.

    Raises:
        OptionError: it is not a whole number.
    """
    return None if text is None else parse_length(text, "--trained-length")


def _models(texts: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(texts or ())


def _names(texts: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(split(texts or ()))


def _one_or_several(texts: Sequence[str] | None) -> str | tuple[str, ...] | None:
    found = tuple(split(texts or ()))
    return found[0] if len(found) == 1 else found or None


def _several(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else given or ()


@dataclass(frozen=True)
class Server:
    """A deployment to measure.

    Args:
        label: its name in the report.
        url: its address.
        served_model_name: name under which it has the model.
    """

    label: str
    url: str
    served_model_name: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of every evaluation; ``rope-ext eval`` has an option for each field.

    Args:
        models: directories or Hub IDs.
        methods: method names; ``adapter`` is the patch that the adapter was trained with, and
            ``before`` that patch without the adapter's weights. The unpatched model is always
            measured, too.
        lengths: context lengths, tokens. The trained length is added if some are longer.
        factor: extension factor of every method except ``adapter``.
        options: further options, by method.
        adapter: directory or Hub ID of a PEFT adapter, used with every method except ``before``.
        seed: random seed.
        dtype: ``auto`` or one of ``DTYPES``; see ``load_model``.
        attn: attention implementation of transformers; None leaves the choice to transformers.
        device: a torch device or ``auto``.
        batch_size: rows per forward; None fits them into ``automatic_tokens``, and halves a batch
            that does not fit into memory.
        chat: whether prompts use the chat template.
        trained_length: trained context, tokens; None reads it from the config.
        compose: as in :func:`rope_ext.patch`.
        force: also measure lengths beyond the target length of a method, and an adapter with a
            different patch than it was trained with.
        output: directory for the results.
        url: address of an OpenAI-compatible server to measure instead of a model, or several to
            compare. ``models`` then contains the tokenizer, and ``methods`` is ``("none",)``.
        served_model_name: name of the model on the server; one for each of several.
        tokenizer: directory or Hub ID of its tokenizer.
        api: how prompts are sent; see ``Served``.
        concurrency: requests at a time.
        retries: number of retries if the server cannot be reached, is busy or fails.
        timeout: seconds until a request counts as failed.
        resume: use the results in ``output`` and complete them.
        overwrite: delete the results in ``output``.
        finetune: the next command is that of training.
    """

    models: tuple[str, ...] = option(
        MISSING,
        "model directory, Hub ID or .gguf file (or a directory and --gguf-file FILE); repeat for "
        "several",
        _models,
        "--model",
        group=MEASURED,
        action="append",
    )
    adapter: str | None = option(None, "PEFT adapter to use with every method", group=MEASURED)
    methods: tuple[str, ...] = option(
        MISSING,
        "method names, separated by commas; repeatable. 'none' is the unpatched model, 'adapter' "
        "the patch that the adapter was trained with, 'before' that patch without the adapter",
        _names,
        "--method",
        group=MEASURED,
        also="--methods",
        action="append",
    )
    factor: float = option(
        4.0,
        "extension factor: target length / trained length; default: 4",
        group=MEASURED,
        type=float,
    )
    trained_length: int | None = option(
        None, "override the trained length in the config", trained_length, group=MEASURED
    )
    compose: bool | Literal["raise"] = option(
        False,
        "with existing RoPE scaling: apply on top of it (stack, or no value), or raise its factor",
        parse_compose,
        group=MEASURED,
        nargs="?",
        const=True,
        metavar="stack|raise",
    )
    dtype: str = option("auto", "auto (float32 on CPU), float32, bfloat16 or float16", group=RUN)
    attn: str | None = option(
        None, "attention implementation, such as sdpa, eager, flash_attention_2", group=RUN
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps ...", group=RUN)
    seed: int = option(0, "random seed", group=RUN, type=int)
    output: Path = option(  # noqa: RUF009
        Path("runs/eval"), "directory for the results", group=RUN, type=Path
    )
    lengths: tuple[int, ...] = option(
        MISSING,
        "context lengths, such as 512,4k,8k",
        parse_lengths,
        group=ASKED,
        also="--length",
        action="append",
        required=True,
    )
    options: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict,
        metadata=option(
            None,
            "METHOD.NAME=VALUE, NAME=VALUE for a single method, or METHOD=FILE.json",
            parse_options,
            "--option",
            group=MEASURED,
            action="append",
        ).metadata,
    )
    batch_size: int | None = option(
        None, "rows per forward, or auto", batch_size, group=RUN, typed="auto"
    )
    chat: Chat = option(  # noqa: RUF009
        "auto", "use the chat template", group=ASKED, choices=("auto", "yes", "no")
    )
    force: bool = option(
        False,
        "also measure lengths beyond a method's target, or an adapter with another method",
        group=ASKED,
    )
    url: str | tuple[str, ...] | None = option(
        None,
        "address of an OpenAI-compatible server, such as http://HOST:PORT/v1; repeat it to compare "
        "deployments on the same prompts",
        _one_or_several,
        group=SERVED,
        action="append",
    )
    served_model_name: str | tuple[str, ...] | None = option(
        None,
        "name under which it serves the model; one for every --url, separated by commas",
        _one_or_several,
        group=SERVED,
        also="--served-as",
        action="append",
    )
    tokenizer: str | None = option(
        None, "directory or Hub ID of the tokenizer of the served model", group=SERVED
    )
    api: Api = option(  # noqa: RUF009
        "completions",
        "completions sends token IDs; text sends the prompt as text, for servers that accept no "
        "IDs; chat sends messages, for servers without completions",
        group=SERVED,
        choices=("completions", "text", "chat"),
    )
    concurrency: int = option(4, "number of concurrent requests", group=SERVED, type=int)
    retries: int = option(
        8, "retries of a failed request, with increasing delays", group=SERVED, type=int
    )
    timeout: float = option(1800.0, "timeout of a request in seconds", group=SERVED, type=float)
    resume: bool = option(False, "resume the run in --output", group=ASKED)
    overwrite: bool = option(False, "delete the results in --output", group=ASKED)
    finetune: bool = option(
        False, "go on with training: print its command as the next one", group=ASKED
    )

    @property
    def servers(self) -> list[Server]:
        """The servers that are measured; none where a model is."""
        urls, names = _several(self.url), _several(self.served_model_name)
        names = names * len(urls) if len(names) == 1 else names
        found = []
        for url, name in zip(urls, names, strict=False):  # require_server checks their numbers
            label = name if names.count(name) == 1 else f"{name} at {url}"
            found.append(Server(label, url, name))
        return found

    def to_json(self) -> dict[str, Any]:
        """The settings that determine the results, as plain data."""
        names = set(self.__dataclass_fields__) - {
            "output",
            "resume",
            "overwrite",
            "force",
            "finetune",
        }
        names -= {"concurrency", "retries", "timeout"}
        return {name: getattr(self, name) for name in sorted(names)}


def require_seed(seed: int) -> None:
    """Raise OptionError for a seed that not all random generators accept."""
    if type(seed) is not int or not 0 <= seed <= LARGEST_SEED:
        raise OptionError(
            f"seed={seed!r} is not valid; it must be a whole number from 0 to {LARGEST_SEED}"
        )
