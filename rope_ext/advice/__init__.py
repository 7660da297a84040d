"""Describes models and patches, recommends methods, and estimates memory."""
