"""The checks that every family of ``tests.families.coverage`` goes through.

Each takes a :class:`Subject`, a tiny model whose trained context is ``LENGTH`` tokens, and yields
what it found. All of them leave the model unpatched.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import rope_ext
from rope_ext.patching import current_patch
from rope_ext.rotary.sites import RotarySite, find_sites, text_config, text_decoder
from tests.families.images import NoImages, image_token, kinds, with_image
from tests.families.zoo import LENGTH, TEXT_VOCAB, VOCAB, NotBuildable

FACTOR = 4
TOKENS = 3 * LENGTH
"""Length of the input: beyond the trained context, within the extended one."""

CHANGED = 1e-3
"""Least change of a logit by a patch; a hundred times what we call equal."""

EQUAL = 1e-5
"""Frequencies that agree to float32 rounding, times positions up to ``TOKENS``."""

CACHED = 1e-4
"""Cached decoding against one forward: other matrix shapes, other orders of summation."""

KEPT = 1e-6
"""A cosine that we compute and one that the model computes, perhaps as a complex number."""

POSITIONS, POSITIONS_WINDOWED, POSITIONS_REFUSED = "yes", "window only", "refused"
"""Whether position methods are accepted: by default, with ``sliding_layers="scale"``, or not."""

NOTHING_GAINED = (
    "only its sliding layers use RoPE, the full ones have no positions (NoPE), so scaling cannot "
    "extend its context"
)

TEXT_ALONE = "checked with text alone"

_DECODED = 4
# Written out again: a check must not share a mistake of rope_ext.rotary.sites.
_LOCAL = ("sliding", "chunked", "local")


@dataclass(frozen=True)
class Check:
    """One check of one family.

    Args:
        name: what was checked.
        passed: None where it does not apply or cannot be made.
        detail: what was measured, or why it was not made.
    """

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class Way:
    """Sizes of the chunks of a prompt, and how they meet a cache."""

    prefill: tuple[int, ...]
    static: bool = False
    padding: int = 0


_PLAIN = (Way((80, 16)), Way((96,)))
_DEMANDING = (
    Way((66, 3, 5), static=True, padding=21),
    Way((74,), padding=21),
    Way((74,), static=True),
)


class Subject:
    """A tiny model under test, and what was measured on it before anything patched it.

    Raises NotBuildable if the model does not run.

    Args:
        model: never patched so far.
        options: of every patch.
        remarks: what a user should know; checks add to them.
    """

    def __init__(
        self, model: PreTrainedModel, options: dict[str, Any], remarks: Iterable[str] = ()
    ) -> None:
        self.model, self.options, self.remarks = model, options, list(remarks)
        self.positions = POSITIONS_REFUSED
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, TEXT_VOCAB, (2, TOKENS), generator=generator)
        try:
            self.logits(tokens=LENGTH)
        except Exception as error:  # nothing has patched it
            raise NotBuildable(f"does not run unpatched: {last_line(error)}") from error
        shorter = snapshot(model)
        self.unpatched = self.logits()
        self.pristine = snapshot(model)
        self.running = changed(shorter, self.pristine)  # what it keeps of its last input

    @torch.no_grad()
    def logits(self, model: PreTrainedModel | None = None, tokens: int = TOKENS) -> torch.Tensor:
        return (model or self.model)(input_ids=self.ids[:, :tokens]).logits

    @torch.no_grad()
    def decoded(self, way: Way) -> tuple[torch.Tensor, int]:
        """Logits of the first tokens through a cache, chunk by chunk, and how many tokens.

        A padded second row holds the same tokens further to the right; its last ones are left out.
        """
        model, begin, parts = self.model, 0, []
        total = sum(way.prefill) + _DECODED
        ids, mask = self.ids[:, :total].clone(), torch.ones(2, total, dtype=torch.long)
        ids[1], mask[1, : way.padding] = ids[1].roll(way.padding), 0
        ids[mask == 0] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        parameters = inspect.signature(model.forward).parameters
        takes_positions = "position_ids" in parameters
        # Families of transformers 5.24 know no other name, and ignore the older one.
        name = "cache" if "cache" in parameters else "past_key_values"
        cache = StaticCache(config=model.config, max_cache_len=total + 12) if way.static else None
        for size in (*way.prefill, *[1] * _DECODED):
            part = slice(begin, begin := begin + size)
            given: dict[str, Any] = {name: cache, "use_cache": True}
            if takes_positions:  # as generate does; not every family counts its cache by itself
                given["position_ids"] = positions[:, part]
            if way.padding:
                given["attention_mask"] = mask[:, :begin]
            output = model(input_ids=ids[:, part], **given)
            cache = output[name]
            parts.append(output.logits)
        return torch.cat(parts, 1), total

    def off(self, way: Way, recomputed: torch.Tensor | None = None) -> float:
        """How far decoding through a cache is from one forward."""
        said, total = self.decoded(way)
        right = self.logits(tokens=total) if recomputed is None else recomputed
        return max(
            distance_of(said[0], right[0]),
            distance_of(said[1, way.padding :], right[1, : total - way.padding]),
        )

    @functools.cached_property
    def ways(self) -> list[tuple[Way, float]]:
        """Ways in which the unpatched model agrees with itself, and by how much.

        First the plainest one, which may not agree, then the most demanding one that does.
        """
        plain = [(way, self.off(way)) for way in _PLAIN]
        found = [next((one for one in plain if one[1] <= CACHED), min(plain, key=lambda w: w[1]))]
        for way in _DEMANDING:
            try:
                off = self.off(way)
            except Exception:  # whatever transformers raises, there is nothing to compare
                continue
            if off <= CACHED:
                return [*found, (way, off)]
        return found

    def patched(self, method: str, **options: Any) -> AbstractContextManager[PreTrainedModel]:
        options = {**self.options, **options}
        return rope_ext.patched(self.model, method, factor=FACTOR, **options)

    @property
    def loader(self) -> Any:
        """What plain transformers loads it with."""
        # The text part of some families has a model class but no entry in the Auto mapping.
        auto = type(self.model.config) in MODEL_FOR_CAUSAL_LM_MAPPING
        return AutoModelForCausalLM if auto else type(self.model)

    @property
    def scales_all(self) -> bool:
        """Whether sets of layers with a limited window are scaled too."""
        return self.options.get("sliding_layers") == "scale"

    def sites(self) -> list[RotarySite]:
        length = self.options.get("original_max_position_embeddings")
        return find_sites(text_decoder(self.model), length)


def _changes(subject: Subject) -> Iterator[Check]:
    """The patch moves the logits beyond the trained length."""
    with subject.patched("yarn"):
        after = subject.logits()
    beyond = slice(LENGTH, None)
    distance = distance_of(after[:, beyond], subject.unpatched[:, beyond])
    again = distance_of(subject.logits(), subject.unpatched)
    yield Check("repeatable", again == 0, f"{again:.1e} between two unpatched forwards")
    yield Check("changes", bool(after.isfinite().all()) and distance > CHANGED, f"{distance:.1e}")


def equals_native(subject: Subject) -> Iterator[Check]:
    """The patched model is the one that transformers builds from a configuration of its own."""
    pairs = {len(site.loaded) for site in subject.sites() if not site.local or subject.scales_all}
    table = torch.linspace(1, FACTOR, max(pairs)).tolist()
    compared: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("yarn", {}, {"rope_type": "yarn"}),
        ("pi", {}, {"rope_type": "linear"}),
        ("llama3", {}, {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        (
            "longrope",
            {"long_factor": table},
            {"rope_type": "longrope", "short_factor": table, "long_factor": table},
        ),
    )
    for method, options, entry in compared:
        name = f"native {entry['rope_type']}"
        if method == "longrope" and len(pairs) > 1:
            yield Check(name, None, "its sets have different numbers of pairs")
            continue
        entry |= {"factor": float(FACTOR), "original_max_position_embeddings": LENGTH}
        try:
            theirs = subject.logits(_native_twin(subject, entry))
        except Exception as error:  # whatever transformers raises, there is nothing to compare
            yield Check(name, None, last_line(error))
            continue
        with subject.patched(method, **options):
            distance = distance_of(subject.logits(), theirs)
        yield equal(name, distance, EQUAL)


def _native_twin(subject: Subject, entry: dict[str, Any]) -> PreTrainedModel:
    """The same weights under the same configuration plus ``entry``, made without rope_ext."""
    config = copy.deepcopy(subject.model.config)
    paths = {id(part): path for path, part in _configs(subject.model.config)}
    own = [getattr(site.module, "config", None) for site in subject.sites() if not site.local]
    wanted = {paths[id(part)] for part in own if id(part) in paths}
    wanted = wanted or {paths[id(subject.model.config.get_text_config(decoder=True))]}
    for path, part in _configs(config):
        if path in wanted:
            part.rope_parameters = _scaled(part.rope_parameters, entry, subject.scales_all)
            part.max_position_embeddings = FACTOR * LENGTH
            if hasattr(part, "original_max_position_embeddings"):
                part.original_max_position_embeddings = LENGTH
    with torch.random.fork_rng(devices=[]):
        twin = type(subject.model)(type(config).from_dict(config.to_dict()))
    twin.load_state_dict(subject.model.state_dict())
    return twin.float().eval()


def _scaled(parameters: dict[str, Any], entry: dict[str, Any], all_sets: bool) -> dict[str, Any]:
    """Rope parameters with ``entry`` in every set, or in those of unlimited layers."""
    parameters = copy.deepcopy(parameters)
    parts = {name: part for name, part in parameters.items() if isinstance(part, dict)}
    for name, part in (parts or {"": parameters}).items():
        if not all_sets and any(word in name for word in _LOCAL):
            continue
        there = part.get("rope_type", "default")
        if there == "default":
            part.update(entry)
        elif entry["rope_type"] == "linear":  # every type but the default takes a factor
            part["factor"] = entry["factor"]
        else:
            raise ValueError(f"transformers has no {entry['rope_type']} on top of {there!r}")
    return parameters


def leaves_sliding(subject: Subject) -> Iterator[Check]:
    """Rotary sets of layers with a limited window: same buffers, same cosines and sines."""
    if subject.scales_all:
        return
    buffers = {
        name: buffer.clone()
        for name, buffer in subject.model.named_buffers()
        if name.endswith("inv_freq") and any(word in name.split(".")[-1] for word in _LOCAL)
    }
    with subject.patched("yarn"):
        state = current_patch(subject.model)
        left = [site for site in state.sites if site not in state.scaled]
    buffers |= {f"{site.name}.{site.buffer}": site.loaded for site in left}
    if not buffers:
        return
    before = [rotations(site) for site in left]
    with subject.patched("yarn"):
        now = dict(subject.model.named_buffers()) | {
            f"{site.name}.{site.buffer}": site.module._buffers[site.buffer] for site in left
        }
        same = all(torch.equal(buffer, now[name]) for name, buffer in buffers.items())
        after = [rotations(site) for site in left]
    same = same and bool(left) and all(map(torch.equal, before, after))
    yield Check("sliding untouched", same, f"{len(left)} sets, {len(buffers)} buffers")


def _keeps_sliding(subject: Subject) -> Iterator[Check]:
    """``sliding_layers="keep"``: their layers get unpatched cosines, the others patched ones."""
    if subject.scales_all or not any(site.shared for site in subject.sites()):
        return
    kinds = text_config(subject.model).layer_types
    try:
        before = _received(subject)
        with subject.patched("yarn", sliding_layers="keep"):
            kept, after = subject.logits(), _received(subject)
    except rope_ext.UnsupportedModelError as error:
        # Refused for one of two reasons, which have the same class.
        windowed = "sees a limited window only" in str(error)
        refused = "sliding_layers='keep' is refused: its attention takes no cosines"
        subject.remarks.append(NOTHING_GAINED if windowed else refused)
        yield Check("sliding kept", None, last_line(error))
        return
    moved: dict[bool, list[float]] = {True: [], False: []}
    for index, value in after.items():
        local = any(word in kinds[index] for word in _LOCAL)
        moved[local].append(distance_of(value, before[index]))
    stayed = max(moved[True], default=math.inf)
    passed = stayed <= KEPT and min(moved[False], default=math.inf) > CHANGED
    yield Check("sliding kept", passed, f"{stayed:.1e}; full layers {moved[False]}")
    if distance_of(kept, subject.unpatched) <= EQUAL:
        subject.remarks.append(NOTHING_GAINED)


def _received(subject: Subject) -> dict[int, torch.Tensor]:
    """The cosines that each attention layer is given."""
    seen: dict[int, torch.Tensor] = {}

    def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = kwargs.get("position_embeddings")
        if given is None:
            given = next((arg for arg in args[1:] if arg is not None), None)
        if given is None:  # a layer without positions
            return
        first = given if isinstance(given, torch.Tensor) else given[0]
        seen[module.layer_idx] = first.clone()

    attentions = [
        module
        for module in text_decoder(subject.model).modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and "Attention" in type(module).__name__
    ]
    handles = [m.register_forward_pre_hook(look, with_kwargs=True) for m in attentions]
    try:
        subject.logits()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _decodes(subject: Subject) -> Iterator[Check]:
    """Decoding through caches equals one forward of the same tokens."""
    try:
        ways = subject.ways
    except Exception as error:  # a family whose unpatched forward takes no cache
        for method in ("yarn", "dynamic_ntk"):
            yield Check(f"cached {method}", None, f"the unpatched model cannot: {last_line(error)}")
        subject.remarks.append("its own cache does not work here, so cached decoding is not tested")
        return
    yield _decoding(subject, "yarn")
    way, native = ways[0]
    with subject.patched("dynamic_ntk"):
        said, total = subject.decoded(way)
    # A sequence keeps the frequencies of its first forward: recompute with those.
    with subject.patched("dynamic_ntk", length=way.prefill[0]):
        distance = distance_of(said, subject.logits(tokens=total))
    yield equal("cached dynamic_ntk", distance, max(CACHED, 2 * native * (native > CACHED)))
    if native > CACHED:
        subject.remarks.append(
            f"its own cached decoding differs from recomputation, by {native:.1e} unpatched"
        )


def _decoding(subject: Subject, method: str, **options: Any) -> Check:
    """How far decoding is off in all ways, in units of what each of them may be off."""
    worst = 0.0
    with subject.patched(method, **options):
        for way, native in subject.ways:
            worst = max(worst, subject.off(way) / max(1, 2 * native / CACHED * (native > CACHED)))
    return equal(f"cached {method}", worst, CACHED)


def accepted_positions(subject: Subject) -> dict[str, Any] | None:
    """Note whether position methods are accepted; returns the options, or None."""
    options: dict[str, Any] = {}
    for verdict, options in ((POSITIONS, {}), (POSITIONS_WINDOWED, {"sliding_layers": "scale"})):
        try:
            with subject.patched("rerope", **options):
                subject.positions = POSITIONS_WINDOWED if subject.scales_all else verdict
                return options
        except rope_ext.UnsupportedModelError as error:
            refusal = error
    reason = last_line(refusal).split(": ", 2)[-1].split(", so ")[0]
    subject.remarks.append(f"position methods are refused: {reason}")
    return None


def changes_positions(subject: Subject, options: dict[str, Any]) -> Iterator[Check]:
    """Nothing changes within the window, and something beyond it."""
    told = {"original_max_position_embeddings": 2 * TOKENS}  # so that the window is within
    with subject.patched("rerope", window=2 * TOKENS, log_n=False, **{**options, **told}):
        distance = distance_of(subject.logits(), subject.unpatched)
    yield equal("positions unchanged", distance, CACHED)
    with subject.patched("rerope", window=5, **options):
        distance = distance_of(subject.logits(), subject.unpatched)
    yield Check("positions changed", distance > CHANGED, f"{distance:.1e}")


def _maps_positions(subject: Subject) -> Iterator[Check]:
    """Position methods: nothing changes within the window; caches do what recomputing does."""
    options = accepted_positions(subject)
    if options is None:
        yield Check("positions unchanged", None, subject.remarks[-1])
        return
    yield from changes_positions(subject, options)
    try:
        _ = subject.ways
    except Exception as error:  # as for frequency methods
        yield Check("cached rerope", None, f"the unpatched model cannot: {last_line(error)}")
        return
    yield _decoding(subject, "rerope", window=5, **options)


def _takes_images(subject: Subject) -> Iterator[Check]:
    """With an image in the prompt: as transformers' own yarn, and in a batch with text alone."""
    if image_token(subject.model) is None:
        return
    try:
        ids, pixels = with_image(subject.model, subject.ids[:1])
    except NoImages as error:
        yield Check("image changes", None, str(error))
        subject.remarks.append(TEXT_ALONE)
        return

    @torch.no_grad()
    def logits(model: PreTrainedModel = subject.model) -> torch.Tensor:
        return model(input_ids=ids, **pixels, **kinds(model, ids)).logits

    unpatched = logits()
    with subject.patched("yarn"):
        ours = logits()
    distance = distance_of(ours[:, LENGTH:], unpatched[:, LENGTH:])
    yield Check("image changes", distance > CHANGED, f"{distance:.1e}")
    entry = {"rope_type": "yarn", "factor": float(FACTOR)}
    try:
        theirs = logits(_native_twin(subject, entry | {"original_max_position_embeddings": LENGTH}))
    except Exception as error:  # as in equals_native
        yield Check("image native yarn", None, last_line(error))
    else:
        yield equal("image native yarn", distance_of(ours, theirs), EQUAL)
    options = {"sliding_layers": "scale"} if subject.positions == POSITIONS_WINDOWED else {}
    positional = subject.positions != POSITIONS_REFUSED
    if positional:
        wide = {"original_max_position_embeddings": 2 * TOKENS, "window": 2 * TOKENS}
        try:
            with subject.patched("rerope", log_n=False, **{**options, **wide}):
                distance = distance_of(logits(), unpatched)
        except rope_ext.UnsupportedModelError as error:
            positional = False
            subject.remarks.append("position methods take text alone")
            yield Check("image positions unchanged", None, last_line(error))
        else:
            yield equal("image positions unchanged", distance, CACHED)
    try:
        native = _generated(subject, ids, pixels)
    except Exception as error:  # as in _decodes
        yield Check("image generate yarn", None, f"the unpatched model cannot: {last_line(error)}")
        return
    limit = max(CACHED, 2 * native * (native > CACHED))
    with subject.patched("yarn"):
        yield equal("image generate yarn", _generated(subject, ids, pixels), limit)
    if positional:
        try:
            with subject.patched("rerope", window=5, **options):
                yield equal("image generate rerope", _generated(subject, ids, pixels), limit)
        except rope_ext.UnsupportedModelError as error:
            subject.remarks.append("position methods need a window as long as a prompt's prefix")
            yield Check("image generate rerope", None, last_line(error))
    if native > CACHED:
        subject.remarks.append(
            f"generating with an image differs from recomputation, by {native:.1e} unpatched"
        )


