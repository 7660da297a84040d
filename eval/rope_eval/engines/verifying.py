"""Verifies that an engine computes a patch, by running a miniature of the model in it.

The engine's log-probabilities are compared with those of transformers with the patch, and with
known mistakes of engines; :func:`judge` decides between them.
"""

import copy
import dataclasses
import json
import math
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer
from typing_extensions import Self

from rope_eval.engines import llama_server
from rope_eval.engines.gguf_miniature import write_model
from rope_eval.server import Client, Completion, RequestError, shown_url
from rope_ext.config.nested import text_of
from rope_ext.engines import export
from rope_ext.engines.base import ENGINES, Refusal, Scaling, miniatures, refuse_unproven
from rope_ext.engines.configs import PLUGIN_METHODS
from rope_ext.engines.llama_cpp import following
from rope_ext.errors import ExportError, RopeExtError, first_line, optional
from rope_ext.import_path import isolated
from rope_ext.methods import FrequencyMethod, Method, Rope
from rope_ext.methods.checked import not_none
from rope_ext.methods.temperature import yarn_factor
from rope_ext.patching import Patch, current_patch, note_target, patch, unpatch
from rope_ext.quoting import shell_word
from rope_ext.rotary.sites import find_sites, text_config, text_decoder
from rope_ext.saving.folder import read_saved

PATCHED = "as patched"
SERVERS = {"llama.cpp": 8080, "vllm": 8000, "sglang": 30000}
"""Engines for which ``write`` prints a command that serves the miniature, and their ports."""
TOLERANCE = 2e-3  # RMS error of log-probabilities that counts as float32 rounding
LENGTH = 2048  # length of the longest prompt in tokens, if the context allows
_SHORT = 9216  # up to this length, prompts beyond the trained length take a minute on one core
FACTOR_ERROR = 0.01  # smallest relative error of the factor to detect
_VOCABULARY = 128
_TOP = 20  # number of log-probabilities that servers return
_AT_ONCE = 8  # consecutive prompt lengths at each of the four places
_APART = 2.0  # a ruled-out rival is this many times as far from the nearest as the engine is
_FLOOR = 1e-4  # float32 computations closer than this count as equal
_ROUNDED = 3.0  # a server may err by this multiple of transformers' bfloat16 rounding
_PEAK = 20.0  # standard deviation of attention logits: large, so that outputs depend on attention
_LOOKS = re.compile("(q|k|qkv)_proj|(q|k|query|key)_(layer)?norm")
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_WIDTHS += ("shared_intermediate_size", "q_lora_rank", "kv_lora_rank")
_SMALL = {
    **{"vocab_size": _VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": torch.float32},
}
_IF_THERE = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "max_window_layers"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "decoder_sparse_step"), 1),
    "block_auto_adjust_ff_dim": False,
    # These scale parts that do not depend on the rotation, and would mask it.
    **dict.fromkeys(("logits_scaling", "logit_scale", "embedding_multiplier"), 1.0),
    "residual_multiplier": 1.0,
}
_EXACT = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
_EXACT += ("--parallel", "1", "--threads", "1")
"""Flags that make llama.cpp compute attention in float32; its default is half precision."""
_NO_CHANCE = -1e30  # llama.cpp's log-probability for a probability of zero
_SECONDS = 120  # timeout for requests, and for shutting down a server

Run = Callable[[Sequence[Sequence[int]]], torch.Tensor]
"""Maps prompts, each of which begins the last one, to next-token log-probabilities, float32,
``[prompts, vocabulary]``; NaN: not returned."""


