"""Embeddings of texts: a transformers model, and what its sentence-transformers files say.

Those files name the pooling, dense layers after it, and the prompts of questions and documents. A
folder without them gets the mean over all tokens and no prompts. sentence-transformers need not be
installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rope_ext.errors import MeasureError
from rope_ext.saving import hub
from rope_ext.saving.embedders import MODULES, SETTINGS, read_json

POOLINGS = ("mean", "cls", "lasttoken", "max")
ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "GELU": nn.GELU, "ReLU": nn.ReLU}
_LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Names of poolings in files of sentence-transformers before version 6."""
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")
_QUERY = ("query", "Retrieval-query", "search_query", "retrieval.query")
_DOCUMENT = ("document", "passage", "Retrieval-document", "search_document", "retrieval.passage")


@dataclass(frozen=True)
class Recipe:
    """How a model's files turn hidden states into an embedding, without weights.

    ``dense`` are the folders of the layers after pooling. ``named`` says whether files of
    sentence-transformers named all this, or it is the default.
    """

    model: str
    pooling: str = "mean"
    dense: tuple[str, ...] = ()
    query: str = ""
    document: str = ""
    named: bool = False

    @classmethod
    def from_files(cls, model: str) -> Recipe:
        """Read a recipe from a folder or a Hub ID; raises MeasureError for what is unknown here."""
        modules = _read(model, MODULES)
        if modules is None:
            return cls(model)
        settings = _read(model, SETTINGS) or {}
        folders: dict[str, list[str]] = {}
        for module in modules:
            kind = str(module["type"]).rpartition(".")[2]
            path = module["path"]
            if kind not in _KNOWN or (kind == "Transformer" and path):
                raise MeasureError(
                    f"{model}: {MODULES} names {kind} in {path!r}, which this evaluator does not "
                    f"know; it knows Transformer (in the folder itself), Pooling, Dense, Normalize"
                )
            folders.setdefault(kind, []).append(path)
        poolings = [_pooling(model, path) for path in folders.get("Pooling", ())]
        normalized = "Normalize" in folders
        similarity = settings.get("similarity_fn_name") or "cosine"
        if similarity != "cosine" and not (similarity == "dot" and normalized):
            raise MeasureError(
                f"{model}: {SETTINGS} has similarity_fn_name={similarity!r}, and this evaluator "
                f"knows cosine"
            )
        prompts = settings.get("prompts") or {}
        return cls(
            model=model,
            pooling=poolings[-1] if poolings else "mean",
            dense=tuple(folders.get("Dense", ())),
            query=_first(prompts, _QUERY),
            document=_first(prompts, _DOCUMENT),
            named=True,
        )

    @property
    def about(self) -> str:
        """The recipe in words, for a caption."""
        dense = f", {len(self.dense)} dense layers" if self.dense else ""
        given = f"prompts {self.query!r} and {self.document!r}" if self.query else "no prompts"
        source = f"as its {MODULES} says" if self.named else f"it has no {MODULES}"
        return f"{self.pooling} pooling{dense}, {given} ({source})"


def _read(model: str, name: str) -> Any:
    """Return the content of a JSON file of a folder or Hub repository; None if there is none."""
    path = hub.find(model, name, connection_errors=False)
    return None if path is None else read_json(Path(path), kind=MeasureError)


def _first(prompts: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the prompt with the first of these names that has one; else none."""
    return next((prompts[name] for name in names if prompts.get(name)), "")


def _pooling(model: str, path: str) -> str:
    """Return the only pooling of a folder of files; raises MeasureError for others."""
    config = _read(model, f"{path}/config.json") or {}
    found = config.get("pooling_mode") or [_LEGACY[name] for name in _LEGACY if config.get(name)]
    names = [found] if isinstance(found, str) else list(found)
    if len(names) != 1 or names[0] not in POOLINGS:
        raise MeasureError(
            f"{model}: {path}/config.json asks for {' and '.join(names) or 'no'} pooling, and this "
            f"evaluator knows one of {', '.join(POOLINGS)}"
        )
    if config.get("include_prompt") is False:
        raise MeasureError(
            f"{model}: {path}/config.json has include_prompt=false, which this evaluator does not "
            f"know; it pools over all tokens"
        )
    return names[0]


@dataclass(frozen=True)
class Embedder:
    """A loaded model, and the recipe that its files name."""

    model: Any
    recipe: Recipe

    @cached_property
    def dense(self) -> nn.Sequential:
        """The layers after pooling, on the model's device and in float32."""
        layers = nn.Sequential()
        for path in self.recipe.dense:
            config = _read(self.recipe.model, f"{path}/config.json") or {}
            weights = hub.find(self.recipe.model, f"{path}/model.safetensors")
            activation = str(config.get("activation_function", "")).rpartition(".")[2]
            if weights is None or activation not in ACTIVATIONS:
                raise MeasureError(
                    f"{self.recipe.model}: the layer in {path} needs model.safetensors and an "
                    f"activation_function among {', '.join(ACTIVATIONS)}; it has {activation!r}"
                )
            linear = nn.Linear(config["in_features"], config["out_features"], config["bias"])
            stored = load_file(weights).items()
            linear.load_state_dict({name.removeprefix("linear."): x.float() for name, x in stored})
            layers.extend([linear, ACTIVATIONS[activation]()])
        return layers.to(self.model.device)

    @torch.no_grad()
    def embed(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Embed rows of token IDs in one forward: ``[rows, size]``, float32, length 1, on the CPU.

        Shorter rows are padded on the right, with an attention mask.
        """
        device = self.model.device
        width = max(map(len, rows))
        # Any token fills a row: the mask hides it.
        ids = torch.zeros((len(rows), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(list(tokens))
            mask[row, : len(tokens)] = 1
        mask = mask.to(device)
        hidden = self.model(input_ids=ids.to(device), attention_mask=mask)[0].float()
        pooled = pool(hidden, mask, self.recipe.pooling)
        return nn.functional.normalize(self.dense(pooled), dim=-1).cpu()


def pool(hidden: Tensor, mask: Tensor, how: str) -> Tensor:
    """Pool hidden states ``[rows, tokens, size]`` over the tokens of a mask ``[rows, tokens]``."""
    if how == "cls":
        return hidden[:, 0]
    if how == "lasttoken":
        return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
    shown = mask[..., None].bool()
    if how == "max":
        return hidden.masked_fill(~shown, -torch.inf).amax(1)
    return (hidden * shown).sum(1) / shown.sum(1)
