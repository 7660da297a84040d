"""The rotary modules of a model: found, proven, and given other frequencies."""
