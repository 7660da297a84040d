"""Says what an engine really computes, by running a miniature of the model in it.

The miniature has the head size, the kinds of layers, the base and the scaling of the model, and
random weights of a few MB. What the engine makes of it is compared with what transformers makes of
it as patched, and in the ways in which engines are known to err.
"""

from __future__ import annotations

import copy
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rope_ext.engines import gguf_file, llama_cpp, running
from rope_ext.engines.base import (
    ARCHITECTURES,
    Refusal,
    Scaling,
    export,
    refuse_unproven,
)
from rope_ext.errors import ExportError
from rope_ext.methods import Rope
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import Patch, current_patch, patch
from rope_ext.record import FIELD, record_of
from rope_ext.rotary.sites import find_sites, text_decoder

VERDICTS = (
    "as patched",
    "unextended",
    "temperature missing",
    "wrong base",
    "short table",
    "other",
)
ENGINES = ("llama.cpp", "mlx", "transformers")
"""Those that run in process."""
TOLERANCE = 2e-3
"""Of log-probabilities, in float32."""
SERVED = 0.05
"""The same of servers, which compute in half precision."""
LENGTH = 2048
"""Tokens of the longest prompt, if the model reaches that far."""
_BASES = (1e4, 5e5, 1e6)  # defaults of engines and families
_VOCABULARY = 128
_TOP = 20  # log-probabilities that servers give
_PEAK = 3.0  # standard deviation of attention logits: every distance counts, noise does not

Run = Callable[[Sequence[Sequence[int]]], torch.Tensor]
"""Prompts to log-probabilities of the next token, ``[prompts, vocabulary]``; NaN: not told."""


