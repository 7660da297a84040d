"""Evaluators, calibration and search for transformers models, patched with rope_ext or not."""
