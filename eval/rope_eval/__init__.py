"""Evaluators, calibration and search for transformers models, patched with rope_ext or not."""

# For ``python -m rope_eval.lm_eval``: imports nothing from the current folder.
import rope_ext.import_path  # noqa: F401
