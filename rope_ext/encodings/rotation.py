from rope_ext.methods.geometry import Distance
from rope_ext.methods.kinds import Band, Factor, PositionMethod, Rope, identity, register


@register
class RoPE(PositionMethod):
    """RoPE as trained, to combine with ``bias=`` or ``temperature=``.

    Alone it changes nothing, so patching with it raises an error.

    Args:
        factor: target length divided by trained length; longer distances are new to the rotation.

    Su et al. 2021, arXiv 2104.09864.
    """

    name = "rope"
    summary = "RoPE as trained, with a bias or a temperature"

    kind = "rotation"
    allows_factor_one = True

    factor: Factor = 1.0

    def bands(self) -> tuple[Band, ...]:
        return (Band(Distance(0, None), identity, identity),)

    def reached(self, rope: Rope) -> int:
        return rope.length