@dataclass(frozen=True)
class Verification:
    """The result of verifying an engine; ``print`` it for a summary."""

    engine: str  # name or address
    verdict: str  # the engine's mistake, or "as patched", "other", "cannot tell"
    candidates: tuple[str, ...]  # hypotheses that were not ruled out, the nearest first
    differences: Mapping[str, float]  # root mean square difference from each hypothesis
    lengths: tuple[int, ...]  # prompt lengths, tokens
    returned: float  # mean number of log-probabilities per prompt
    tolerance: float  # largest difference that counts as rounding
    beyond: bool  # whether prompts are longer than the trained length
    notes: tuple[str, ...] = ()  # how to get a clearer result

    @property
    def passed(self) -> bool:
        """Whether the engine computes the patch, also beyond the trained length."""
        return self.verdict == PATCHED and self.beyond

    @property
    def exit_code(self) -> int:
        """0 if the engine computes the patch, 1 if it does not, 3 if the result is inconclusive."""
        if self.passed:
            return 0
        return 3 if PATCHED in self.candidates else 1

    def to_json(self) -> str:
        """Return all fields as JSON."""
        data = {"program": "rope_ext", **dataclasses.asdict(self), "passed": self.passed}
        return json.dumps(data, indent=2) + "\n"

    def __str__(self) -> str:
        found = self.candidates[0] if len(self.candidates) == 1 else self.verdict
        if self.verdict == "cannot tell":
            found = f"cannot tell these apart: {', '.join(self.candidates)}"
        if not self.beyond:
            found += f" within {self.lengths[-1]} tokens only"
        right, *wrong = self.differences.items()
        nearest = min(wrong, key=lambda pair: pair[1])
        numbers = ", ".join(f"{value:.2g} from {name!r}" for name, value in (right, nearest))
        return (
            f"{self.engine}: {found}; log-probabilities after {', '.join(map(str, self.lengths))} "
            f"tokens differ by {numbers} (root mean square; rounding up to {self.tolerance:.2g})"
        )


def judge(
    got: torch.Tensor, expected: Mapping[str, torch.Tensor], rounding: float
) -> tuple[str, tuple[str, ...], dict[str, float]]:
    """Decide which of several hypotheses an engine computes: verdict, candidates and differences.

    The nearest by root mean square over what the engine returned is accepted if it is within
    ``rounding``. A rival is ruled out if it is more than twice as far from the nearest as the
    engine is. The verdict is the part of a name before `` (``, ``"other"`` if none is accepted, and
    ``"cannot tell"`` if the remaining ones differ in it.
    """
    known = ~got.isnan()

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b)[known].double().square().mean().sqrt())

    differences = {name: distance(got, row) for name, row in expected.items()}
    nearest = min(differences, key=differences.__getitem__)
    # "not <=" also for NaN, which a broken engine returns.
    if not differences[nearest] <= rounding:
        return "other", (), differences
    near = _APART * max(differences[nearest], _FLOOR)
    possible = [n for n, row in expected.items() if distance(row, expected[nearest]) <= near]
    candidates = tuple(sorted(possible, key=differences.__getitem__))
    verdicts = {name.partition(" (")[0] for name in candidates}
    return verdicts.pop() if len(verdicts) == 1 else "cannot tell", candidates, differences


