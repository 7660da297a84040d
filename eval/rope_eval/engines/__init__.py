"""Runs other engines, to verify what they compute."""
