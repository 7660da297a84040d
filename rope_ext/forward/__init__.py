"""What one forward of a patched decoder knows: its tokens, their positions, their sequences.

``context`` holds the forwards that a thread is running, for every other room; ``sequences`` is
the context under a method that chooses frequencies by the sequence, ``positions`` the one under a
position map.
"""
