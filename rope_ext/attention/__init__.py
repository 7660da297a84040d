"""Attention that rotates queries and keys differently in each band of the causal triangle.

``dispatch.attend`` chooses the kernel. Nothing is imported here, so that frequency methods load no
kernels.
"""
