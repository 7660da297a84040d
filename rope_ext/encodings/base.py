"""The base of encodings other than RoPE: usually they replace the rotation.

    x_t      <- x_t + scale * p(t)  or  x_t * p(t)         before the layers
    logit_ij  = scale * <q_i, k_j> + b_h(i - j)            in each layer

A bias is evaluated by distance, ``[heads, distances]``, and never becomes a matrix of queries and
keys: the kernels read it as a view (:mod:`rope_ext.attention.bands`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from rope_ext.errors import OptionError
from rope_ext.methods.checked import Positive
from rope_ext.methods.geometry import Band, Distance
from rope_ext.methods.kinds import Factor, PositionMethod, Rope

Learned = Mapping[str, Tensor]
Bounds = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, eq=False)
class Block:
    """Some queries and the keys that they may attend to.

    Args:
        query: ``[batch, heads, rows, columns]``, times the temperature; dtype of ``content``.
        key: ``[batch, heads, keys, columns]``, likewise, repeated for the heads that share it.
        content: their logits without positions, ``[batch, heads, rows, keys]``, float32 or better:
            rotated if the band rotates, scaled, and capped. Undefined where it is not visible.
        query_at: positions of the queries, int64, ``[rows]``, tokens from the start of a sequence.
        key_at: positions of the keys, ``[keys]``.
        visible: bool, broadcast to ``content``. Hidden entries, masked later, must change nothing.
        scale: factor of the query-key products in ``content``.
    """

    query: Tensor
    key: Tensor
    content: Tensor
    query_at: Tensor
    key_at: Tensor
    visible: Tensor
    scale: float

    @property
    def distance(self) -> Tensor:
        """Tokens from each query to each key, in the dtype of ``content``; 0 for later keys."""
        distance = self.query_at[:, None] - self.key_at
        return distance.clamp(min=0).to(self.content.dtype)

    def row_of(self, table: Tensor, ahead: int = 0) -> Tensor:
        """The row of each distance in a table, whose last row is for all larger distances.

        Its first ``ahead`` rows are for later keys, farthest first.
        """
        distance = self.query_at[:, None] - self.key_at
        return (distance + ahead).clamp(0, table.shape[-2] - 1)

    def by_tables(self, of_query: Tensor, of_key: Tensor | None = None, ahead: int = 0) -> Tensor:
        """``<q_i, k_j> + <q_i, of_query[d]> + <k_j, of_key[d]>`` for a distance ``d = i - j``.

        Tables are ``[heads or 1, distances, columns]``, with rows as for :meth:`row_of`.
        """
        found = self.query @ of_query.to(self.query).mT
        more = found.gather(-1, self.row_of(of_query, ahead).expand(self.content.shape))
        if of_key is not None:
            found = of_key.to(self.key) @ self.key.mT
            more = more + found.gather(-2, self.row_of(of_key, ahead).expand(more.shape))
        return self.content + self.scale * more


class Heads(NamedTuple):
    """The query heads of a layer: their number, columns per head, and columns of the values.

    ``both``: whether they also see later keys, which may have learned parameters of their own.
    """

    count: int
    columns: int
    value_columns: int
    both: bool = False


@dataclass(frozen=True, kw_only=True)
class Encoding(PositionMethod):
    """Base of the encodings that replace RoPE.

    A model trained with RoPE needs further training after the patch.

    Args:
        factor: the target length divided by the trained length; 1 only changes the encoding.
    """

    kind: ClassVar[str] = "encoding"
    allows_factor_one: ClassVar[bool] = True

    factor: Factor = 1.0

    # --- A bias by distance: most encodings need no more than this. ---

    def bias(self, distance: Tensor, heads: int, learned: Learned) -> Tensor | None:
        """The term that is added to the logits, as in ``alibi``; None: no bias.

        ``[heads, n]`` for ``distance``, tokens from query to key, 0, 1, 2, ..., float32 or better,
        in its dtype; -inf for hidden distances.
        """
        return None

    def saturates_at(self) -> int | None:
        """Distance (tokens) from which on the bias is constant, as in ``t5``; None: it never is."""
        return None

    def bias_ahead(self, distance: Tensor, heads: int, learned: Learned) -> Tensor | None:
        """:meth:`bias` of keys after the query, in both directions; by default symmetric.

        ``t5`` has other parameters for them.
        """
        return self.bias(distance, heads, learned)

    # --- Learned parameters. ---

    # One set of parameters for the model, not one per layer (``t5``).
    shared: ClassVar[bool] = False
    # In both directions, later keys have parameters of their own (``t5``).
    sided: ClassVar[bool] = False
    # Options that change the meaning of parameters (``dape``).
    redefining: ClassVar[tuple[str, ...]] = ()
    # Dimension in which new rows of tables copy the last one (``cope``).
    grows: ClassVar[int | None] = None

    def initial(self, heads: Heads) -> dict[str, Tensor]:
        """The initial learned parameters by name: float32, reproducible by torch's seed.

        Zeros in ``t5``, random in ``kerple_log``.
        """
        return {}

    @property
    def bounds(self) -> Bounds:
        """The smallest and largest value of bounded parameters, by name, as in ``kerple_log``.

        They are applied to the stored parameters, and before :meth:`bias` and :meth:`logits`.
        """
        return {}

    def grown(self, name: str, learned: Tensor, initial: Tensor) -> Tensor | None:
        """Parameters learned with other options, in the shape of ``initial``, as in ``t5``.

        None if there is no exact conversion; patching then raises an error.
        """
        return None if self.grows is None else lengthened(learned, initial, self.grows, repeat=True)

    # --- Rarely: logits beyond a bias, because they depend on queries and keys. ---

    # Its :meth:`logits` distinguish later from earlier keys (``shaw``).
    later_keys: ClassVar[bool] = False
    # Its :meth:`logits` do not depend on the content of queries and keys (``fire``).
    additive: ClassVar[bool] = False
    # Its :meth:`logits` get the ``key_projection`` of their layer (``transformer_xl``).
    projected: ClassVar[bool] = False

    def logits(self, block: Block, learned: Learned) -> Tensor:
        """The logits with positions, in the shape of ``block.content``, instead of a :meth:`bias`.

        As in ``shaw``. The learned parameters come with the :meth:`constants` and, if
        ``projected``, with ``key_projection``: the layer's weight for the keys of every query head,
        ``[heads, columns, hidden size]``.
        """
        raise NotImplementedError

    def constants(self, heads: Heads, device: torch.device) -> dict[str, Tensor]:
        """Fixed tensors that :meth:`logits` gets with the learned parameters, by name: float32.

        ``shaw`` has its sinusoidal table here.
        """
        return {}

    def more(self, weights: Tensor, block: Block, learned: Learned) -> Tensor | None:
        """A term added to the output, ``[batch, heads, rows, value columns]``, or None.

        ``weights``: ``[batch, heads, rows, keys]``, float32 or better, after the softmax. ``shaw``
        adds the relative positions of the values.
        """
        return None

    def pair_width(self, heads: int) -> int:
        """Numbers that :meth:`logits` stores at a time for every pair of query and key.

        Twice the hidden units of the network in ``fire``.
        """
        return 0

    # --- Rarely: rotating by something else. ---

    def bands(self) -> tuple[Band, ...]:
        """One band of all keys, which are not rotated; those of ``xpos`` are."""
        return (Band(Distance(0, None), 0.0, 0.0),)

    def phase(self, t: Tensor) -> Tensor | None:
        """Additional rotation in radians of every pair at ``t`` (float64); None: 0.

        ``3d_rpe`` rotates by the number of the chunk.
        """
        return None

    def growth(self, pairs: int) -> Tensor | None:
        """Growth of the logarithm of a query, and decrease of that of a key, per token.

        Float64, ``[pairs]``, 0 or less, so that logits fall with the distance, as in ``xpos``.
        None: no growth.
        """
        return None

    def initial_positions(self, columns: int, heads: int) -> dict[str, Tensor]:
        """The initial parameters of :meth:`places` in a layer with ``heads`` key heads.

        Used by ``repo``.
        """
        return {}

    def places(self, x: Tensor, t: Tensor, learned: Learned) -> Tensor:
        """Positions to rotate queries and keys by, ``[rows, key heads, tokens]``.

        They depend on the token alone, so that keys can be rotated before caching. ``x`` is
        the input of the layer, float32 or better, ``[rows, tokens, columns]``; ``t`` the positions
        in the sequence, int64 or float64, ``[rows or 1, tokens]``. ``repo`` computes them by a
        network.
        """
        raise NotImplementedError

    def reached(self, rope: Rope) -> int:
        """The target length: distances are not rotations, so none needs training.

        ``repo`` with shifted positions starts as the trained rotation, and ends where this does.
        """
        return self.target_length(rope)

    # --- Rarely: choosing layers. ---

    # Its options choose its layers, and ``layers=`` cannot (``swan``).
    by_layer: ClassVar[bool] = False

    def default_layers(self, count: int) -> tuple[int, ...] | None:
        """Which of ``count`` layers it changes unless ``layers=`` chooses them; None: all.

        The others keep the rotation as trained. ``repo`` leaves out the first 5 of 16.
        """
        return None

    def window_beside(self) -> int | None:
        """Number of tokens that layers with RoPE attend to, as in ``swan``; None: all."""
        return None

    # --- Rarely: what enters layers; see :class:`InputEncoding`. ---

    # Layers whose input it changes: the first, every, or the first of the last n (``deberta``).
    entered: ClassVar[Literal["first", "every"] | int | None] = None

    # --- What it does, by what it overrides. ---

    @classmethod
    def adds(cls) -> bool:
        """Whether it only adds a term to logits that depends on the query and key positions."""
        return cls.additive if cls.scored() else cls.bias is not Encoding.bias

    @classmethod
    def scored(cls) -> bool:
        """Whether it changes the logits by more than a bias by distance."""
        return cls.logits is not Encoding.logits

    @classmethod
    def changes_logits(cls) -> bool:
        """Whether it changes logits in any way other than rotating queries and keys."""
        return cls.scored() or cls.bias is not Encoding.bias

    @classmethod
    def computes_positions(cls) -> bool:
        """Whether layers rotate by positions that they compute from their hidden states."""
        return cls.places is not Encoding.places


@dataclass(frozen=True, kw_only=True)
class InputEncoding(Encoding):
    """Base of encodings that add positions, counted from 0, to the input of layers."""

    # Or every layer, as ``floater``.
    entered: ClassVar[Literal["first", "every"] | int | None] = "first"

    def p(self, t: Tensor, columns: int, rope: Rope, learned: Learned) -> Tensor:
        """The encoding of positions ``t`` (float64, ``[...]``): ``[..., columns]``.

        A row of a table by default, computed in ``sinusoidal``. If ``tabled``, ``t`` is
        ``0, 1, 2, ...``, in the dtype in which to compute.
        """
        return learned["table"][t.long()]

    def join(self, x: Tensor, p: Tensor) -> Tensor:
        """The input of a layer with its positions: their sum, or in ``multiplicative`` product."""
        return x + p

    # --- Learned parameters, and how far they reach. ---

    # ``p`` of a position depends on all earlier ones (``floater``).
    tabled: ClassVar[bool] = False
    # What reaches beyond the table, for an error (``learned``).
    extension: ClassVar[str] = ""

    def initial_inputs(self, columns: int, size: float, rope: Rope) -> dict[str, Tensor]:
        """The initial learned parameters by name, as in :meth:`initial`.

        ``size`` is the root mean square of the input of the first layer. A table in ``learned``.
        """
        return {}

    def limit(self, rope: Rope) -> int | None:
        """Longest sequence that has positions, in tokens, as in ``learned``; None: no limit."""
        return None

    def covers(self, tokens: int, rope: Rope) -> None:
        """Raise an OptionError for a sequence beyond the :meth:`limit`."""
        limit = self.limit(rope)
        if limit is not None and tokens > limit:
            raise OptionError(
                f"{self.name}: a sequence of {tokens} tokens goes beyond its {limit} positions; "
                f"patch with {self.extension}length={tokens} (replace=True keeps the table)"
            )

    def grown(self, name: str, learned: Tensor, initial: Tensor) -> Tensor | None:
        if name != "table":
            return super().grown(name, learned, initial)
        return lengthened(learned, initial, 0, repeat=False)


@dataclass(frozen=True, kw_only=True)
class Sized(InputEncoding):
    """Base of encodings whose ``p`` has a scale.

    Args:
        scale: factor of ``p``. None: the root mean square of the first layer's input for a sample
            of the vocabulary, computed when the model is patched and saved with the weights.
    """

    scale: Positive | None = None


def in_both_directions(earlier: Tensor, later: Tensor | None) -> tuple[Tensor, int]:
    """A table by distance with rows for later keys first, and the number of these.

    ``earlier`` begins with distance 0 and ``later`` with 1, ``[..., distances, columns]``; None for
    causal attention.
    """
    if later is None:
        return earlier, 0
    return torch.cat((later.flip(-2), earlier), -2), later.shape[-2]


def sinusoid(t: Tensor, columns: int, base: float) -> Tensor:
    """``sin(t / base^(2i / columns))`` in column ``2i`` and the cosine next to it: float32."""
    even = torch.arange(0, columns, 2, dtype=t.dtype, device=t.device)
    angles = t.unsqueeze(-1) * base ** -(even / columns)
    both = torch.stack((angles.sin().float(), angles.cos().float()), -1)
    return both.flatten(-2)[..., :columns]


def linear(name: str, outputs: int, inputs: int, kernel: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Weight and bias of a linear layer or convolution, with torch's default initialization."""
    fan = inputs
    for size in kernel:
        fan *= size
    shapes = {f"{name}_weight": (outputs, inputs, *kernel), f"{name}_bias": (outputs,)}
    return {key: (2 * torch.rand(shape) - 1) / fan**0.5 for key, shape in shapes.items()}


STD = 0.02
"""Standard deviation of initial tables, as for embeddings in transformers."""


def lengthened(learned: Tensor, initial: Tensor, dim: int, *, repeat: bool) -> Tensor | None:
    """A longer table that begins with the rows of a shorter one; None if it is not longer.

    With ``repeat``, new rows copy the last one, which larger distances shared, else ``initial``.
    """
    rows = learned.shape[dim]
    if initial.shape[dim] < rows or initial.narrow(dim, 0, rows).shape != learned.shape:
        return None
    more = initial.narrow(dim, rows, initial.shape[dim] - rows)
    if repeat:
        more = learned.narrow(dim, rows - 1, 1).expand_as(more)
    return torch.cat((learned, more), dim)
