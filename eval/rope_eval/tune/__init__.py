"""Finds options of methods for one model: scalar options, and longrope tables."""
