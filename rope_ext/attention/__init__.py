"""Attention that rotates queries and keys differently in each band of keys that a query sees.

``dispatch.attend`` chooses the kernel. Nothing is imported here, so that frequency methods load no
kernels.
"""
