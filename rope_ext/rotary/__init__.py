"""The rotary modules of a model, and what a forward knows of its sequences and caches."""
