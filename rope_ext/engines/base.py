"""Shared by all engines: exports, refusals, and the frequencies of a patch.

Each engine module states the version whose formulas it follows and that was tested, if possible.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from rope_ext.config.nested import text_of
from rope_ext.errors import ExportError, LoadError, MeasureError, UnsupportedModelError
from rope_ext.methods import Rope
from rope_ext.methods.temperature import SSMax, yarn_factor
from rope_ext.patching import Patch
from rope_ext.position import direction
from rope_ext.quoting import Printed, printable, printable_lines
from rope_ext.rotary.sites import text_config
from rope_ext.saving.checkpoints import load_config
from rope_ext.saving.drafts import write_whole
from rope_ext.saving.folder import Saved

_DATA = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
DRAFTS: list[str] = _DATA["drafts"]
"""Families whose checkpoints have a head for speculative decoding (MTP), which uses RoPE, too."""
_MODELFILE = re.compile(r"FROM \./\S+\.gguf\nPARAMETER num_ctx \d+\n")


@dataclass(frozen=True)
class Family:
    """How an engine interprets the RoPE parameters of some families: a row of its table."""

    families: str  # values of `model_type`, separated by spaces
    kinds: Sequence[str] = ("default", "linear", "yarn", "llama3", "longrope")
    """Values of ``rope_type`` that the engine computes like transformers; ``"default"`` means that
    the base may differ. In llama.cpp, ``"longrope"`` stands for any table."""
    reason: str = ""  # why the other values are not supported
    mla: bool = False  # its YaRN is DeepSeek's, with other option names
    usual: bool = False  # vLLM: its YaRN supports the default temperature only
    stretched: int = 1  # vLLM: its YaRN computes the ramp for this multiple of the trained length
    own_share: bool = False  # SGLang: it reads partial_rotary_factor outside rope_parameters
    unrun: str = ""  # vLLM: why only its rotary classes are tested
    inside: bool = False  # mlx-lm: it reads rope_parameters instead of the older fields
    whole: str = ""  # mlx-lm: `model_type` of a larger model with this text model, tested
    alone: bool = True  # mlx-lm: whether it loads the text model by itself
    name: str = ""  # llama.cpp: name of the architecture
    interleaved: bool = False
    """llama.cpp: it rotates neighboring columns, and transformers the halves of a head, so
    converters reorder the rows of query and key weights."""
    by_file: bool = False  # llama.cpp: sliding layers follow keys, but ignore flags
    centered: bool = False  # llama.cpp: norm weights are stored minus 1
    keys: Mapping[str, Any] = field(default_factory=dict)
    """llama.cpp: further GGUF keys; a string names a configuration field."""
    sliding_base: float | None = None  # llama.cpp: fixed base of sliding layers
    note: str = ""  # for readers of the table


ENGINES = {
    name: {kind: Family(**row) for row in table["rows"] for kind in row["families"].split()}
    for name, table in _DATA["engines"].items()
}
"""What each engine supports for each ``model_type``."""
ENGINES["ollama"] = ENGINES["llama.cpp"]


def miniatures() -> list[str]:
    """Families that ``verify`` supports: those with a single, flat set of RoPE parameters."""
    found = [name for table in ENGINES.values() for name, f in table.items() if f.kinds]
    return [name for name in dict.fromkeys(found) if name not in _DATA["no miniature"]]


class Refusal(Exception):
    """The reason why an engine cannot run a patch."""


@dataclass(frozen=True)
class Export(Printed):
    """Settings with which an engine computes the same as a patch; ``print`` it."""

    engine: str
    settings: Mapping[str, Any]  # under the engine's names; lengths in tokens
    command: str  # ready to paste, with the name of the model if it is known
    files: Mapping[str, str] = field(default_factory=dict)  # file name to text
    notes: tuple[str, ...] = ()  # limitations and instructions

    def write(self, folder: str | Path) -> list[Path]:
        """Write ``files`` to a directory, which is created if it does not exist.

        A ``config.json`` of the same model and a ``Modelfile`` of ours are replaced. Raises
        ExportError if there are no files, or another file has one of their names.
        """
        folder = Path(folder)
        if not self.files:
            raise ExportError(f"{self.engine} reads no file; its settings are in the command")
        if folder.exists() and not folder.is_dir():
            raise ExportError(f"{folder} is a file; give the name of a folder")
        for name, text in self.files.items():
            if not _replaceable(folder / name, text):
                raise ExportError(f"{folder / name} exists and would be lost; give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            write_whole(folder / name, text)
        return [folder / name for name in self.files]

    def __str__(self) -> str:
        lines = [self.command, *(f"# {printable(note)}" for note in self.notes)]
        for name, text in self.files.items():
            lines += [f"# {printable(name)}:", printable_lines(text.rstrip("\n"))]
        return "\n".join(lines)


def _replaceable(path: Path, text: str) -> bool:
    """Whether ``text`` may replace a file: the files are equal, or describe the same model."""
    if not path.exists():
        return True
    try:
        there = path.read_text(encoding="utf-8")
        if path.name != "config.json":
            return there == text or bool(_MODELFILE.fullmatch(there))
        before = json.loads(there)
        after = json.loads(text)
        return _same_model(before, after)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


_KEEP_BASE = ("yarn", "llama3", "longrope")
"""Types whose configuration has the base and the trained length of what they extend."""


def _same_model(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether two configurations differ at most by an extension of the context."""
    names = "model_type vocab_size num_hidden_layers hidden_size intermediate_size sliding_window"
    if any(before.get(name) != after.get(name) for name in names.split()):
        return False
    (_, base, trained), (kind, new_base, extends) = map(_rope_of, (before, after))
    # Other types may change the base and need not say what they extend.
    return kind not in _KEEP_BASE or (base, trained) == (new_base, extends)


