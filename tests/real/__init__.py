"""Tests on pretrained models."""
