"""Verifies what an engine computes by running a miniature of the model in it.

The miniature has the model's head size, layer types, base and scaling, and a few MB of random
weights. The engine's log-probabilities are compared with those of transformers under the patch, and
under mistakes that engines are known to make; :func:`judge` decides between them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_ext.apply.rebuild import SCALING_FIELDS
from rope_ext.config.record import FIELD, record_of
from rope_ext.engines import gguf_file, gguf_model, llama_cpp, running
from rope_ext.engines.base import Refusal, Scaling, config_of, export, refuse_unproven
from rope_ext.engines.families import miniatures
from rope_ext.errors import ExportError, RopeExtError
from rope_ext.methods import FrequencyMethod, Rope
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import Patch, current_patch, patch
from rope_ext.rotary.sites import find_sites, text_decoder

VERDICTS = (
    "as patched",
    "unextended",
    "temperature missing",
    "temperature applied twice",
    "wrong factor",
    "wrong base",
    "short table",
    "other",
    "cannot tell",
)
ENGINES = ("llama.cpp", "mlx", "transformers")
"""Engines that can run in this process."""
SERVERS = {"llama.cpp": 8080, "vllm": 8000, "sglang": 30000}
"""Engines for which ``write`` prints a command that serves the miniature."""
TOLERANCE = 2e-3
"""Largest root mean square error of log-probabilities that counts as float32 rounding."""
LENGTH = 2048
"""Length of the longest prompt in tokens, if the context is long enough."""
FACTOR_ERROR = 0.01
"""Smallest relative error of the factor that has to be detected."""
_BASES = (1e4, 5e5, 1e6)  # defaults of engines and families
_VOCABULARY = 128
_TOP = 20  # number of log-probabilities that servers return
_TAILS = 8  # prompts per length; they differ in their last token only
_APART = 2.0  # a ruled-out rival is this many times as far from the nearest as the engine is
_FLOOR = 1e-4  # float32 computations closer than this count as equal
_ROUNDED = 3.0  # a server may err by this multiple of transformers' bfloat16 rounding
_PEAK = 20.0  # standard deviation of attention logits: large, so that attention decides the answer
_LOOKS = ("q_proj", "k_proj", "q_norm", "k_norm", "qkv_proj", "query_layernorm", "key_layernorm")
_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank")
_WIDTHS += ("kv_lora_rank", "shared_intermediate_size")
_COUNTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "decoder_sparse_step": 1,
    # These scale parts that do not depend on the rotation, and would hide it.
    **dict.fromkeys(("logits_scaling", "logit_scale", "embedding_multiplier"), 1.0),
    "residual_multiplier": 1.0,
}
_RESIDUAL = 0.2  # standard deviation of embeddings; that of attention outputs is 1

Run = Callable[[Sequence[Sequence[int]]], torch.Tensor]
"""Maps prompts to next-token log-probabilities, ``[prompts, vocabulary]``; NaN: not returned."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The result of :func:`judge`.

    Args:
        verdict: one of ``VERDICTS``.
        candidates: names of the hypotheses that were not ruled out, the nearest first.
        differences: root mean square difference between the log-probabilities of the engine and of
            each hypothesis, by name.
    """

    verdict: str
    candidates: tuple[str, ...]
    differences: Mapping[str, float]


def judge(got: torch.Tensor, expected: Mapping[str, torch.Tensor], rounding: float) -> Judgement:
    """Decide which of several hypotheses an engine computes.

    The distance to a hypothesis is the root mean square difference over the log-probabilities that
    the engine returned. The nearest hypothesis is accepted if it is within ``rounding``. A rival is
    ruled out if it is more than twice as far from the nearest hypothesis as the engine is: then the
    engine's error could not account for half the way to the rival, even if it pointed straight at
    it.

    Args:
        got: log-probabilities of the engine, ``[prompts, vocabulary]``; NaN: not returned.
        expected: log-probabilities under each hypothesis, by name; the first one is the patch. The
            verdict is the part of the name before `` (``.
        rounding: largest distance at which the nearest hypothesis is accepted.

    Returns:
        A judgement with the verdict ``"other"`` if no hypothesis is accepted, and ``"cannot tell"``
        if the remaining ones have different verdicts.
    """
    known = ~got.isnan()

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b)[known].double().square().mean().sqrt())

    differences = {name: distance(got, row) for name, row in expected.items()}
    nearest = min(differences, key=differences.__getitem__)
    if not differences[nearest] <= rounding:
        return Judgement(verdict="other", candidates=(), differences=differences)
    near = _APART * max(differences[nearest], _FLOOR)
    possible = [n for n, row in expected.items() if distance(row, expected[nearest]) <= near]
    candidates = tuple(sorted(possible, key=differences.__getitem__))
    verdicts = {name.partition(" (")[0] for name in candidates}
    verdict = verdicts.pop() if len(verdicts) == 1 else "cannot tell"
    return Judgement(verdict=verdict, candidates=candidates, differences=differences)


@dataclass(frozen=True, kw_only=True)
class Verification(Judgement):
    """What an engine computes; ``print`` it for a summary.

    Args:
        engine: name or address of the engine.
        lengths: prompt lengths in tokens.
        returned: mean number of log-probabilities that the engine returned per prompt.
        tolerance: largest difference that counts as rounding.
        notes: advice on how to get a clearer result.
    """

    engine: str
    lengths: tuple[int, ...]
    returned: float
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the engine computes the patch."""
        return self.verdict == VERDICTS[0]

    @property
    def exit_code(self) -> int:
        """0 if the engine computes the patch, 1 if it does not, 3 if the answers do not decide."""
        undecided = VERDICTS[0] in self.candidates
        return 0 if self.passed else 3 if undecided else 1

    def to_json(self) -> str:
        """All fields as JSON."""
        return json.dumps(asdict(self) | {"passed": self.passed}, indent=2) + "\n"

    def __str__(self) -> str:
        right, *wrong = self.differences.items()
        nearest = min(wrong, key=lambda pair: pair[1])
        numbers = [f"{value:.2g} from {name!r}" for name, value in (right, nearest)]
        lengths = ", ".join(map(str, self.lengths))
        return (
            f"{self.engine}: {self._found()}; log-probabilities after {lengths} tokens differ by "
            f"{', '.join(numbers)} (root mean square; rounding up to {self.tolerance:.2g})"
        )

    def _found(self) -> str:
        if self.verdict == "cannot tell":
            return f"cannot tell these apart: {', '.join(self.candidates)}"
        return self.candidates[0] if len(self.candidates) == 1 else self.verdict


@dataclass(frozen=True)
class Miniature:
    """A small model with the rotary embedding of a large one.

    Args:
        model: the miniature with the patch, or with the scaling of its configuration.
        plain: the same weights without scaling.
        scaling: the difference between the two.
        short: divisors of the frequencies within the trained context, for methods with two tables.
    """

    model: PreTrainedModel
    plain: PreTrainedModel
    scaling: Scaling
    short: Sequence[float] | None = None

    @classmethod
    def from_config(cls, config: Any, method: str | None = None, **options: Any) -> Miniature:
        """Build a miniature of the model with this configuration.

        Args:
            config: a transformers configuration; no weights are read.
            method: name of the method to patch with; None uses the scaling or the patch in the
                configuration.
            **options: options of :func:`rope_ext.patch`.

        Raises:
            RopeExtError: the family is not supported, or RoPE is not scaled.
        """
        text = copy.deepcopy(config.get_text_config(decoder=True))
        if text.model_type not in miniatures():
            raise ExportError(
                f"cannot verify the family {text.model_type!r}; supported families: "
                f"{', '.join(miniatures())}"
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
        others = {n: v for n, v in text.rope_parameters.items() if n not in SCALING_FIELDS}
        unscaled.rope_parameters = others | {"rope_type": "default", "rope_theta": base}
        unscaled.max_position_embeddings = length
        plain = _small(unscaled)
        plain.load_state_dict(model.state_dict())
        short = None if state is None else getattr(state.method, "short_factor", None)
        return cls(model, plain, scaling, short)

    def lengths(self, longest: int = LENGTH) -> tuple[int, ...]:
        """Prompt lengths in tokens, up to the end of the context or ``longest``."""
        last = min(self.scaling.target - 1, longest)
        return tuple(sorted({max(2, last * eighths // 8) for eighths in (1, 4, 6, 8)}))

    def prompts(self, longest: int = LENGTH) -> list[list[int]]:
        """Deterministic token IDs; prompts of one length differ in the last token only."""
        seeded = torch.Generator().manual_seed(0)

        def drawn(count: int) -> list[int]:
            return torch.randint(4, _VOCABULARY, (count,), generator=seeded).tolist()

        prompts = []
        for length in self.lengths(longest):
            start = drawn(length - 1)
            tails = torch.randperm(_VOCABULARY - 4, generator=seeded)[:_TAILS] + 4
            prompts += [[*start, tail] for tail in tails.tolist()]
        return prompts

    def expected(
        self, prompts: Sequence[Sequence[int]], factor_error: float = FACTOR_ERROR
    ) -> dict[str, torch.Tensor]:
        """Log-probabilities as patched and under known mistakes, ``[prompts, vocabulary]`` each."""
        rows = {VERDICTS[0]: log_probs_of(self.model, prompts)}
        model = copy.deepcopy(self.plain)
        for name, inv_freq, number in self._errors(factor_error):
            rows[name] = log_probs_of(_scaled(model, inv_freq, number), prompts)
        return rows

    def rounding(self, prompts: Sequence[Sequence[int]], exact: torch.Tensor) -> float:
        """Root mean square error of transformers' log-probabilities in bfloat16.

        Args:
            prompts: token IDs.
            exact: the log-probabilities as patched in float32, ``[prompts, vocabulary]``.
        """
        model, made = copy.deepcopy(self.plain).bfloat16(), self.scaling
        rounded = _scaled(model, made.inv_freq, made.scaling)
        return float((log_probs_of(rounded, prompts) - exact).square().mean().sqrt())

    def _errors(self, factor_error: float) -> list[tuple[str, torch.Tensor, float]]:
        """Name, frequencies and scaling of each mistake that engines are known to make."""
        made, rope, number = self.scaling, self.scaling.rope, self.scaling.scaling
        found = [("unextended", rope.inv_freq, 1.0)]
        factor = made.target / rope.length
        usual = yarn_factor(factor)
        if number != 1:
            found.append(("temperature missing", made.inv_freq, 1.0))
            found.append(("temperature applied twice", made.inv_freq, number**2))
        if number not in (1, usual):
            found.append((f"other (temperature {usual:.4g})", made.inv_freq, usual))
        found += self._wrong_factors(factor_error)
        found.append((f"other (all frequencies / {factor:g})", rope.inv_freq / factor, 1.0))
        if self.short is not None:
            table = rope.inv_freq / torch.tensor(self.short, dtype=torch.float64)
            found.append(("short table", table, number))
        # Another base, with and without the scaling.
        for base in _BASES:
            if not math.isclose(base, rope.base, rel_tol=1e-3):
                other = Rope.geometric(base, rope.dim, rope.length).inv_freq
                divided = other * made.inv_freq / rope.inv_freq
                found.append((f"wrong base ({base:g})", other, 1.0))
                found.append((f"wrong base ({base:g}, scaled)", divided, number))
        # Drop mistakes that equal the patch or an earlier mistake.
        distinct: list[tuple[str, torch.Tensor, float]] = []
        for name, inv_freq, scaling in found:
            rivals = [("", made.inv_freq, number), *distinct]
            same = (
                torch.allclose(inv_freq, other, rtol=1e-6, atol=0) and scaling == theirs
                for _, other, theirs in rivals
            )
            if not any(same):
                distinct.append((name, inv_freq, scaling))
        return distinct

    def _wrong_factors(self, factor_error: float) -> list[tuple[str, torch.Tensor, float]]:
        percent = f"{100 * factor_error:g} %"
        ratios = {
            "twice": 2.0,
            "half": 0.5,
            f"{percent} more": 1 + factor_error,
            f"{percent} less": 1 / (1 + factor_error),
        }
        made = {name: self._with_factor(ratio) for name, ratio in ratios.items()}
        return [(f"wrong factor ({name})", *pair) for name, pair in made.items() if pair]

    def _with_factor(self, ratio: float) -> tuple[torch.Tensor, float] | None:
        """Frequencies and scaling for the factor times ``ratio``; None if that is not possible."""
        state, rope = current_patch(self.model), self.scaling.rope
        try:
            if state is not None:
                made = dataclasses.replace(state.method, factor=state.method.factor * ratio)
                method = cast(FrequencyMethod, made)  # `Scaling.from_patch` refuses the others
                return method.inv_freq(rope), method.attention_scaling(rope)
        except RopeExtError:
            return None
        parameters = dict(self.scaling.parameters)
        kind, factor = parameters["rope_type"], parameters.get("factor")
        if factor is None or kind not in ROPE_INIT_FUNCTIONS or factor * ratio < 1:
            return None
        if math.isclose(parameters.get("attention_factor") or 0, yarn_factor(factor)):
            parameters["attention_factor"] = yarn_factor(factor * ratio)
        config = copy.deepcopy(config_of(self.model))
        config.rope_parameters = parameters | {"factor": factor * ratio}
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=self.scaling.target)
        return inv_freq.double(), scaling


def _scaled(model: nn.Module, inv_freq: torch.Tensor, number: float) -> nn.Module:
    """Set the frequencies and the scaling of cosine and sine of ``model``, and return it."""
    (site,) = find_sites(text_decoder(model))
    site.module._buffers[site.buffer] = inv_freq.float()
    setattr(site.module, site.scaling_attribute, number)
    return model


def _fixed(state: Patch) -> Scaling:
    refuse_unproven(state)
    return Scaling.from_patch(state)


def _shrunk(config: Any) -> Any:
    """Shrink a copy of the configuration to two layers and a few MB; head size and RoPE stay."""
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
    if getattr(config, "kv_lora_rank", None):  # latent attention has no grouped keys
        small["num_key_value_heads"] = 2
    for name, value in small.items():
        setattr(config, name, value)
    optional = dict.fromkeys(_WIDTHS, 2 * dim) | _COUNTS
    if hasattr(config, "attention_multiplier"):
        optional["attention_multiplier"] = dim**-0.5
    for name, value in optional.items():
        if getattr(config, name, None):
            setattr(config, name, value)
    if kinds is not None:
        config.layer_types = (list(dict.fromkeys(kinds)) * 2)[:2]
    for name in ("no_rope_layers", "mlp_layer_types"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:2])
    if getattr(config, "max_window_layers", None) is not None:
        config.max_window_layers = 2
    return config


def _small(config: Any) -> PreTrainedModel:
    """A two-layer model with random weights whose attention depends on every distance."""
    config = _shrunk(config)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    seeded = torch.Generator().manual_seed(0)
    spread = math.sqrt(_PEAK / math.sqrt(dim))  # standard deviation of queries and keys
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "model.norm.weight":
                # Keep every token probable enough for its logarithm to be accurate.
                tied = config.tie_word_embeddings
                parameter.fill_(2.0 / (_RESIDUAL * math.sqrt(2 * dim)) if tied else 2.0)
                continue
            looks = any(part in name for part in _LOOKS)
            scale = spread if looks else 1.0
            if parameter.ndim == 1 and "norm" in name and name.endswith("weight"):
                parameter.fill_(scale)
            elif parameter.ndim == 1:
                parameter.normal_(std=scale / 2, generator=seeded)
            else:
                fan = 1 / _RESIDUAL if "embed" in name else math.sqrt(parameter.shape[-1])
                parameter.normal_(std=scale / fan, generator=seeded)
            if "qkv_proj" in name:  # the values follow two query heads and one key head
                parameter[3 * dim :] /= spread
    return model


@torch.no_grad()
def log_probs_of(model: nn.Module, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Next-token log-probabilities of a loaded model, float32, ``[prompts, vocabulary]``."""
    rows: list[torch.Tensor] = []
    for start, tails in running.by_start(prompts):
        given: dict[str, Any] = {"input_ids": torch.tensor(tails)[:, None]}
        if len(tails) == 1:
            given["input_ids"] = torch.tensor([[*start, *tails]])
        elif start:
            cache = DynamicCache(config=config_of(model))
            model(torch.tensor([start]), past_key_values=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(len(tails))
            given["past_key_values"] = cache
        rows.append(model(**given, logits_to_keep=1).logits[:, -1].float().log_softmax(-1))
    return torch.cat(rows)


def verify(
    miniature: Miniature,
    run: Run,
    engine: str,
    longest: int = LENGTH,
    tolerance: float | None = TOLERANCE,
    factor_error: float = FACTOR_ERROR,
) -> Verification:
    """Decide what an engine computes for a miniature; see :func:`judge`.

    Args:
        miniature: the model that the engine runs.
        run: calls the engine.
        engine: name of the engine, for the report.
        longest: length of the longest prompt in tokens.
        tolerance: largest root mean square difference of log-probabilities that counts as rounding;
            None: three times that of transformers in bfloat16.
        factor_error: smallest relative error of the factor that has to be detected.

    Raises:
        ExportError: the engine returns no log-probabilities.
    """
    prompts = miniature.prompts(longest)
    got = run(prompts)
    known = ~got.isnan()
    if not bool(known.any(-1).all()):
        raise ExportError(f"{engine} returned no log-probabilities for some prompts")
    rows = miniature.expected(prompts, factor_error)
    if tolerance is None:
        tolerance = max(TOLERANCE, _ROUNDED * miniature.rounding(prompts, rows[VERDICTS[0]]))
    found = judge(got, rows, tolerance)
    returned = float(known.sum(-1).float().mean())
    notes = _notes(found, len(prompts[-1]), miniature.scaling.rope.length, returned)
    lengths = tuple(dict.fromkeys(map(len, prompts)))
    return Verification(
        **vars(found),
        engine=engine,
        lengths=lengths,
        returned=returned,
        tolerance=tolerance,
        notes=notes,
    )


def _notes(found: Judgement, longest: int, trained: int, returned: float) -> tuple[str, ...]:
    notes = []
    if found.verdict == "cannot tell":
        notes.append(
            f"either the engine's rounding errors are too large to tell them apart: serve the "
            f"miniature in float32 (vLLM and SGLang: --dtype float32) and set --tolerance "
            f"{TOLERANCE:g}, make the server return more than {returned:.0f} log-probabilities, or "
            f"increase --length; or the engine computes something else"
        )
        small = (VERDICTS[0], " more)", " less)")
        if VERDICTS[0] in found.candidates and all(n.endswith(small) for n in found.candidates):
            notes.append(
                "if a small error of the factor does not matter, increase --factor-error to accept "
                "smaller ones"
            )
    if longest <= trained:
        notes.append(
            f"no prompt is longer than the trained {trained} tokens, and an engine may behave "
            f"differently beyond; increase --length"
        )
    return tuple(notes)


def write(miniature: Miniature, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Write the miniature for engines; returns the commands of ``export`` that serve it.

    If the miniature is patched, the folder holds the unpatched model, so that the commands have to
    describe the whole patch. If the configuration itself scales RoPE, it is saved as it is.
    ``MODEL.gguf`` is always unscaled, and is skipped if the ``gguf`` library is not installed.

    Returns:
        Commands by engine, and the reasons why an engine has none.

    Raises:
        ExportError: the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder} is not empty; give --write a new directory")
    folder.mkdir(parents=True, exist_ok=True)
    patched = current_patch(miniature.model) is not None
    (miniature.plain if patched else miniature.model).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    commands, refusals = {}, []
    for engine in SERVERS:
        try:
            if engine == "llama.cpp":
                gguf_model.write_model(miniature.plain, folder / "MODEL.gguf")
            commands[engine] = _serving(miniature, engine, folder)
        except ExportError as error:
            refusals.append(str(error))
    return commands, refusals


def _serving(miniature: Miniature, engine: str, folder: Path) -> str:
    """The command that serves a written miniature; writes the files it needs."""
    model = miniature.model
    if current_patch(model) is None:
        if engine != "llama.cpp":
            launch = {
                "vllm": ["vllm", "serve", str(folder)],
                "sglang": ["python", "-m", "sglang.launch_server", "--model-path", str(folder)],
            }
            return shlex.join(launch[engine])
        long = folder / "MODEL-long.gguf"
        made = gguf_file.following(model, folder / "MODEL.gguf", long)
        return shlex.join(["llama-server", "--model", str(long), *made.in_file])
    config_of(model)._name_or_path = str(folder)
    made = export(model, engine)
    if engine != "llama.cpp":
        return made.command
    if " FOLDER " in made.command:
        model.save_pretrained(folder / "FOLDER")
    if made.files:
        made.write(folder)
    return f"cd {shlex.quote(str(folder))} && {made.command}"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with tokens ``t3``, ``t4``, ..., whose names contain their IDs."""
    names = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, _VOCABULARY))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    unknown, begin, end = names[:3]
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=unknown, bos_token=begin, eos_token=end, pad_token=unknown
    )


def in_process(miniature: Miniature, engine: str, folder: Path, flags: str | None = None) -> Run:
    """Prepare an engine that runs in this process or in a child process.

    Args:
        miniature: the model to run.
        engine: one of ``ENGINES``.
        folder: directory for the files of the model.
        flags: for llama.cpp, flags for the unscaled file instead of those that ``export`` prints.
            For mlx and transformers, ``""`` runs the folder as ``save_pretrained`` writes it.

    Raises:
        RopeExtError: the engine cannot run the patch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if engine == "llama.cpp":
        words = _llama_words(miniature, folder, flags)
        return lambda prompts: running.llama_cpp(words, prompts, _VOCABULARY)
    miniature.model.save_pretrained(folder)
    if engine == "transformers":
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        return lambda prompts: log_probs_of(loaded, prompts)
    if current_patch(miniature.model) is not None and flags is None:
        export(miniature.model, "mlx").write(folder)
    return lambda prompts: running.mlx(folder, prompts)


def _llama_words(miniature: Miniature, folder: Path, flags: str | None) -> list[str]:
    file = folder / "MODEL.gguf"
    gguf_model.write_model(miniature.plain, file)
    if flags is not None:
        return ["--model", str(file), *shlex.split(flags)]
    try:
        state = current_patch(miniature.model)
        if state is None:
            architecture = gguf_file.GGUFFile.read(file).architecture
            made = llama_cpp.plan(miniature.scaling, architecture, in_file=False)
        else:
            made = llama_cpp.planned(state, in_file=False)
    except Refusal as refusal:
        raise ExportError(f"llama.cpp cannot run this patch: {refusal}") from None
    if made.table is not None:
        gguf_file.GGUFFile.read(file).write(folder / "MODEL-long.gguf", made.keys, made.table)
        file = folder / "MODEL-long.gguf"
    return ["--model", str(file), *made.words()]


def endpoint(address: str, model: str | None = None) -> Run:
    """Query an OpenAI-compatible server that serves a written miniature."""
    return lambda prompts: torch.stack(
        [running.completed(address, prompt, _VOCABULARY, _TOP, model) for prompt in prompts]
    )