@torch.no_grad()
def _generated(subject: Subject, ids: torch.Tensor, pixels: dict[str, Any]) -> float:
    """How far generating in a batch, an image and a shorter text, is from each row on its own."""
    model, padding = subject.model, LENGTH // 4
    batch = torch.cat([ids, subject.ids[1:]])
    batch[1, :padding] = 0
    mask = torch.ones_like(batch)
    mask[1, :padding] = 0
    output = model.generate(
        input_ids=batch,
        attention_mask=mask,
        **pixels,
        **kinds(model, batch),
        max_new_tokens=_DECODED,
        do_sample=False,
        pad_token_id=0,
        suppress_tokens=[0, 1, 2, *range(TEXT_VOCAB, VOCAB)],
        output_logits=True,
        return_dict_in_generate=True,
    )
    generated = torch.stack(output.logits, 1)
    image, text = output.sequences[:1, :-1], output.sequences[1:, padding:-1]
    alone = [
        model(input_ids=image, **pixels, **kinds(model, image, TOKENS)).logits,
        model(input_ids=text, **kinds(model, text, TOKENS - padding)).logits,
    ]
    return distance_of(generated, torch.cat([one[:, -_DECODED:] for one in alone]))


def restores(subject: Subject) -> Iterator[Check]:
    """After unpatch: tensors, attributes, hooks, classes, configuration, logits, bit for bit."""
    accepted = subject.positions == POSITIONS or subject.scales_all
    positional = ("rerope",) if accepted and subject.positions != POSITIONS_REFUSED else ()
    for method in ("yarn", "dynamic_ntk", *positional):
        try:
            with subject.patched(method):
                subject.logits()
        except rope_ext.UnsupportedModelError as error:  # dynamic methods without length=
            yield Check(f"unpatch {method}", None, last_line(error))
            continue
        wrong = changed(subject.pristine, snapshot(subject.model)) - subject.running
        if not torch.equal(subject.logits(), subject.unpatched):
            wrong.add("logits")
        yield Check(f"unpatch {method}", not wrong, ", ".join(sorted(wrong)[:5]) or "bit for bit")


