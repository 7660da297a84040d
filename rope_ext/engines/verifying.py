"""Finds out what an engine computes, by running a miniature of the model in it.

The miniature has the head size, the kinds of layers, the base and the scaling of the model, and
random weights of a few MB. The engine's answers are compared with those of transformers under the
patch, and under the mistakes that engines are known to make; :func:`judge` decides.
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

from rope_ext.engines import gguf_file, gguf_model, llama_cpp, running
from rope_ext.engines.base import Refusal, Scaling, config_of, export, refuse_unproven
from rope_ext.engines.families import miniatures
from rope_ext.errors import ExportError, RopeExtError
from rope_ext.methods import FrequencyMethod, Rope
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import Patch, current_patch, patch
from rope_ext.record import FIELD, record_of
from rope_ext.rotary.sites import find_sites, text_decoder
from rope_ext.saving.rebuild import SCALING_FIELDS

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
"""Those that run in process."""
SERVERS = ("llama.cpp", "vllm", "sglang")
"""Those whose command serves a written miniature."""
TOLERANCE = 2e-3
"""Root mean square of what rounding may do to log-probabilities in float32."""
LENGTH = 2048
"""Tokens of the longest prompt, if the model reaches that far."""
FACTOR_ERROR = 0.01
"""Relative error of the factor that has to be told from the right one."""
_BASES = (1e4, 5e5, 1e6)  # defaults of engines and families
_VOCABULARY = 128
_TOP = 20  # log-probabilities that servers give
_TAILS = 8  # prompts of each length, which differ in their last token
_APART = 2.0  # how many times the distance to the nearest a rival is apart from it
_FLOOR = 1e-4  # nearer than this, two computations in float32 are the same
_ROUNDED = 3.0  # how many times the rounding of bfloat16 in transformers a server may show
_PEAK = 20.0  # standard deviation of attention logits: they, not noise, decide the answer
_LOOKS = ("q_proj", "k_proj", "q_norm", "k_norm", "qkv_proj", "query_layernorm", "key_layernorm")
_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank")
_WIDTHS += ("kv_lora_rank", "shared_intermediate_size")
_COUNTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "decoder_sparse_step": 1,
    # These multiply what has no part in rotation, and would hide it.
    **dict.fromkeys(("logits_scaling", "logit_scale", "embedding_multiplier"), 1.0),
    "residual_multiplier": 1.0,
}
_RESIDUAL = 0.2  # standard deviation of embeddings, beside that of 1 of what attention adds

Run = Callable[[Sequence[Sequence[int]]], torch.Tensor]
"""Prompts to log-probabilities of the next token, ``[prompts, vocabulary]``; NaN: not told."""


@dataclass(frozen=True)
class Judgement:
    """What the answers of an engine show; see :func:`judge`.

    Args:
        verdict: one of ``VERDICTS``.
        candidates: names of the hypotheses that the answers leave possible, the nearest first.
        differences: root mean square of the engine's log-probabilities less those of each
            hypothesis, by name.
    """

    verdict: str
    candidates: tuple[str, ...]
    differences: Mapping[str, float]


def judge(got: torch.Tensor, expected: Mapping[str, torch.Tensor], rounding: float) -> Judgement:
    """Decide which of several hypotheses an engine computes.

    The distance from a hypothesis is the root mean square difference over the log-probabilities
    that the engine returned. The nearest hypothesis holds if it is within ``rounding``. Another one
    stays possible unless, over the same log-probabilities, it is more than twice as far from the
    nearest as the engine is: then whatever moves the engine away from the nearest could not bring
    it half the way to the other, even if all of it pointed there.

    Args:
        got: log-probabilities of the engine, ``[prompts, vocabulary]``; NaN: not returned.
        expected: the same under each hypothesis, by name; the first is the right one. The verdict
            of a name is what precedes `` (``.
        rounding: distance up to which the nearest hypothesis holds.

    Returns:
        The verdict ``"other"`` if no hypothesis holds, ``"cannot tell"`` if several do that have
        different verdicts.
    """
    known = ~got.isnan()

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b)[known].double().square().mean().sqrt())

    differences = {name: distance(got, row) for name, row in expected.items()}
    nearest = min(differences, key=differences.__getitem__)
    if not differences[nearest] <= rounding:
        return Judgement("other", (), differences)
    near = _APART * max(differences[nearest], _FLOOR)
    possible = [n for n, row in expected.items() if distance(row, expected[nearest]) <= near]
    candidates = tuple(sorted(possible, key=differences.__getitem__))
    verdicts = {name.partition(" (")[0] for name in candidates}
    return Judgement(
        verdicts.pop() if len(verdicts) == 1 else "cannot tell", candidates, differences
    )


@dataclass(frozen=True)
class Verification:
    """What an engine computes; ``print`` it.

    Args:
        engine: its name, or its address.
        verdict: one of ``VERDICTS``.
        candidates: what it may compute: one, or several that its answers do not tell apart.
        differences: root mean square of the engine's log-probabilities less those of the miniature
            as patched, and under known mistakes, by name.
        lengths: tokens of the prompts.
        returned: log-probabilities that the engine returned for each prompt, on average.
        tolerance: up to which a difference is rounding.
        notes: what to know about it.
    """

    engine: str
    verdict: str
    candidates: tuple[str, ...]
    differences: Mapping[str, float]
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
        """0: the engine computes the patch; 1: it does not; 3: the answers do not decide it."""
        undecided = VERDICTS[0] in self.candidates
        return 0 if self.passed else 3 if undecided else 1

    def to_json(self) -> str:
        """All of it."""
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
        model: patched, or scaled by its configuration.
        plain: the same weights, unscaled.
        scaling: what the first does to the second.
        short: what frequencies are divided by within the trained context, by a method that has
            two tables.
    """

    model: PreTrainedModel
    plain: PreTrainedModel
    scaling: Scaling
    short: Sequence[float] | None = None

    @classmethod
    def from_config(cls, config: Any, method: str | None = None, **options: Any) -> Miniature:
        """A miniature of the model with this configuration.

        Args:
            config: of transformers; its weights are not read.
            method: patched by it; None: as the configuration says, which may hold a patch.
            **options: of :func:`rope_ext.patch`.

        Raises:
            RopeExtError: the family was not checked, or nothing is scaled.
        """
        text = copy.deepcopy(config.get_text_config(decoder=True))
        if text.model_type not in miniatures():
            raise ExportError(
                f"no miniature of {text.model_type!r} can be made; those of "
                f"{', '.join(miniatures())} can"
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
        """Tokens of prompts, up to the end of the context or ``longest``."""
        last = min(self.scaling.target - 1, longest)
        return tuple(sorted({max(2, last * eighths // 8) for eighths in (1, 4, 6, 8)}))

    def prompts(self, longest: int = LENGTH) -> list[list[int]]:
        """Token ids, the same each time; those of one length differ in the last token only."""
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
        """Log-probabilities as patched, and as engines err, ``[prompts, vocabulary]`` each."""
        rows = {VERDICTS[0]: of_transformers(self.model, prompts)}
        model = copy.deepcopy(self.plain)
        for name, inv_freq, number in self._errors(factor_error):
            rows[name] = of_transformers(_scaled(model, inv_freq, number), prompts)
        return rows

    def rounding(self, prompts: Sequence[Sequence[int]], exact: torch.Tensor) -> float:
        """Root mean square of what bfloat16 changes in transformers' log-probabilities.

        Args:
            prompts: token ids.
            exact: the log-probabilities as patched in float32, ``[prompts, vocabulary]``.
        """
        model, made = copy.deepcopy(self.plain).bfloat16(), self.scaling
        rounded = _scaled(model, made.inv_freq, made.scaling)
        return float((of_transformers(rounded, prompts) - exact).square().mean().sqrt())

    def _errors(self, factor_error: float) -> list[tuple[str, torch.Tensor, float]]:
        """Names, frequencies and scaling of what engines are known to make of a patch."""
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
        """Frequencies and scaling if the factor is multiplied; None: the method takes no such."""
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
    """The same model, with other frequencies and another number on cosine and sine."""
    (site,) = find_sites(text_decoder(model))
    site.module._buffers[site.buffer] = inv_freq.float()
    setattr(site.module, site.scaling_attribute, number)
    return model


def _fixed(state: Patch) -> Scaling:
    refuse_unproven(state)
    return Scaling.from_patch(state)


def _shrunk(config: Any) -> Any:
    """A copy of a configuration, of two layers and a few MB, with its head size and RoPE."""
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
    """A model of two layers whose attention looks at every distance."""
    config = _shrunk(config)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    seeded = torch.Generator().manual_seed(0)
    spread = math.sqrt(_PEAK / math.sqrt(dim))  # of queries and keys
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "model.norm.weight":
                # No token is so improbable that its logarithm is lost.
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
            if "qkv_proj" in name:  # values, after two heads of queries and one of keys
                parameter[3 * dim :] /= spread
    return model


@torch.no_grad()
def of_transformers(model: nn.Module, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Log-probabilities of the next token by a loaded model, float32, ``[prompts, vocabulary]``."""
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
    """Decide by :func:`judge` what an engine makes of a miniature.

    Args:
        miniature: that the engine runs.
        run: the engine.
        engine: its name, for the answer.
        longest: tokens of the longest prompt.
        tolerance: root mean square difference of log-probabilities that is rounding; None: three
            times that of transformers in bfloat16.
        factor_error: relative error of the factor to tell from the right one.

    Raises:
        ExportError: the engine does not answer with log-probabilities.
    """
    prompts = miniature.prompts(longest)
    got = run(prompts)
    known = ~got.isnan()
    if not bool(known.any(-1).all()):
        raise ExportError(f"{engine} gives no log-probabilities for some prompts")
    rows = miniature.expected(prompts, factor_error)
    if tolerance is None:
        tolerance = max(TOLERANCE, _ROUNDED * miniature.rounding(prompts, rows[VERDICTS[0]]))
    found = judge(got, rows, tolerance)
    returned = float(known.sum(-1).float().mean())
    notes = _notes(found, len(prompts[-1]), miniature.scaling.rope.length, returned)
    lengths = tuple(dict.fromkeys(map(len, prompts)))
    return Verification(
        engine,
        found.verdict,
        found.candidates,
        found.differences,
        lengths,
        returned,
        tolerance,
        notes,
    )


def _notes(found: Judgement, longest: int, trained: int, returned: float) -> tuple[str, ...]:
    notes = []
    if found.verdict == "cannot tell":
        notes.append(
            f"either the engine's rounding is too large beside what is between them: serve the "
            f"miniature in float32 (vLLM and SGLang: --dtype float32) and give --tolerance "
            f"{TOLERANCE:g}, have more than the {returned:.0f} log-probabilities returned, or give "
            f"--length more; or the engine computes something that is none of them"
        )
        small = (VERDICTS[0], " more)", " less)")
        if VERDICTS[0] in found.candidates and all(n.endswith(small) for n in found.candidates):
            notes.append(
                "if a small error of the factor does not matter, give --factor-error more: smaller "
                "ones then pass"
            )
    if longest <= trained:
        notes.append(
            f"no prompt is longer than the trained {trained} tokens, beyond which an engine may do "
            f"otherwise; give --length more"
        )
    return tuple(notes)


def write(miniature: Miniature, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Write the miniature for engines; returns the commands of ``export`` that serve it.

    Where a patch is on the miniature, the folder holds the unpatched one, so that the commands have
    to say all of the patch; where its own configuration scales it, the configuration says it.
    ``MODEL.gguf`` is unscaled always, and is left out where the ``gguf`` library is not installed.

    Returns:
        Commands, by engine; and why an engine has none.

    Raises:
        ExportError: the folder has something in it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder} is there and not empty; give --write a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    patched = current_patch(miniature.model) is not None
    (miniature.plain if patched else miniature.model).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
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
    """The command that serves a written miniature; files that it needs are written, too."""
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


def _tokenizer() -> PreTrainedTokenizerFast:
    """Tokens by the names ``t3``, ``t4``, ..., from which their ids can be read."""
    names = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, _VOCABULARY))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    unknown, begin, end = names[:3]
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=unknown, bos_token=begin, eos_token=end, pad_token=unknown
    )


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
    """An OpenAI-compatible server that serves a written miniature."""
    return lambda prompts: torch.stack(
        [running.completed(address, prompt, _VOCABULARY, _TOP, model) for prompt in prompts]
    )
