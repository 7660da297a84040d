"""The models: one small decoder with RoPE or with another encoding.

Everything else is equal: a StableLM, because it supports partial rotation, with the same initial
weights for the same seed. Parameters of an encoding are initialized afterwards.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import StableLmConfig, StableLmForCausalLM

import rope_ext
from lab.laboratory.linear import LINEAR, register
from lab.laboratory.scratch.base import attach
from lab.laboratory.scratch.names import SCRATCH
from rope_ext.config.writing import quieted
from rope_ext.errors import OptionError, nearest
from rope_ext.methods import Method, all_encodings, build_method

ROPE = "rope"
QUARTER = "rope_25"
SHARES = {ROPE: 1.0, QUARTER: 0.25}
"""Models with RoPE, by name: the share of each head's columns that rotates."""
ASKED = (*LINEAR, *SCRATCH)
"""Models that are trained only if selected; the model's own RoPE is disabled."""
VOCABULARY = 260
_BASE = 10000.0
_FACTOR = 16.0  # for encodings that cannot be built without one
_SAME = 1 + 1e-6  # nearly the trained base, because ABF refuses to change nothing

Reading = Callable[[float], Method | None]
"""How to patch a trained model to evaluate it at ``factor`` times its length; None: unpatched."""

_TEST_TIME: dict[str, Reading] = {
    "yarn": lambda factor: rope_ext.YaRN(factor=factor),
    "log_n": lambda factor: rope_ext.ABF(
        factor=factor, base=_BASE * _SAME, temperature=rope_ext.LogN()
    ),
    "rerope": lambda factor: rope_ext.ReRoPE(factor=factor),
}


@dataclass(frozen=True)
class Size:
    """The size of the decoder."""

    width: int = 128
    layers: int = 2
    heads: int = 4

    def build(self, name: str, seed: int, length: int) -> StableLmForCausalLM:
        """Build the model ``name`` with new weights and a trained length of ``length`` tokens.

        Raises:
            RopeExtError: it does not support the encoding.
        """
        torch.manual_seed(seed)
        model = StableLmForCausalLM(
            StableLmConfig(
                vocab_size=VOCABULARY,
                hidden_size=self.width,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.heads,
                intermediate_size=self.width * 11 // 4,
                max_position_embeddings=length,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": _BASE,
                    # Whole for a patch, which replaces it; none for what computes positions itself.
                    "partial_rotary_factor": SHARES.get(name, float(name not in ASKED)),
                },
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        if name in LINEAR:
            register()
            model.set_attn_implementation(name)
        elif name in SCRATCH:
            torch.manual_seed(seed)
            attach(model, SCRATCH[name])
        elif name not in SHARES:
            torch.manual_seed(seed)
            # The warning that plain transformers cannot load it: it is never saved.
            with quieted(logging.getLogger("rope_ext")):
                rope_ext.patch(model, _encoding(name))
        return model


def known() -> list[str]:
    """Names of all models: with RoPE, with each registered encoding, and :data:`ASKED`."""
    return [*SHARES, *(cls.name for cls in all_encodings()), *ASKED]


def chosen(names: Sequence[str] | None) -> list[str]:
    """The selected names from :func:`known`, plus RoPE for comparison.

    Without a selection, all except :data:`ASKED`.

    Raises:
        OptionError: there is no such model.
    """
    for name in names or ():
        if name not in known():
            raise OptionError(
                f"--encodings {name!r} is unknown{nearest(name, known()) or '.'} "
                f"Encodings: {', '.join(known())}"
            )
    default = [name for name in known() if name not in ASKED]
    return list(dict.fromkeys((ROPE, *names))) if names else default


def readings(name: str) -> Mapping[str, Reading]:
    """Ways to evaluate a trained model: as is, and with methods applied after training."""
    ways: dict[str, Reading] = {name: lambda factor: None}
    if name in SHARES:
        ways |= {f"{name}+{way}": make for way, make in _TEST_TIME.items()}
    if name == "nope":
        ways["nope+log_n"] = lambda factor: rope_ext.NoPE(temperature=rope_ext.LogN())
    return ways


@contextmanager
def read_with(model: torch.nn.Module, make: Reading, factor: float) -> Iterator[None]:
    """The model patched with ``make``; unpatched within its trained length."""
    method = make(factor) if factor > 1 else None
    if method is None:
        yield
        return
    with rope_ext.patched(model, method, replace=True):
        yield


@functools.cache
def _encoding(name: str) -> Method:
    """The encoding with its defaults."""
    try:
        return build_method(name)
    except OptionError:
        return build_method(name, factor=_FACTOR)
