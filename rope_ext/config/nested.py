"""Finds the configurations within a model's configuration."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig


def text_of(config: Any) -> Any:
    """Return the text model's configuration: ``config`` itself, or one within it.

    Of an encoder-decoder, it is the decoder's.
    """
    if not hasattr(config, "get_text_config"):
        return config
    found = config.get_text_config(decoder=True)
    # transformers copies a flat configuration of an encoder-decoder: what is written there is lost.
    within = any(found is part for part in vars(config).values())
    return config if type(found) is type(config) and not within else found


def configurations(config: Any) -> Iterator[Any]:
    """Yield ``config`` and every configuration within it, each once."""
    seen: set[int] = set()
    waiting = [config]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            waiting += [part for part in vars(one).values() if isinstance(part, PreTrainedConfig)]
            yield one