def reloads(subject: Subject) -> Iterator[Check]:
    """Saved and loaded by plain transformers, or by rope_ext where only that can: same logits."""
    with subject.patched("yarn"), tempfile.TemporaryDirectory() as folder:
        ours = subject.logits()
        native = saved_as(subject.model) != "patch again"
        subject.model.save_pretrained(folder)
        loaded = (subject.loader if native else rope_ext).from_pretrained(folder)
    distance = distance_of(subject.logits(loaded.eval()), ours)
    yield equal("reloaded" if native else "reloaded and patched again", distance, EQUAL)


CHECKS: tuple[Callable[[Subject], Iterator[Check]], ...] = (
    _changes,
    equals_native,
    leaves_sliding,
    _keeps_sliding,
    _decodes,
    _maps_positions,
    restores,
    reloads,
    _takes_images,  # last: some vision towers install hooks of their own in the first call
)


def equal(name: str, distance: float, limit: float) -> Check:
    return Check(name, distance <= limit, f"{distance:.1e}")


def distance_of(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


def last_line(error: Exception) -> str:
    """An error's last line, which in transformers' wrapped errors is the one that says why."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__


def saved_as(model: PreTrainedModel) -> str:
    """Under which type the patch in force is written into the configuration."""
    if not current_patch(model).saved.native:
        return "patch again"
    parameters = text_config(text_decoder(model)).rope_parameters
    names = {site.layer_type for site in current_patch(model).scaled}
    parts = [parameters[n] if isinstance(parameters.get(n), dict) else parameters for n in names]
    return ", ".join(sorted({part["rope_type"] for part in parts}))


@torch.no_grad()
def rotations(site: RotarySite) -> torch.Tensor:
    """What the rotary module returns, cosine and sine or the complex number, as one tensor."""
    positions = torch.arange(TOKENS).unsqueeze(0)
    extra = {} if site.layer_type is None else {"layer_type": site.layer_type}
    output = site.module(torch.zeros(1, TOKENS, 1), position_ids=positions, **extra)
    return output if isinstance(output, torch.Tensor) else torch.stack(output)


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything a patch could leave behind: tensors, attributes, hooks, classes, configuration."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state[f"{name}:class"] = type(module)
        for key, buffer in module._buffers.items():
            state[f"{name}.{key}"] = None if buffer is None else buffer.clone()
        for key, parameter in module._parameters.items():
            state[f"{name}.{key}"] = None if parameter is None else parameter._version
        for key, value in vars(module).items():
            if key.endswith("_hooks"):
                state[f"{name}:{key}"] = len(value)
            elif key not in ("_buffers", "_parameters", "_modules"):
                state[f"{name}:{key}"] = _frozen(value)
    for path, config in _configs(model.config):
        state[f"config{path}"] = copy.deepcopy(config.to_dict())
        for key, value in vars(config).items():
            state[f"config{path}:{key}"] = _frozen(value)
    return state


def _frozen(value: Any) -> Any:
    """A copy of plain values and tensors; the identity of anything else."""
    if isinstance(value, (torch.Tensor, dict, list, tuple, set)):
        return copy.deepcopy(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def _configs(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _configs(value, f"{path}.{name}")


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Names under which two snapshots differ."""

    def same(one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        if isinstance(one, (list, tuple)):
            return len(one) == len(other) and all(map(same, one, other))
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        return one is other or bool(one == other)  # weak references compare what they refer to

    gone = object()
    names = before.keys() | after.keys()
    return {name for name in names if not same(before.get(name, gone), after.get(name, gone))}
