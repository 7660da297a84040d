"""Applies position maps: rotations that depend on whether a key is near or far.

Keys are cached with the rotation of the far band: a hook makes the rotary module return it, so the
model's own code and caches are used. The attention function then rotates queries, and the few near
keys, to the position that each band requires.

Bottom up: ``layers`` finds the columns of rotary pairs, ``map`` their rotations, ``learned`` holds
learned parameters, ``forward`` the positions of queries and keys, ``masks`` which tokens see each
other, ``tensors`` what layers with the same layout share in a forward and how they attend,
``attend`` the attention function, and ``install`` installs everything on a model. ``inputs`` has
encodings that change or read hidden states.

The state of a forward is attached to its attention mask, a :class:`masks.BatchMask`, which reaches
every layer of every family, also when gradient checkpointing recomputes a layer.
"""
