"""Saves a patch in the model's configuration."""