@dataclass(frozen=True)
class Verification:
    """What an engine computes; ``print`` it.

    Args:
        engine: its name, or its address.
        verdict: one of ``VERDICTS``.
        detail: more of it, in words.
        differences: largest difference of the engine's log-probabilities from those of the
            miniature as patched, and in other ways, by what they are.
        lengths: tokens of the prompts.
        tolerance: up to which a difference is none.
        notes: what could not be told.
    """

    engine: str
    verdict: str
    detail: str
    differences: Mapping[str, float]
    lengths: tuple[int, ...]
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the engine computes the patch."""
        return self.verdict == VERDICTS[0]

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self) | {"passed": self.passed}, indent=2) + "\n"

    def __str__(self) -> str:
        right, *wrong = self.differences.items()
        nearest = min(wrong, key=lambda pair: pair[1])
        numbers = [f"{value:.2g} from {name!r}" for name, value in (right, nearest)]
        detail = f" ({self.detail})" if self.detail else ""
        lengths = ", ".join(map(str, self.lengths))
        return (
            f"{self.engine}: {self.verdict}{detail}; log-probabilities after {lengths} tokens "
            f"differ by {', '.join(numbers)} (tolerance {self.tolerance:g})"
        )


@dataclass(frozen=True)
class Miniature:
    """A small model with the rotary embedding of a large one.

    Args:
        model: patched, or scaled by its configuration.
        plain: the same weights, unscaled.
        scaling: what the first does to the second.
        short: what frequencies are divided by within the trained context, by a method that has
            two tables.
    """

    model: nn.Module
    plain: nn.Module
    scaling: Scaling
    short: Sequence[float] | None = None

    @classmethod
    def of(cls, config: Any, method: str | None = None, **options: Any) -> Miniature:
        """A miniature of the model with this configuration.

        Args:
            config: of transformers; its weights are not read.
            method: patched by it; None: as the configuration says, which may hold a patch.
            **options: of :func:`rope_ext.patch`.

        Raises:
            RopeExtError: the family was not checked, or nothing is scaled.
        """
        text = copy.deepcopy(config.get_text_config(decoder=True))
        if text.model_type not in ARCHITECTURES:
            raise ExportError(
                f"no miniature of {text.model_type!r} can be made; those of "
                f"{', '.join(ARCHITECTURES)} can"
            )
        record = record_of(text)
        if record is not None and not record.native:
            record.restore(text)
        model = _small(text)
        if method is not None:
            patch(model, method, **options)
        elif record is not None and not record.native:
            patch(model, record.method, **record.arguments)
        state = current_patch(model)
        try:
            scaling = Scaling.configured(model) if state is None else _fixed(state)
        except Refusal as refusal:
            raise ExportError(f"nothing to verify: {refusal}") from None
        base, length = scaling.rope.base, scaling.rope.length
        unscaled = copy.deepcopy(text)
        if hasattr(unscaled, FIELD):
            delattr(unscaled, FIELD)
        unscaled.rope_parameters = {"rope_type": "default", "rope_theta": base}
        unscaled.max_position_embeddings = length
        plain = _small(unscaled)
        plain.load_state_dict(model.state_dict())
        short = None if state is None else getattr(state.method, "short_factor", None)
        return cls(model, plain, scaling, short)

    def lengths(self, longest: int = LENGTH) -> tuple[int, ...]:
        """Tokens of prompts, up to the end of the context or ``longest``."""
        last = min(self.scaling.target - 1, longest)
        return tuple(sorted({max(2, last // 8), max(2, last // 2), last}))

    def prompts(self, longest: int = LENGTH) -> list[list[int]]:
        """Token ids, the same each time."""
        seeded = torch.Generator().manual_seed(0)
        lengths = self.lengths(longest)
        ids = torch.randint(4, _VOCABULARY, (lengths[-1],), generator=seeded).tolist()
        return [ids[:n] for n in lengths]

    def expected(self, prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Log-probabilities as patched, and as engines err, ``[prompts, vocabulary]`` each."""
        rows = {VERDICTS[0]: of_transformers(self.model, prompts)}
        decoder = text_decoder(self.plain)
        (site,) = find_sites(decoder)
        before = site.module._buffers[site.buffer]
        try:
            for name, inv_freq, number in self._errors():
                site.module._buffers[site.buffer] = inv_freq.to(before)
                setattr(site.module, site.scaling_attribute, number)
                rows[name] = of_transformers(self.plain, prompts)
        finally:
            site.module._buffers[site.buffer] = before
            setattr(site.module, site.scaling_attribute, 1.0)
        return rows

    def _errors(self) -> list[tuple[str, torch.Tensor, float]]:
        """Names, frequencies and scaling of what engines are known to make of a patch."""
        made, rope, number = self.scaling, self.scaling.rope, self.scaling.scaling
        found = [("unextended", rope.inv_freq, 1.0)]
        if number != 1:
            found.append(("temperature missing", made.inv_freq, 1.0))
        factor = made.target / rope.length
        usual = yarn_factor(factor)
        if number not in (1, usual):
            found.append((f"other (temperature {usual:.4g})", made.inv_freq, usual))
        found.append((f"other (all frequencies / {factor:g})", rope.inv_freq / factor, 1.0))
        if self.short is not None:
            table = rope.inv_freq / torch.tensor(self.short, dtype=torch.float64)
            found.append(("short table", table, number))
        # Under another base, with and without what is divided.
        for base in _BASES:
            if not math.isclose(base, rope.base, rel_tol=1e-3):
                other = Rope.geometric(base, rope.dim, rope.length).inv_freq
                divided = other * made.inv_freq / rope.inv_freq
                found.append((f"wrong base ({base:g})", other, 1.0))
                found.append((f"wrong base ({base:g}, scaled)", divided, number))
        # The same twice is one: what is right counts, then the order above.
        kept: list[tuple[str, torch.Tensor, float]] = []
        for name, inv_freq, scaling in found:
            rivals = [("", made.inv_freq, number), *kept]
            same = (
                torch.allclose(inv_freq, other, rtol=1e-6, atol=0) and scaling == theirs
                for _, other, theirs in rivals
            )
            if not any(same):
                kept.append((name, inv_freq, scaling))
        return kept


def _fixed(state: Patch) -> Scaling:
    refuse_unproven(state)
    return Scaling.of(state)


def _small(config: Any) -> nn.Module:
    """A model of two layers whose attention looks at every distance."""
    config = copy.deepcopy(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None)
    small = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 2 * dim,
        "intermediate_size": 2 * dim,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": torch.float32,
    }
    for name, value in small.items():
        setattr(config, name, value)
    if kinds is not None:
        config.layer_types = (list(dict.fromkeys(kinds)) * 2)[:2]
    if getattr(config, "max_window_layers", None) is not None:
        config.max_window_layers = 2
    model = AutoModelForCausalLM.from_config(config).float().eval()
    seeded = torch.Generator().manual_seed(0)
    spread = math.sqrt(_PEAK / math.sqrt(dim))  # of queries and keys
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "model.norm.weight":
                # No token is so improbable that its logarithm is lost.
                tied = config.tie_word_embeddings
                parameter.fill_(2.0 / math.sqrt(2 * dim) if tied else 2.0)
                continue
            looks = any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
            scale = spread if looks else 1.0
            if parameter.ndim == 1 and "norm" in name:
                parameter.fill_(scale)
            elif parameter.ndim == 1:
                parameter.normal_(std=scale / 2, generator=seeded)
            else:
                fan = 1.0 if "embed" in name else math.sqrt(parameter.shape[1])
                parameter.normal_(std=scale / fan, generator=seeded)
    return model


