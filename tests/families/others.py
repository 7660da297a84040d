"""The checks of classes outside of the causal-LM and image-text mappings.

Encoders, embedders, heads, encoder-decoders, audio: whatever rotates. They are those of
``checks``, on whatever output a class gives for the inputs that it takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

import rope_ext
from rope_ext.patching import current_patch
from rope_ext.rotary.sites import RotarySite, find_sites, text_decoder, text_parts
from tests.families.checks import (
    CACHED,
    CHANGED,
    TOKENS,
    Check,
    Subject,
    accepted_positions,
    changes_positions,
    distance_of,
    equal,
    equals_native,
    last_line,
    leaves_sliding,
    reloads,
    restores,
    rotations,
)
from tests.families.zoo import LENGTH
from tests.helpers.both_directions import in_both_directions
from tests.helpers.positions import METHODS

Inputs = Callable[[Any, int], dict[str, Any]]
ROTATIONS_ALONE = "checked on its rotary modules: it needs inputs of its own"
LARGE = 20_000_000
"""Parameters of a class that its configuration does not make tiny, such as a vocoder's."""
FORMULA = 1e-4
"""Hidden states are of size 5; angles are float32."""


def _text(model: Any, tokens: int) -> dict[str, Any]:
    ids = torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids[:, :tokens]}
    if model.config.is_encoder_decoder and model.get_encoder() is not model:
        given |= _written(model, tokens)
    return given


def _written(model: Any, tokens: int) -> dict[str, Any]:
    ids = torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(2))[:, :tokens]
    channels = getattr(model.config.get_text_config(), "num_channels", None)
    return {"decoder_input_ids": ids if channels is None else _channels(ids, channels)}


def _channels(ids: torch.Tensor, count: int) -> torch.Tensor:
    return ids[..., None].expand(-1, -1, count)


def _embedded(model: Any, tokens: int) -> dict[str, Any]:
    columns = model.config.get_text_config().hidden_size
    states = torch.randn(2, TOKENS, columns, generator=torch.Generator().manual_seed(1))
    return {"inputs_embeds": states[:, :tokens]}


def _sound(bands: str) -> Inputs:
    def make(model: Any, tokens: int) -> dict[str, Any]:
        count = 8 * tokens  # most encoders reduce it four times
        parts = [model.config, *(v for v in vars(model.config).values() if hasattr(v, "to_dict"))]
        sizes = [getattr(part, bands, None) for part in parts]
        columns = next(filter(None, sizes))
        states = torch.randn(2, 8 * TOKENS, columns, generator=torch.Generator().manual_seed(1))
        return {model.main_input_name: states[:, :count]}

    return make


def _wave(model: Any, tokens: int) -> dict[str, Any]:
    wave = torch.randn(2, 384 * TOKENS, generator=torch.Generator().manual_seed(1))
    given = {"input_values": 0.1 * wave[:, : 384 * tokens]}
    return given | (_written(model, tokens) if model.config.is_encoder_decoder else {})


INPUTS: tuple[Inputs, ...] = (
    _text,
    _embedded,
    _wave,
    _sound("num_mel_bins"),
    _sound("feature_size"),
)


