"""Inputs with an image for any tiny model of ``zoo`` that takes one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

_SIDE = 4
"""Patches along each side of the image."""

_IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id")


class NoImages(RuntimeError):
    """No layout of pixels that is known here suits the model."""


def image_token(model: PreTrainedModel) -> int | None:
    """The token that stands for one feature of an image; None: the model has none."""
    return _first(model.config, *_IMAGE_TOKENS)


@torch.no_grad()
def with_image(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids (1, tokens) that begin with an image, and the other arguments of the forward.

    Raises:
        NoImages: no layout suits, or the logits do not depend on the pixels.
    """
    takes = inspect.signature(model.forward).parameters
    for layout in _layouts(model):
        if not layout.keys() <= takes.keys():
            continue
        try:
            placed = _placed(model, ids, layout)
            before = model(input_ids=placed, **layout, **kinds(model, placed)).logits
            other = {**layout, "pixel_values": 1 + layout["pixel_values"]}
            after = model(input_ids=placed, **other, **kinds(model, placed)).logits
        except Exception:  # whatever a model raises over pixels that are laid out differently
            continue
        if not torch.equal(before, after):
            return placed, layout
    raise NoImages(f"no layout of pixels suits {type(model).__name__}")


def kinds(model: PreTrainedModel, ids: torch.Tensor, prompt: int = 10**6) -> dict[str, Any]:
    """What the processors of some families say of each token, here in ids (rows, tokens).

    ``prompt`` is the number of tokens of the prompt; PaliGemma reads them in both directions.
    """
    takes = inspect.signature(model.forward).parameters
    images = (ids == image_token(model)).long()
    if "token_type_ids" in takes and model.config.model_type == "paligemma":
        return {"token_type_ids": (torch.arange(ids.shape[1]) >= prompt).long().expand_as(ids)}
    names = {"mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"}
    return dict.fromkeys(names & takes.keys(), images)


def _placed(model: PreTrainedModel, ids: torch.Tensor, layout: dict[str, Any]) -> torch.Tensor:
    """``ids`` with a token for each feature of the image, behind the first two."""
    features = getattr(model, "get_image_features", None) or model.model.get_image_features
    takes = inspect.signature(inspect.unwrap(features)).parameters
    passed = layout.keys() if "image_merge_sizes" in layout else layout.keys() & takes.keys()
    output = features(**{name: layout[name] for name in passed})
    found = getattr(output, "pooler_output", output)
    found = output.last_hidden_state if found is None else found
    width = model.config.get_text_config(decoder=True).hidden_size
    parts = found if isinstance(found, (list, tuple)) else [found]
    count = sum(part.numel() for part in parts) // width
    placed = ids.clone()
    placed[:, 2 : 2 + count] = image_token(model)
    return placed


def _layouts(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """How processors lay out the pixels of one image."""
    vision = _first(model.config, "vision_config", "vq_config") or model.config
    patch = _first(vision, "patch_size") or 8
    patch = patch if isinstance(patch, int) else patch[0]
    channels, frames = 3, _first(vision, "temporal_patch_size", "patch_temporal") or 1
    side = _SIDE * patch
    generator = torch.Generator().manual_seed(2)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    patches = _SIDE * _SIDE
    grid = {"image_grid_thw": torch.tensor([[1, _SIDE, _SIDE]])}
    yield {"pixel_values": pixels(patches, channels * frames * patch * patch), **grid}
    yield {"pixel_values": pixels(patches, channels * patch * patch), **grid}
    yield {"pixel_values": pixels(patches, channels, patch, patch), **grid}
    merged = {"image_merge_sizes": torch.tensor([1])}
    yield {"pixel_values": pixels(patches, channels * patch * patch), **grid, **merged}
    size = {"image_sizes": torch.tensor([[side, side]])}
    yield {"pixel_values": pixels(1, channels, side, side), **size}
    yield {"pixel_values": pixels(1, channels, side, side)}
    yield {"pixel_values": pixels(1, 3, channels, side, side), **size}  # the whole, two tiles
    mask = torch.ones(1, 1, side, side, dtype=torch.bool)
    yield {"pixel_values": pixels(1, 1, channels, side, side), "pixel_attention_mask": mask}
    yield {
        "pixel_values": pixels(1, patches, channels * patch * patch),
        "pixel_attention_mask": torch.ones(1, patches, dtype=torch.int32),
        "spatial_shapes": torch.tensor([[_SIDE, _SIDE]]),
    }


def _first(config: PreTrainedConfig, *names: str) -> Any:
    return next((v for name in names if (v := getattr(config, name, None)) is not None), None)