@torch.no_grad()
def of_transformers(model: nn.Module, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """What a loaded model makes of prompts."""
    rows = [model(torch.tensor([list(p)]), logits_to_keep=1).logits[0, -1] for p in prompts]
    return torch.stack(rows).float().log_softmax(-1)


def verify(
    miniature: Miniature,
    run: Run,
    engine: str,
    longest: int = LENGTH,
    tolerance: float = TOLERANCE,
) -> Verification:
    """Compare what an engine makes of a miniature with what is right, and what is not.

    Args:
        miniature: that the engine runs.
        run: the engine.
        engine: its name, for the answer.
        longest: tokens of the longest prompt.
        tolerance: of log-probabilities.

    Raises:
        ExportError: the engine does not answer with log-probabilities.
    """
    prompts = miniature.prompts(longest)
    got = run(prompts)
    known = ~got.isnan()
    if not bool(known.any(-1).all()):
        raise ExportError(f"{engine} gives no log-probabilities for some prompts")
    rows = miniature.expected(prompts)
    differences = {name: float((got - row)[known].abs().max()) for name, row in rows.items()}
    nearest = min(differences, key=differences.__getitem__)
    if differences[VERDICTS[0]] <= tolerance:
        nearest = VERDICTS[0]
    elif differences[nearest] > tolerance:
        nearest = "other"
    verdict, _, detail = nearest.partition(" (")
    right = rows[VERDICTS[0]]
    alike = [n for n, row in rows.items() if (row - right).abs().max() <= 2 * tolerance]
    notes = []
    if len(alike) > 1:
        notes.append(f"prompts of this length do not tell these apart: {', '.join(alike)}")
    if len(prompts[-1]) <= miniature.scaling.rope.length:
        notes.append(
            f"no prompt is longer than the trained {miniature.scaling.rope.length} tokens, beyond "
            f"which an engine may do otherwise; give --length more"
        )
    shown = tuple(map(len, prompts))
    return Verification(
        engine, verdict, detail.removesuffix(")"), differences, shown, tolerance, tuple(notes)
    )


def write(miniature: Miniature, folder: Path) -> list[str]:
    """The miniature for engines in a folder; returns flags of llama-server that serve it.

    The folder is one of transformers; ``MODEL.gguf`` is unscaled, and ``MODEL-long.gguf`` says all
    that a file can, where llama.cpp runs the patch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    miniature.model.save_pretrained(folder)
    gguf_file.write_model(miniature.plain, folder / "MODEL.gguf")
    long = folder / "MODEL-long.gguf"
    try:
        made = gguf_file.following(miniature.model, folder / "MODEL.gguf", long)
    except ExportError:
        return []
    return ["--model", str(long), *made.in_file]


def in_process(miniature: Miniature, engine: str, folder: Path, flags: str | None = None) -> Run:
    """An engine of this process, or one that it starts.

    Args:
        miniature: what it runs.
        engine: one of ``ENGINES``.
        folder: to write it to.
        flags: of llama.cpp instead of those that ``export`` prints, for the unscaled file. Of mlx
            and transformers, ``""`` is the folder as ``save_pretrained`` writes it.

    Raises:
        RopeExtError: it cannot run the patch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if engine == "llama.cpp":
        words = _llama_words(miniature, folder, flags)
        return lambda prompts: running.llama_cpp(words, prompts, _VOCABULARY)
    miniature.model.save_pretrained(folder)
    if engine == "transformers":
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        return lambda prompts: of_transformers(loaded, prompts)
    if current_patch(miniature.model) is not None and flags is None:
        export(miniature.model, "mlx").write(folder)
    return lambda prompts: running.mlx(folder, prompts)


def _llama_words(miniature: Miniature, folder: Path, flags: str | None) -> list[str]:
    file = folder / "MODEL.gguf"
    gguf_file.write_model(miniature.plain, file)
    if flags is not None:
        return ["--model", str(file), *shlex.split(flags)]
    try:
        made = llama_cpp.plan(
            miniature.scaling, gguf_file.GGUFFile.read(file).architecture, in_file=False
        )
    except Refusal as refusal:
        raise ExportError(f"llama.cpp cannot run this patch: {refusal}") from None
    if made.table is not None:
        gguf_file.GGUFFile.read(file).write(folder / "MODEL-long.gguf", made.keys, made.table)
        file = folder / "MODEL-long.gguf"
    return ["--model", str(file), *made.words()]


def endpoint(address: str, model: str | None = None) -> Run:
    """An OpenAI-compatible server that serves a written miniature."""
    return lambda prompts: torch.stack(
        [running.completed(address, prompt, _VOCABULARY, _TOP, model) for prompt in prompts]
    )
