"""Computes cross entropy with weights: in the output layer without all logits, or from logits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from recipes.data import IGNORED
from rope_ext.errors import UnsupportedModelError

# A large value that is exact in every dtype. Scaling or capping logits changes it; casting or
# copying them, as FSDP2 and DeepSpeed do with all outputs, does not.
_MARK = 1024.0


def label_sums(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the weights of a batch's labels, and the number of these labels.

    The first token of a row is not predicted, so its label does not count.

    Args:
        batch: ``labels`` and their ``loss_weights``, both ``[rows, tokens]``.
    """
    scored = batch["labels"][:, 1:] != IGNORED
    weights = batch["loss_weights"][:, 1:] * scored
    return torch.stack((weights.sum(), scored.sum().to(weights.dtype)))


class ChunkedLoss:
    """Makes the output layer of a model compute the loss in chunks, without storing all logits.

    The loss is computed in the layer's own forward, where FSDP and DeepSpeed have gathered its
    weight. A call without labels returns logits as usual. With ``loss_weights``, the loss is the
    mean by weights; ``num_items_in_batch`` is the sum of the weights that it is divided by.

    Args:
        model: a causal language model, including its adapter if it has one.

    Raises:
        UnsupportedModelError: torch is too old, or the layer is not a plain linear layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if not hasattr(nn.functional, "linear_cross_entropy"):
            raise UnsupportedModelError(
                f"chunked_loss needs torch.nn.functional.linear_cross_entropy, which torch "
                f"{torch.__version__} does not have; install torch>=2.13, or give --chunked_loss "
                f"false (and --use_liger_kernel true, if that is installed)"
            )
        head = model.get_output_embeddings()
        if isinstance(head, BaseTunerLayer):
            raise UnsupportedModelError(
                "chunked_loss needs a plain linear output layer, and --lora_target adds LoRA to "
                "it; give --chunked_loss false, or leave it out of --lora_target"
            )
        if isinstance(head, ModulesToSaveWrapper):
            head = head.modules_to_save[head.active_adapters[0]]
        # A subclass, such as a quantized layer, does not compute its output from ``weight`` alone.
        if type(head) is not nn.Linear:
            raise UnsupportedModelError(
                f"chunked_loss needs a plain linear output layer, but {type(model).__name__} has "
                f"{type(head).__name__}; give --chunked_loss false"
            )
        # Shifted: each label is at the token that predicts it.
        self.labels: torch.Tensor | None = None
        self.divisor: torch.Tensor | int | None = None  # sum of the weights of all labels of a step
        self.weights: torch.Tensor | None = None  # weight of each label in the loss
        self.returned: torch.Tensor | None = None  # set by the output layer: the loss and _MARK
        self.head = head
        self.logits = head.forward
        forward = model.forward

        @functools.wraps(forward)  # not a hook, because older versions of peft call forward
        def forward_with_labels(*args: Any, **kwargs: Any) -> Any:
            self._note(**kwargs)
            kwargs.pop("loss_weights", None)
            return forward(*args, **kwargs)

        model.forward = forward_with_labels
        head.forward = self.forward
        model.loss_function = self.collect

    def _note(
        self,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        loss_weights: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        if labels is not None and shift_labels is None:  # context parallelism shifts them itself
            shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        self.labels = None if labels is None else shift_labels
        self.divisor = num_items_in_batch
        self.weights = None
        if loss_weights is not None:
            self.weights = nn.functional.pad(loss_weights, (0, 1))[..., 1:]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Forward of the output layer: the loss and a mark if there are labels, else logits."""
        if self.labels is None:
            return self.logits(input)
        hidden = input
        weight = self.head.weight
        bias = self.head.bias
        device = hidden.device.type
        # Autocast leaves this function alone, which then would compute in float32.
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden = hidden.to(dtype)
            weight = weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        labels = self.labels.flatten().to(hidden.device)
        losses = nn.functional.linear_cross_entropy(
            hidden.flatten(0, -2),
            weight,
            labels,
            linear_bias=bias,
            reduction="none",  # a sum would be rounded to bfloat16
            ignore_index=IGNORED,
            options=nn.LinearCrossEntropyOptions(),
        )
        losses = losses.float()
        scored = (labels != IGNORED).float()
        if self.weights is not None:
            weights = self.weights.flatten().to(losses.device)
            losses = losses * weights
            scored = scored * weights
        # Trainer passes the number of labels in all accumulated rows, so that their losses add up.
        loss = losses.sum() / (scored.sum() if self.divisor is None else self.divisor)
        # They were of this call: a head that is called by itself returns logits.
        self.labels = None
        # The mark shows whether the model changed what it takes for logits, such as by a soft cap.
        self.returned = torch.stack((loss, torch.full_like(loss, _MARK)))
        return self.returned

    def collect(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Loss function of the model: return the loss that the output layer computed.

        Raises:
            UnsupportedModelError: the model changes the output of its output layer.
        """
        returned = self.returned
        self.returned = None
        empty = logits.is_meta or isinstance(logits, FakeTensor)  # has no mark to read
        changed = logits is not returned and (empty or bool(logits[1] != _MARK))
        if returned is None or changed:
            raise UnsupportedModelError(
                "chunked_loss cannot be used here: this model scales or caps its logits after the "
                "output layer; give --chunked_loss false (and --use_liger_kernel true, if that is "
                "installed)"
            )
        # If sharding cast the output down, the backward hooks are on the layer's own output;
        # otherwise they are on what the model made of it.
        return (logits if logits.dtype == returned.dtype else returned)[0].clone()


class WeightedLoss:
    """Makes a model compute the mean by weights from its logits, where ChunkedLoss cannot be used.

    A call without ``loss_weights`` computes the model's own loss. ``num_items_in_batch`` is the sum
    of the weights that the loss is divided by.

    Args:
        model: a causal language model, including its adapter if it has one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.weights: torch.Tensor | None = None  # of a call whose loss is not yet computed
        self.plain = model.loss_function
        forward = model.forward

        @functools.wraps(forward)  # not a hook, because older versions of peft call forward
        def forward_with_weights(*args: Any, **kwargs: Any) -> Any:
            self.weights = kwargs.pop("loss_weights", None)
            found = forward(*args, **kwargs)
            if self.weights is not None:
                raise UnsupportedModelError(
                    f"{type(model).__name__} does not compute its loss by loss_function, so the "
                    f"weights of --retrieval_share would be lost; give --retrieval_share 0"
                )
            return found

        model.forward = forward_with_weights
        model.loss_function = self.loss

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Loss function of the model: the mean by weights, or the model's own loss without them."""
        if self.weights is None:
            return self.plain(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                **others,
            )
        # Each label is at the token after the one that predicts it.
        scored = labels[:, 1:].to(logits.device)
        losses = nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1),  # as the model's own loss
            scored.flatten(),
            ignore_index=IGNORED,
            reduction="none",
        )
        weights = self.weights[:, 1:].to(logits.device) * (scored != IGNORED)
        self.weights = None
        divisor = weights.sum() if num_items_in_batch is None else num_items_in_batch
        return losses @ weights.flatten() / divisor