@dataclass(frozen=True)
class Miniature:
    """A small model with the rotary embedding of a large model."""

    model: PreTrainedModel  # patched
    plain: PreTrainedModel  # the same weights without the patch
    state: Patch  # of ``model``
    scaling: Scaling | None  # None: a position method, for vLLM's plugin
    as_saved: bool  # whether the source configuration has the patch

    @classmethod
    def from_config(cls, config: Any, method: str | Method | None = None, **options: Any) -> Self:
        """Build one with the head size, layer types, base and scaling of a configuration.

        Without ``method``, it uses the configuration's scaling or patch; ``options`` are
        those of :func:`rope_ext.patch`. Raises RopeExtError if the family is not supported.
        """
        text = text_of(config)
        target = None
        as_saved = method is None
        if text.model_type not in miniatures():
            raise ExportError(
                f"cannot verify the family {text.model_type!r}; supported families: "
                f"{', '.join(miniatures())}"
            )
        if method is None:
            whole = read_saved(config).model
            saved = current_patch(whole)
            if saved is None:
                raise ExportError(
                    "nothing to verify: there is no patch; give --method, or a patched folder"
                )
            method = saved.record.method
            options = dict(saved.record.arguments)
            target = saved.target_length
            text = text_config(text_decoder(unpatch(whole)))
        plain = _small(text)
        model = patch(copy.deepcopy(plain), method, **options)
        if target is not None:
            note_target(model, target)
        state = not_none(current_patch(model))
        if state.method.name in PLUGIN_METHODS:
            return cls(model=model, plain=plain, state=state, scaling=None, as_saved=as_saved)
        try:
            refuse_unproven(state)
        except Refusal as refusal:
            raise ExportError(f"nothing to verify: {refusal}") from None
        return cls(
            model=model,
            plain=plain,
            state=state,
            scaling=Scaling.from_patch(state),
            as_saved=as_saved,
        )

    def under(self, dtype: torch.dtype = torch.float32, /, **changes: Any) -> Any:
        """Return a copy of the patched model with other method options."""
        model: Any = copy.deepcopy(self.plain)
        method = dataclasses.replace(self.state.record.method, **changes)
        return patch(model.to(dtype), method, **self.state.record.arguments)

    @property
    def beyond(self) -> int:
        """A length beyond the trained one, tokens."""
        return self.state.length * 9 // 8

    def prompts(self, longest: int | None = None) -> list[list[int]]:
        """Return deterministic token IDs up to the context length or ``longest``.

        Each prompt begins the next. Default: 2048 tokens, or an eighth beyond the trained length if
        that is at most 9216.
        """
        beyond = self.beyond if self.beyond <= _SHORT else 0
        last = min(self.state.target_length - 1, longest or max(LENGTH, beyond))
        seeded = torch.Generator().manual_seed(0)
        tokens = torch.randint(4, _VOCABULARY, (last,), generator=seeded).tolist()
        places = (last * part // 8 - back for part in (1, 4, 6, 8) for back in range(_AT_ONCE))
        return [tokens[:length] for length in sorted({max(2, length) for length in places})]

    def expected(
        self, prompts: Sequence[Sequence[int]], factor_error: float = FACTOR_ERROR
    ) -> dict[str, torch.Tensor]:
        """Return log-probabilities as patched and for known mistakes, ``[prompts, vocabulary]``."""
        rows = {PATCHED: log_probs_of(self.model, prompts)}
        model = copy.deepcopy(self.plain)
        if self.scaling is None:
            rows["unextended"] = log_probs_of(model, prompts)
            for name, changes in {
                "wrong factor (twice)": {"factor": 2 * self.state.method.factor},
                "temperature missing": {"temperature": 1.0, "attention_factor": 1.0},
            }.items():
                with suppress(RopeExtError):  # STRING extends to twice the length at most
                    row = log_probs_of(self.under(**changes), prompts)
                    if (row - rows[PATCHED]).abs().max() > _FLOOR:  # some have no temperature
                        rows[name] = row
            return rows
        known = [(self.scaling.inv_freq, self.scaling.scaling)]
        for name, inv_freq, number in self._mistakes(self.scaling, factor_error):
            # Equal hypotheses could not be told apart.
            equal = (
                torch.allclose(inv_freq, f, rtol=1e-6, atol=0) and number == n for f, n in known
            )
            if not any(equal):
                known.append((inv_freq, number))
                (site,) = find_sites(text_decoder(model))
                site.module._buffers[site.buffer] = inv_freq.float()
                setattr(site.module, site.scaling_attribute, number)
                rows[name] = log_probs_of(model, prompts)
        return rows

    def _mistakes(
        self, scaled: Scaling, factor_error: float
    ) -> Iterator[tuple[str, torch.Tensor, float]]:
        """Yield known mistakes of engines: name, frequencies and scaling; some may be equal."""
        rope = scaled.rope
        right = scaled.inv_freq
        number = scaled.scaling
        method = cast(FrequencyMethod, self.state.method)
        factor = scaled.target / rope.length
        usual = yarn_factor(factor)
        short = getattr(method, "short_factor", None)
        yield "unextended", rope.inv_freq, 1.0
        yield "temperature missing", right, 1.0
        yield "temperature applied twice", right, number**2
        if number != 1:
            yield f"other (temperature {usual:.4g})", right, usual
        ratios = {"twice": 2.0, "half": 0.5, f"{100 * factor_error:g} % more": 1 + factor_error}
        ratios[f"{100 * factor_error:g} % less"] = 1 / (1 + factor_error)
        for name, ratio in ratios.items():
            with suppress(RopeExtError):  # a factor below 1
                other = dataclasses.replace(method, factor=method.factor * ratio)
                wrong = other.inv_freq(rope), other.attention_scaling(rope)
                yield f"wrong factor ({name})", *wrong
        yield f"other (all frequencies / {factor:g})", rope.inv_freq / factor, 1.0
        if short is not None:
            yield "short table", rope.inv_freq / torch.tensor(short, dtype=torch.float64), number
        for base in (1e4, 5e5, 1e6):  # engines' default bases, without and with scaling
            other = Rope.geometric(base, rope.dim, rope.length).inv_freq
            yield f"wrong base ({base:g})", other, 1.0
            yield f"wrong base ({base:g}, scaled)", other * right / rope.inv_freq, number


def _small(config: Any) -> PreTrainedModel:
    """Build a two-layer model with random weights whose attention depends on every distance.

    It has the head size and RoPE of ``config``, and a few MB.
    """
    config = _small_config(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # Fixed: the process that asks a server builds the miniature again that another one wrote.
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        _draw(model, dim)
    return model


def _small_config(config: Any) -> Any:
    """Return a copy of a configuration for two narrow layers with the same heads and RoPE."""
    config = copy.deepcopy(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    latent = getattr(config, "kv_lora_rank", None)  # latent attention has no grouped keys
    there = dict.fromkeys(_WIDTHS, 2 * dim) | _IF_THERE | {"attention_multiplier": dim**-0.5}
    there = {name: value for name, value in there.items() if getattr(config, name, None)}
    keys = {"hidden_size": 2 * dim, "num_key_value_heads": 2 if latent else 1}
    keys["initializer_range"] = (2 * dim) ** -0.5  # outputs are as large as inputs
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        keys["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[:2]
        if "linear_attention" in kinds:
            keys["full_attention_interval"] = 2  # the same, for mlx-lm
    for name in ("no_rope_layers", "mlp_layer_types"):
        if getattr(config, name, None):
            keys[name] = getattr(config, name)[:2]
    for name, value in (_SMALL | keys | there).items():
        setattr(config, name, value)
    return config


def _draw(model: nn.Module, dim: int) -> None:
    """Change initial weights so that attention depends on every distance; ``dim`` of a head."""
    spread = math.sqrt(_PEAK / math.sqrt(dim))  # standard deviation of queries and keys
    for name, parameter in model.named_parameters():
        looks = _LOOKS.search(name) is not None
        if name == "model.norm.weight":
            parameter.fill_(2.0)  # keeps every token probable enough for an exact logarithm
        elif parameter.ndim == 1 and "norm" in name:
            parameter.fill_(spread if looks else 1.0)
        elif parameter.ndim == 1:
            parameter.normal_(std=0.5)
        elif looks:
            parameter *= spread
        if "qkv_proj" in name:  # the values follow two query heads and one key head
            parameter[3 * dim :] /= spread


@torch.no_grad()
def log_probs_of(model: nn.Module, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return next-token log-probabilities of a loaded model; see :data:`Run`."""
    last = torch.tensor([len(prompt) - 1 for prompt in prompts])
    logits = model(torch.tensor([prompts[-1]]), logits_to_keep=last, use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def verify(
    miniature: Miniature,
    run: Run,
    engine: str,
    longest: int | None = None,
    tolerance: float | None = TOLERANCE,
    factor_error: float = FACTOR_ERROR,
) -> Verification:
    """Run a miniature in an engine, and decide what the engine computes; see :func:`judge`.

    Differences of log-probabilities up to ``tolerance`` (root mean square) count as rounding; None:
    up to three times that of transformers in bfloat16. ``longest`` is the length of the longest
    prompt, tokens; None as in :meth:`Miniature.prompts`.
    """
    prompts = miniature.prompts(longest)
    got = run(prompts)
    trained = miniature.state.length
    returned = (~got.isnan()).sum(-1).float()
    if not returned.all():
        raise ExportError(f"{engine} returned no log-probabilities for some prompts")
    rows = miniature.expected(prompts, factor_error)
    if tolerance is None:
        rounded = log_probs_of(miniature.under(torch.bfloat16), prompts) - rows[PATCHED]
        tolerance = max(TOLERANCE, _ROUNDED * float(rounded.square().mean().sqrt()))
    verdict, candidates, differences = judge(got, rows, tolerance)
    count = float(returned.mean())
    sizes = [*map(len, prompts)]
    notes = []
    # The last of each group of consecutive lengths.
    lengths = tuple(size for size in sizes if size + 1 not in sizes)
    if verdict == "cannot tell":
        notes.append(
            f"serve the miniature in float32 (vLLM, SGLang: --dtype float32) and set --tolerance "
            f"{TOLERANCE:g}, make the server return more than {count:.0f} log-probabilities, "
            f"increase --length or --factor-error; or the engine computes otherwise"
        )
    beyond = lengths[-1] >= min(trained + 1, miniature.state.target_length - 1)
    if not beyond:
        notes.append(
            f"no prompt is longer than the trained {trained} tokens; give --length "
            f"{miniature.beyond}"
        )
    return Verification(
        engine=engine,
        verdict=verdict,
        candidates=candidates,
        differences=differences,
        lengths=lengths,
        returned=count,
        tolerance=tolerance,
        beyond=beyond,
        notes=tuple(notes),
    )


def write(miniature: Miniature, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Write the miniature for engines; returns the commands that serve it, and refusals.

    The folder contains the unpatched model, so that the commands must describe the whole patch; or
    the patched one, if the miniature has a saved patch. ``MODEL.gguf`` is always unscaled.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder} is not empty; give --write a new directory")
    folder.mkdir(parents=True, exist_ok=True)
    by_plugin = miniature.scaling is None
    whole = miniature.as_saved
    (miniature.model if whole else miniature.plain).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    # ``export`` prints this as the model to serve.
    miniature.model.config._name_or_path = str(folder)
    commands = {}
    refusals = []
    for engine in ["vllm", "sglang"] if by_plugin else SERVERS:
        inside = engine == "llama.cpp"
        try:
            if inside:
                write_model(miniature.plain, folder / "MODEL.gguf")
            where = folder.absolute() if inside else folder
            exported = export(where if whole else miniature.model, engine)
            enter = f"cd {shell_word(str(folder))} && " if inside else ""
            commands[engine] = enter + exported.command
        except ExportError as error:
            refusals.append(str(error))
    return commands, refusals


def tiny_tokenizer() -> FastTokenizer:
    """Build a tokenizer with tokens ``t3``, ``t4``, ..., whose names contain their IDs."""
    unknown = "<unk>"
    begin = "<s>"
    end = "</s>"
    names = [unknown, begin, end, *(f"t{i}" for i in range(3, _VOCABULARY))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unknown))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return FastTokenizer(
        tokenizer_object=words, unk_token=unknown, bos_token=begin, eos_token=end, pad_token=unknown
    )


def in_process(miniature: Miniature, engine: str, folder: Path, flags: str | None = None) -> Run:
    """Prepare llama.cpp, mlx or transformers, with the model's files in ``folder``.

    llama.cpp uses ``flags`` for the unscaled file instead of those from ``export``; with ``""``,
    mlx runs the folder as written by ``save_pretrained``.
    """
    if miniature.scaling is None:
        raise ExportError(
            f"{engine} does not run {miniature.state.method.name}; for vLLM on CPUs, run with "
            f"--engine vllm --write FOLDER"
        )
    if engine == "llama.cpp":
        write_model(miniature.plain, file := folder / "MODEL.gguf")
        if flags is None:
            *writing, serve = export(miniature.model, engine).command.split(" && ")
            flags = shlex.join(shlex.split(serve)[3:])  # after llama-server --model FILE
            if writing:
                plain = file
                file = folder / "MODEL-long.gguf"
                following(miniature.model, plain, file)
        try:
            words = ["--model", str(file), *shlex.split(flags)]
        except ValueError as error:
            raise ExportError(f"flags={flags!r} is not valid: {error}") from None
        return lambda prompts: llama_cpp(words, prompts, _VOCABULARY)
    family = ENGINES["mlx"].get(text_config(miniature.model).model_type)
    if engine == "mlx" and family is not None and not family.alone:
        raise ExportError(
            f"a miniature is a text model alone, and mlx-lm loads the whole {family.whole!r} only; "
            f"rope-ext export writes its config.json"
        )
    miniature.model.save_pretrained(folder)
    if engine == "transformers":
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        return lambda prompts: log_probs_of(loaded, prompts)
    if not miniature.as_saved and flags is None:
        export(miniature.model, "mlx").write(folder)
    return lambda prompts: mlx(folder, prompts)


def endpoint(address: str, model: str | None = None) -> Run:
    """Query an OpenAI-compatible server that serves a written miniature."""
    return lambda prompts: torch.stack(
        [
            completed(address, prompt, vocabulary=_VOCABULARY, top=_TOP, model=model)
            for prompt in prompts
        ]
    )


@contextmanager
def serving(words: Sequence[str]) -> Iterator[str]:
    """Run llama.cpp's server in a child process inside a ``with`` block; yields its address."""
    package = optional(
        "xllamacpp", needs="llama.cpp needs", extra="rope-ext[engines]", kind=ExportError
    )
    script = Path(llama_server.__file__).read_text(encoding="utf-8")
    found_in = Path(package.__file__).parents[1]  # may be on PYTHONPATH only
    command = isolated(script, *words, *_EXACT, folder=str(found_in))
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert process.stdout is not None
            address = next((line for line in process.stdout if line.startswith("address ")), None)
            if address is None:
                process.wait(_SECONDS)
                log.seek(0)
                said = " / ".join([line.rstrip("\n") for line in log if line.strip()][-3:])
                raise ExportError(f"llama.cpp's server did not start: {said}")
            yield address.split()[1]
        finally:
            try:
                process.communicate(timeout=_SECONDS)  # closing stdin stops it
            finally:
                process.kill()


def completed(
    address: str,
    prompt: Sequence[int],
    vocabulary: int,
    top: int | None = None,
    model: str | None = None,
) -> torch.Tensor:
    """Return the ``top`` next-token log-probabilities after ``prompt`` from an OpenAI-style server.

    Float32, ``[vocabulary]``; NaN for tokens that the server did not return. Raises ExportError if
    it cannot be reached, returns an error, or its answer is not one to this prompt.
    """
    body = {
        "prompt": list(prompt),
        "max_tokens": 1,
        # Some servers scale log-probabilities by it.
        "temperature": 1.0,
        "logprobs": vocabulary if top is None else top,
        "return_tokens_as_token_ids": True,  # vLLM; other servers return text
        "cache_prompt": True,  # llama.cpp; prompts share all but their last token
    } | ({} if model is None else {"model": model})
    client = Client(f"{address.rstrip('/')}/v1", _SECONDS)
    try:
        answer = Completion.from_json(client.post("/completions", body))
        if answer.read not in (None, len(prompt)):  # it would compute something else
            raise RequestError(f"it read {answer.read} tokens of a prompt of {len(prompt)}")
        values = answer.next_log_probs(vocabulary)
    except RequestError as error:
        raise ExportError(
            f"{shown_url(client.url)} does not answer as an engine with the miniature ({error}); "
            f"is the server running? Give --url the address of vLLM, SGLang or llama.cpp with the "
            f"written miniature, without a path"
        ) from error
    found = torch.full((vocabulary,), torch.nan)
    for token, value in values.items():
        if value > _NO_CHANCE:
            found[token] = value
    return found


def llama_cpp(
    words: Sequence[str], prompts: Sequence[Sequence[int]], vocabulary: int
) -> torch.Tensor:
    """Return log-probabilities of llama.cpp run with a command line, ``[prompts, vocabulary]``."""
    with serving(words) as address:
        return torch.stack([completed(address, prompt, vocabulary) for prompt in prompts])


def mlx(folder: str | Path, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return log-probabilities of mlx-lm for the model in a folder, ``[prompts, vocabulary]``.

    Each prompt begins the last one.
    """
    needed = 'mlx-lm", and without an Apple GPU also "mlx[cpu]'
    mx = optional("mlx.core", needs="this engine needs", extra=needed, kind=ExportError)
    mlx_lm = optional("mlx_lm.utils", needs="this engine needs", extra=needed, kind=ExportError)
    try:
        model, _ = mlx_lm.load_model(Path(folder))
        logits = model(mx.array([prompts[-1]]))[0, mx.array([len(p) - 1 for p in prompts])]
        return torch.tensor(logits.astype(mx.float32).tolist()).log_softmax(-1)
    except (TypeError, ValueError) as error:  # raised for a base that is not a number
        raise ExportError(
            f"mlx-lm cannot run this folder ({first_line(error)}); write the config.json of "
            f"rope_ext.export(model, 'mlx') into it, if export supports the patch"
        ) from error
