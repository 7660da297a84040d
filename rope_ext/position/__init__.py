"""Applies position maps: rotations that depend on whether a key is near or far.

Keys are cached with the rotation of the far band: a hook makes the rotary module return it, so the
model's own code and caches are used. The attention function then rotates queries, and the few near
keys, to the position that each band requires.

Bottom up: ``layers``, ``map``, ``learned``, ``forward``, ``masks``, ``tensors``, ``inputs``,
``attend`` and ``install``. The state of a forward is attached to its attention mask, a
:class:`masks.BatchMask`, which reaches every layer of every family, also when gradient
checkpointing recomputes a layer.
"""
