from rope_ext.encodings.base import Encoding
from rope_ext.methods.kinds import register


@register
class NoPE(Encoding):
    """Removes RoPE without a replacement: only the causal mask provides the order.

    In both directions nothing does, so a text becomes a bag of words.

    Haviv et al. 2022, arXiv 2203.16634; Kazemnejad et al. 2023, arXiv 2305.19466.
    """

    name = "nope"
    paper = "arXiv 2305.19466"
    summary = "no positions, only the causal mask; needs training"
