r"""Perplexity at several context lengths, each token scored once.

    python -m eval.perplexity --model checkpoints/tiny-512 --method yarn --factor 8 \
        --lengths 512,1k,2k,4k --stride 256 --text my_documents/

See ``rope_ext.measure.perplexity`` for what exactly is scored.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from eval import options
from rope_ext import OptionError
from rope_ext.measure.longppl import LongPPL
from rope_ext.measure.models import load_model, load_tokenizer
from rope_ext.measure.perplexity import Perplexity
from rope_ext.measure.run import Task, checked_methods, patched


def task(args: argparse.Namespace) -> Perplexity:
    """The task that the options ask for."""
    protocol = args.protocol or ("ending" if args.stride is None else "sliding")
    if protocol == "ending" and args.min_context and not args.longppl:
        raise OptionError("--min-context does not apply to the protocol ending; leave it out")
    return Perplexity.of(
        args.text or (),
        windows=args.windows,
        protocol=protocol,
        stride=args.stride,
        min_context=args.min_context,
    )


def tasks(args: argparse.Namespace) -> list[Task]:
    """Perplexity, and LongPPL after it where it is asked for."""
    made = task(args)
    return [made, longppl(args, made)] if args.longppl else [made]


def longppl(args: argparse.Namespace, like: Perplexity) -> LongPPL:
    """LongPPL on the same texts, with key tokens of ``--evaluator`` or of the first method."""
    given = options.settings(args)
    names = [name for name in given.methods if name != "none"]
    who = args.evaluator or (f"the model with {names[0]}" if names else "the model")

    @contextmanager
    def evaluator() -> Iterator[Any]:
        if len(given.models) > 1 and not args.evaluator:
            raise OptionError("several models need one --evaluator that chooses the key tokens")
        if args.evaluator:
            vocabularies = [load_tokenizer(m).get_vocab() for m in (args.evaluator, *given.models)]
            if any(vocabulary != vocabularies[0] for vocabulary in vocabularies[1:]):
                raise OptionError("the --evaluator must have the tokenizer of the model")
            yield load_model(args.evaluator, given.dtype, given.device, given.attn, as_saved=True)
            return
        model = load_model(given.models[0], given.dtype, given.device, given.attn, given.adapter)
        if not names:
            yield model
            return
        own = _of(names[0], given.options)
        methods = checked_methods(names[:1], given.factor, own, given.adapter, given.force)
        [(name, values)] = methods.items()
        with patched(model, name, values, given.compose, given.trained_length):
            yield model

    return LongPPL(like, evaluator, who, args.short_context)


def _of(name: str, given: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {name: given[name]} if name in given else {}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = options.parser(__doc__, "runs/perplexity")
    options.add_perplexity(parser)
    options.main(parser.parse_args(arguments), tasks)


if __name__ == "__main__":
    main()
