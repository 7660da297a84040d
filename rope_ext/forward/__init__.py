"""State of one forward of a patched decoder: its tokens, their positions and their sequences.

``context`` has the stack of forwards that a thread is running, ``sequences`` the context of
methods that choose frequencies by sequence, and ``positions`` the context of position maps.
"""
