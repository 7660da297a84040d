"""Applies methods to a model: one module for each kind of method."""
