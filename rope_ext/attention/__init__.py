"""Attention that rotates queries and keys differently in each band of the causal triangle.

``dispatch.attend`` chooses the kernel; nothing is imported here, so that a patch of frequencies
alone loads none of them.
"""
