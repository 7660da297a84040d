from rope_ext.methods.kinds import Factor, PositionMethod, Rope, register


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

    def reached(self, rope: Rope) -> int:
        return rope.length
