"""Group representational position encoding (GRAPE), with rotations and with a bias."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid, rms_norm

from lab.laboratory.scratch.base import Positions, Shape, attend, rotate
from rope_ext.encodings.alibi import slopes

_COLUMNS = 8
"""Of a probe for each head, as in the released configurations."""


class GrapeM(Positions):
    """RoPE with learned frequencies, one for each pair of a layer, positive.

    Zhang et al. 2025, arXiv 2512.07805, section 3.1; the authors' ``grape-m-nonctx``, whose
    planes are fixed. Training starts from RoPE.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.log_theta = torch.nn.Parameter(self.theta.log())

    def turns(self, inputs: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = t[:, None, :, None] * self.log_theta.exp()
        return angle.cos(), angle.sin()


class GrapeAP(Positions):
    """A bias summed over the tokens from the key to the query.

        logit_ij = s <q_i, k_j> + m_h sum_(j < l <= i) ln sigmoid(<p_i, R(-l) n(p_l)> / 8)

    ``p`` is a learned projection of the input of the layer to 8 columns for each head, ``n`` its
    RMS normalization, ``R`` a rotation of all pairs by one radian per token, and ``m_h`` are
    ALiBi's slopes. The terms are negative; with constant terms, this is ALiBi.

    Zhang et al. 2025, arXiv 2512.07805 (path-integral additive GRAPE); the authors'
    ``grape-a-pi``, in which only the second ``p`` is normalized. Their normalization of queries and
    keys is left out, as for all models here.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.probe = torch.nn.Linear(shape.width, shape.heads * _COLUMNS, bias=False)
        torch.nn.init.normal_(self.probe.weight, std=0.5 * shape.width**-0.5)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        inputs: torch.Tensor,
        t: torch.Tensor,
    ) -> torch.Tensor:
        p = self.probe(inputs).unflatten(-1, (self.shape.heads, _COLUMNS)).transpose(1, 2)
        angle = -t[:, None, :, None]
        passed = rotate(rms_norm(p, (_COLUMNS,)), angle.cos(), angle.sin())
        m = slopes(self.shape.heads).to(query)[:, None, None]
        scale = self.shape.columns**-0.5

        def logits(rows: slice) -> torch.Tensor:
            step = m * logsigmoid(p[..., rows, :] @ passed.mT / _COLUMNS)
            # No token after the query counts. The sum from a key on is the total without what is
            # before it.
            step = step.where(t[:, None, rows, None] >= t[:, None, None], 0.0)
            bias = step.sum(-1, keepdim=True) - step.cumsum(-1)
            return query[..., rows, :] @ key.mT * scale + bias

        return attend(logits, value)
