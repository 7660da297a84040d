from typing import Annotated, Literal

import torch
from torch.nn.functional import linear, relu

from rope_ext.encodings.base import Learned, Sized
from rope_ext.methods.checked import Number, Tokens
from rope_ext.methods.kinds import Rope, register


@register
class FLOATER(Sized):
    """Replaces RoPE with the trajectory of a learned dynamical system, added to the input.

    ``p(t)`` is ``p(t - 1)`` plus the integral of ``f(tau, p)`` over ``step``: one fourth-order
    Runge-Kutta step per token, where the authors take five. ``f`` is a network of two layers with a
    ReLU; ``tau`` is concatenated to the input of each. Its last layer starts at 0, and so do all
    positions. In training, every forward processes the tokens of the longest row one by one.

    Args:
        flow: ``"continuous"``, or ``"discrete"`` for ``p(t) = p(t - 1) + f(p(t - 1))``, whose ``f``
            has tanh instead of the ReLU and does not get ``tau``.
        step: step of ``tau`` between two tokens; only for the continuous flow.
        hidden: hidden units of ``f``; by default the hidden size of the model.
        into: ``"every"`` layer receives the same ``p(t)``, as published, or the ``"first"`` only.

    Liu et al. 2020, arXiv 2003.09229; the recursion is its discrete form, Su 2021,
    kexue.fm/archives/8130.
    """

    name = "floater"
    summary = "positions from a learned differential equation; needs training"
    tabled = True
    redefining = ("flow",)

    flow: Literal["continuous", "discrete"] = "continuous"
    step: Annotated[float, Number(above=0, maximum=10)] = 0.1
    hidden: Tokens | None = None
    into: Literal["every", "first"] = "every"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._discrete:
            self.require("step", self.step == FLOATER.step, "left out with flow='discrete'")

    @property
    def entered(self) -> str:
        return self.into

    @property
    def _discrete(self) -> bool:
        return self.flow == "discrete"

    def initial_inputs(self, columns: int, size: float, rope: Rope) -> dict[str, torch.Tensor]:
        hidden = self.hidden or columns
        of_tau = 0 if self._discrete else 1
        sizes = {
            "start": (columns,),
            "first_weight": (hidden, columns + of_tau),
            "first_bias": (hidden,),
            "second_weight": (columns, hidden + of_tau),
            "second_bias": (columns,),
        }
        weights = {name: torch.zeros(*size, device="cpu") for name, size in sizes.items()}
        torch.nn.init.xavier_normal_(weights["first_weight"])
        return weights

    def p(self, t: torch.Tensor, columns: int, rope: Rope, learned: Learned) -> torch.Tensor:
        values = {name: value.to(t) for name, value in learned.items()}

        # A recursion with a ReLU grows exponentially; with tanh no step is longer than a limit.
        bent = torch.tanh if self._discrete else relu

        def f(tau: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            for layer, bend in (("first", bent), ("second", None)):
                weight = values[f"{layer}_weight"]
                bias = values[f"{layer}_bias"]
                p = linear(p if self._discrete else torch.cat((p, tau)), weight, bias)
                p = p if bend is None else bend(p)
            return p

        path = [values["start"]]
        for tau in (t[:-1, None] * self.step).unbind():
            p = path[-1]
            path.append(
                p + f(tau, p) if self._discrete else _runge_kutta(f, tau, p, step=self.step)
            )
        return torch.stack(path)


def _runge_kutta(f, tau: torch.Tensor, p: torch.Tensor, step: float) -> torch.Tensor:  # noqa: ANN001
    a = f(tau, p)
    b = f(tau + step / 2, p + step / 2 * a)
    c = f(tau + step / 2, p + step / 2 * b)
    d = f(tau + step, p + step * c)
    return p + step / 6 * (a + 2 * b + 2 * c + d)
