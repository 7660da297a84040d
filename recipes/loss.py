"""Cross entropy in the output layer, by torch, without the logits of a whole batch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import nn

from recipes.data import IGNORED
from rope_ext.errors import UnsupportedModelError

# Exact in every dtype, and large: what scales or caps logits changes it, what only casts or copies
# them, as FSDP2 and DeepSpeed do with all that a layer returns, does not.
_MARK = 1024.0


class ChunkedLoss:
    """Lets the output layer of a model compute the loss: logits exist in chunks only.

    It happens within the layer's own forward, where FSDP and DeepSpeed have gathered its weight.
    A model called without labels is as it was.

    Args:
        model: a causal language model, with its adapter if it is to have one.

    Raises:
        UnsupportedModelError: torch is too old, or the layer is no plain linear one.
    """

    def __init__(self, model: nn.Module) -> None:
        if not hasattr(nn.functional, "linear_cross_entropy"):
            raise UnsupportedModelError(
                f"chunked_loss needs torch.nn.functional.linear_cross_entropy, and torch "
                f"{torch.__version__} has none; install torch>=2.13, or give --chunked_loss false "
                f"(and --use_liger_kernel true, if that is installed)"
            )
        head = model.get_output_embeddings()
        if isinstance(head, ModulesToSaveWrapper):
            head = head.modules_to_save[head.active_adapters[0]]
        if type(head) is not nn.Linear:
            raise UnsupportedModelError(
                f"chunked_loss needs a plain linear output layer, and {type(model).__name__} has "
                f"{type(head).__name__}; give --chunked_loss false"
            )
        self.labels: torch.Tensor | None = None  # each at the token that predicts it
        self.count: torch.Tensor | int | None = None
        self.returned: torch.Tensor | None = None  # by the output layer: the loss, and _MARK
        self.head, self.logits = head, head.forward
        forward = model.forward

        @functools.wraps(forward)  # a hook would not do: older versions of peft call forward
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._note(**kwargs)
            return forward(*args, **kwargs)

        model.forward = noting
        head.forward = self.forward
        model.loss_function = self.collect

    def _note(
        self,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **others: Any,
    ) -> None:
        if labels is not None and shift_labels is None:  # else shifted by context parallelism
            shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        self.labels = None if labels is None else shift_labels
        self.count = num_items_in_batch

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the output layer: the loss and a mark if there are labels, else the logits."""
        if self.labels is None:
            return self.logits(hidden)
        weight, bias = self.head.weight, self.head.bias
        device = hidden.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        labels = self.labels.flatten().to(hidden.device)
        losses = nn.functional.linear_cross_entropy(
            hidden.flatten(0, -2),
            weight,
            labels,
            linear_bias=bias,
            reduction="none",  # a sum would come back in bfloat16, with three digits
            ignore_index=IGNORED,
            options=nn.LinearCrossEntropyOptions(),
        )
        count = (labels != IGNORED).sum() if self.count is None else self.count
        loss = losses.float().sum() / count
        self.labels, self.returned = None, torch.stack((loss, torch.full_like(loss, _MARK)))
        return self.returned

    def collect(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Loss function of the model: hand out the loss that the output layer returned.

        Raises:
            UnsupportedModelError: the model changes what its output layer returns.
        """
        returned, self.returned = self.returned, None
        changed = logits is not returned and (logits.is_meta or bool(logits[1] != _MARK))
        if changed:
            raise UnsupportedModelError(
                "chunked_loss cannot be used here: this model scales or caps its logits after the "
                "output layer; give --chunked_loss false (and --use_liger_kernel true, if that is "
                "installed)"
            )
        # Where sharding has cast it down, the hooks of backward are on what the layer returned, and
        # otherwise on what has become of it.
        return (logits if logits.dtype == returned.dtype else returned)[0].clone()