class OtherSubject(Subject):
    """A tiny model of any class, run as a whole, by its decoder, or by its rotary modules."""

    def __init__(
        self, model: PreTrainedModel, options: dict[str, Any], remarks: Iterable[str] = ()
    ) -> None:
        self.model, self.options = model, options  # as the base class sets them
        self.make, self.whole = self._inputs()
        super().__init__(model, options, remarks)
        if self.make is None:
            self.remarks.append(ROTATIONS_ALONE)

    def _inputs(self) -> tuple[Inputs | None, bool]:
        """Return the first inputs for which it rotates, and whether the whole runs."""
        large = sum(parameter.numel() for parameter in self.model.parameters()) > LARGE
        # Text does not run what is large: encoders of images and of sound.
        inputs = (_text, _embedded) if large else INPUTS
        for whole in (True, False):
            for make in inputs:
                self.make, self.whole = make, whole
                try:
                    seen = self._rotated()
                    again = self.logits()
                    if seen is not None and torch.equal(seen, again):
                        return make, whole
                except Exception:  # whatever a class raises that needs other inputs
                    continue
        return None, True

    def _rotated(self) -> torch.Tensor | None:
        """Outputs, if rotary modules of its sites were called."""
        called: set[Any] = set()
        modules = {site.module for site in self.sites()}
        handles = [m.register_forward_hook(lambda one, *_: called.add(one)) for m in modules]
        try:
            found = self.logits()
        finally:
            for handle in handles:
                handle.remove()
        return found if called and found.numel() else None

    @torch.no_grad()
    def logits(self, model: Any = None, tokens: int = TOKENS) -> torch.Tensor:
        """Every tensor of numbers that it returns, in one row."""
        model = model or self.model
        if self.make is None:
            return torch.cat([_row(rotations(site)) for site in self._sites_of(model)], 1)
        run = model if self.whole else text_decoder(model)
        output = run(**self.make(run, tokens))
        parts = [output[0], getattr(output, "encoder_last_hidden_state", None)]
        return torch.cat([_row(part) for part in parts if part is not None], 1)

    def sites(self) -> list[RotarySite]:
        return self._sites_of(self.model)

    def _sites_of(self, model: Any) -> list[RotarySite]:
        length = self.options.get("original_max_position_embeddings")
        found = []
        for part in text_parts(model):
            state = current_patch(part)
            found += find_sites(part, length) if state is None else state.sites
        return found

    @property
    def loader(self) -> Any:
        return type(self.model)


def _row(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x).reshape(1, -1) if x.is_complex() else x.reshape(1, -1)


def _moves(subject: Subject) -> Iterator[Check]:
    """The patch changes something, and nothing else does."""
    with subject.patched("yarn"):
        after = subject.logits()
    distance = distance_of(after, subject.unpatched)
    again = distance_of(subject.logits(), subject.unpatched)
    yield Check("repeatable", again == 0, f"{again:.1e} between two unpatched forwards")
    yield Check("changes", bool(after.isfinite().all()) and distance > CHANGED, f"{distance:.1e}")


def _follows(subject: OtherSubject) -> Iterator[Check]:
    """A dynamic method equals the same with the length of the text, or is refused."""
    if subject.make is None:
        return
    try:
        with subject.patched("dynamic_ntk"):
            found = subject.logits()
    except rope_ext.RopeExtError as error:
        yield Check("dynamic", None, last_line(error))
        subject.remarks.append("dynamic methods need length=")
        return
    with subject.patched("dynamic_ntk", length=TOKENS):
        distance = distance_of(found, subject.logits())
    yield equal("dynamic", distance, CACHED)


def _maps(subject: OtherSubject) -> Iterator[Check]:
    """Position methods: refused, or nothing changes within the window and the formula beyond."""
    options = accepted_positions(subject)
    if options is None:
        yield Check("positions unchanged", None, subject.remarks[-1])
        return
    if subject.make is None:
        yield Check("positions unchanged", None, ROTATIONS_ALONE)
        return
    yield from changes_positions(subject, options)
    if not subject.scales_all and not options:
        yield from _equals_formula(subject)


def _equals_formula(subject: OtherSubject) -> Iterator[Check]:
    """Attention in both directions equals its dense formula in float64."""
    with subject.patched("self_extend", attention_factor=1, **METHODS["self_extend"]):
        parts = [(part, current_patch(part)) for part in text_parts(subject.model)]
        both = [part for part, state in parts if state and "direction: both" in str(state.notes)]
    if not both:
        return  # causal attention is checked with the families
    decoder = copy.deepcopy(both[0]).double()
    ids = torch.arange(90)[None] * 37 % 57 + 3  # no padding
    places = torch.arange(90)[None]
    given = {"log_n": LENGTH, **METHODS["self_extend"]}
    with torch.no_grad(), in_both_directions(decoder, "self_extend", places, 0 * places, **given):
        wanted = decoder(input_ids=ids)[0]
    rope = subject.options | {"attention_factor": 1, **METHODS["self_extend"]}
    rope_ext.patch(decoder, "self_extend", factor=4, **rope)
    with torch.no_grad():
        distance = distance_of(decoder(input_ids=ids)[0], wanted)
    yield equal("formula", distance, FORMULA)


OTHER_CHECKS: tuple[Callable[[Any], Iterator[Check]], ...] = (
    _moves,
    equals_native,
    leaves_sliding,
    _follows,
    _maps,
    restores,
    reloads,
)
