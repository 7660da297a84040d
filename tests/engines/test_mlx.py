"""mlx-lm itself, run on small folders, gives the log-probabilities of the patched model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rope_ext
from rope_ext.engines import running
from tests.helpers.engines import BUILD, FLAGS, TABLES, TOLERANCE, built, expected, prompts
from tests.helpers.models import LENGTH

pytest.importorskip("mlx_lm")
CASES = FLAGS | TABLES


def saved(folder: Any, family: str, case: str) -> Any:
    name, options = CASES[case]
    model = rope_ext.patch(built(family), name, **{"factor": 4, **options})
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", BUILD)
def test_the_written_file_gives_what_was_patched(tmp_path, family: str, case: str) -> None:
    model = saved(tmp_path, family, case)
    rope_ext.export(model, "mlx").write(tmp_path)
    got = running.mlx(tmp_path, prompts(4 * LENGTH))
    torch.testing.assert_close(got, expected(model, 4 * LENGTH), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["yarn", "pi", "ntk", "llama3"])
def test_the_older_names_are_enough_where_there_is_no_temperature_of_its_own(
    tmp_path, case: str
) -> None:
    model = saved(tmp_path, "llama", case)
    rope_ext.export(model, "transformers", legacy=True).write(tmp_path)
    got = running.mlx(tmp_path, prompts(4 * LENGTH))
    torch.testing.assert_close(got, expected(model, 4 * LENGTH), rtol=0, atol=TOLERANCE)
