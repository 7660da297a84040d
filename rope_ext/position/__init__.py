"""Applies a position map: a rotation that depends on whether a key is near or far.

Keys are cached with the rotation of the far band: the rotary module is hooked and returns that
one, so the model's own code and its own caches do the work. The attention function then rotates
queries, and the few near keys, from there to the position that each band asks for.

From the bottom: ``layers`` finds where rotary pairs lie, ``map`` says what rotates them,
``learned`` has what patches learn, ``forward`` the positions of queries and keys, ``masks`` which
tokens see each other, ``tensors`` what the layers of one layout share in a forward, ``attend``
chooses how a layer attends, and ``install`` puts it all on a model. ``inputs`` are encodings that
change or read hidden states, ``queries`` temperatures of models that keep their own attention.

What one forward needs to know travels with its attention mask, a :class:`masks.BatchMask`: it
reaches every layer of every family, also when gradient checkpointing runs a layer again.
"""
