"""Evaluators, calibration and search for models of transformers, patched with rope_ext or not."""