def _rope_of(config: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """Read a configuration's rope_type, base and trained length, in any version's names."""
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = fields.get("rope_type", fields.get("type", "default"))
    base = fields.get("rope_theta", config.get("rope_theta"))
    length = fields.get("original_max_position_embeddings")
    return kind, base, length or config.get("max_position_embeddings")


def is_shipped(saved: Saved | None, state: Patch) -> bool:
    """Whether a folder has its own two LongRoPE tables, which no patch wrote."""
    return saved is not None and saved.source == "rope_parameters" and state.method.is_dynamic


def in_folder(fields: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether a saved configuration has these fields; missing fields count as their defaults."""
    defaults: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0}
    if fields.get("rope_type") == "yarn":
        defaults["attention_factor"] = yarn_factor(fields["factor"])

    def same(value: Any, there: Any) -> bool:
        if isinstance(value, Mapping):
            return isinstance(there, Mapping) and in_folder(value, there)
        if isinstance(value, float) and isinstance(there, (int, float)):
            return math.isclose(value, there, rel_tol=1e-9)
        return value == there

    return all(same(v, saved.get(name, defaults.get(name))) for name, v in fields.items())


@dataclass(frozen=True)
class Scaling:
    """One fixed set of frequencies for an engine to compute."""

    rope: Rope  # unscaled
    inv_freq: torch.Tensor  # float64, [pairs], radians per token
    scaling: float  # factor of cosine and sine
    target: int  # context after the extension, tokens

    @classmethod
    def from_patch(cls, state: Patch) -> Self:
        site = state.scaled[0]
        rope = Rope.geometric(site.rope.base, site.rope.dim, site.rope.length)
        return cls(rope, *state.frequencies_of(site), state.target_length)

    @property
    def divisors(self) -> list[float]:
        """The divisors of the frequencies of ``rope``; 1e30 for pairs that do not rotate."""
        moving = self.inv_freq > 0
        return torch.where(moving, self.rope.inv_freq / self.inv_freq, 1e30).tolist()


def refuse_unproven(state: Patch, sliding_base: float | None = None) -> None:
    """Raise unless ``state`` is one fixed set of frequencies.

    ``sliding_base`` is the base that the engine always uses in sliding layers.
    """
    refuse_positions(state)
    sliding = [site.rope.base for site in state.sites if site not in state.scaled]
    if len(state.scaled) > 1 or (sliding and sliding != [sliding_base]):
        raise Refusal("models with several rotary embeddings have not been tested")


def refuse_positions(state: Patch, dynamic: bool = False) -> None:
    """Raise if ``state`` changes more than frequencies, or if it is dynamic, unless ``dynamic``."""
    method = state.method
    options = state.options
    if getattr(method, "start_tokens", 0):
        raise Refusal("it rotates all tokens with the same frequencies; patch with start_tokens=0")
    if method.replaces_attention:
        raise Refusal("it has no setting that changes the positions of queries and keys")
    if options.bias is not None:
        raise Refusal(f"it has no setting that adds a bias ({options.bias.name}) to logits")
    if options.layers is not None:
        raise Refusal("it rotates all layers with the same frequencies; patch without layers=")
    temperature = method.tempered(state.scaled[0].rope)
    if temperature is not None:
        instead = "use attention_factor instead, whose square multiplies the logits that rotate"
        if isinstance(temperature, SSMax):
            instead = "run the model with transformers (rope_ext.from_pretrained)"
        raise Refusal(
            f"it has no setting that multiplies queries (temperature={method.temperature!r}); "
            f"{instead}"
        )
    if method.is_dynamic and not dynamic:
        raise Refusal(
            "no supported engine chooses frequencies by the length of each request: patch with "
            "length=TOKENS to fix them"
        )


def family_of(state: Patch, engine: str, shipped: bool = False) -> Family:
    """Look up a model's family in an engine's table; refuse what no ``rope_type`` expresses.

    ``shipped``: see :func:`is_shipped`.
    """
    refuse_positions(state, dynamic=shipped)
    kind = text_config(state.decoder).model_type
    families = ENGINES[engine]
    if kind not in families:
        raise Refusal(
            f"the family {kind!r} has not been tested with this engine; tested families: "
            f"{', '.join(name for name, family in families.items() if family.kinds)}"
        )
    if not (shipped or state.saved.native):
        raise Refusal("no rope_type builds these frequencies")
    return families[kind]


def reads_both_ways(state: Patch) -> bool:
    """Whether the model reads its text in both directions, as encoders and embedders do."""
    parts = state.decoder.modules()
    modules = [part for part in parts if isinstance(getattr(part, "is_causal", None), bool)]
    with suppress(UnsupportedModelError):  # layers of both kinds: it has cross-attention
        return direction.reads_both_ways(text_config(state.decoder), {}, modules)
    return False


def refuse_kind(family: Family, kind: str) -> None:
    """Raise unless an engine supports this ``rope_type`` for a family."""
    if kind not in family.kinds:
        raise Refusal(f"{family.reason} (rope_type {kind!r})")


def precise_note(state: Patch) -> list[str]:
    return ["it computes angles in float32, the patch here in float64"] * state.precise


def is_nested(parameters: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in parameters.values())


def folder_of(saved: Saved | None) -> str:
    return saved.name if saved is not None and saved.name else "FOLDER"


def served_config(own: Any) -> Any:
    """Return the configuration that an engine reads for a model with the configuration ``own``.

    transformers can load only the text part of a larger model; engines serve the larger model.
    """
    name = getattr(own, "_name_or_path", "")
    if name and not own.architectures:  # a sub-configuration has none
        with suppress(LoadError, MeasureError):  # without a configuration, no engine can serve it
            found = load_config(name)
            if text_of(found).model_type == own.model_type:
                return found
    return own
