"""A saved folder means the same to programs that read ``rope_theta`` and ``rope_scaling`` only."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

import rope_ext
from rope_ext.config.record import OLDER
from rope_ext.config.writing import READ, STOP
from rope_ext.engines.base import ENGINES
from tests.families.zoo import tiny_model
from tests.helpers.models import tiny_llama, tiny_llava
from tests.helpers.positions import logits

CURE = "load with rope_ext.from_pretrained"


def saved(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def patched(method: str, **options: Any) -> Any:
    return rope_ext.patch(tiny_llama(), method, **{"factor": 4, **options})


@pytest.mark.every
@pytest.mark.parametrize(
    ("method", "options", "kind"),
    [
        ("yarn", {}, "yarn"),
        ("pi", {}, "linear"),
        ("llama3", {}, "llama3"),
        ("longrope", {"long_factor": [1.0 + 0.5 * i for i in range(8)]}, "longrope"),
        ("ntk", {}, "default"),
        ("abf", {"base": 5e5}, "default"),
        ("dynamic_ntk", {"length": 200}, "default"),
        ("dynamic_ntk", {}, STOP),
        ("mrrope", {}, STOP),  # a table whose temperature is not LongRoPE's
        ("yarn", {"truncate": False}, STOP),
        ("longrope", {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8}, STOP),
        *((method, {}, CURE) for method in ("rerope", "self_extend", "dynamic_yarn", "dpe")),
        ("alibi", {"factor": 1}, CURE),
    ],
)
def test_older_fields_describe_what_they_can_and_stop_the_rest(
    tmp_path, method, options, kind
) -> None:
    config = saved(patched(method, **options), tmp_path)
    PreTrainedConfig.from_json_file(tmp_path / "config.json")  # as Trainer does to resume
    parameters, base = config["rope_parameters"], config["rope_theta"]
    if kind == STOP:  # no number, which no program can take for a base
        assert base == STOP and "rope_scaling" not in config
    elif kind == CURE:
        assert CURE in base and CURE in config["rope_scaling"]["rope_type"]
    else:
        assert base == parameters["rope_theta"] and parameters["rope_type"] == kind
        assert config.get("rope_scaling") == (None if kind == "default" else parameters)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gemma3_text", "glm", "gpt_neox"])
def test_families_that_ignore_the_scaling_stop(tmp_path, family: str, ids) -> None:
    model = rope_ext.patch(tiny_model(family), "yarn", factor=4)
    assert isinstance(saved(model, tmp_path)["rope_theta"], str)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_the_families_are_those_that_mlx_was_seen_to_run() -> None:
    for name, kinds in READ.items():
        assert set(kinds) <= set(ENGINES["mlx"][name].kinds) and not ENGINES["mlx"][name].inside, (
            name
        )


@pytest.mark.parametrize("method", ["yarn", "ntk", "mrrope", "dynamic_ntk"])
def test_plain_transformers_reads_the_same_without_a_warning(
    tmp_path, ids, caplog, method: str
) -> None:
    model = patched(method, **({"attention_factor": 1.3} if method == "yarn" else {}))
    saved(model, tmp_path)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        logger.removeHandler(caplog.handler)
    assert not [r for r in caplog.records if r.name.startswith("transformers")]
    short = ids[:, :60]  # dynamic types differ beyond
    assert torch.equal(logits(plain, short), logits(model, short))


@pytest.mark.parametrize("method", ["yarn", "mrrope", "rerope"])
def test_unpatch_and_another_patch_leave_nothing_behind(tmp_path, method: str) -> None:
    before = saved(tiny_llama(), tmp_path / "before")
    model = rope_ext.unpatch(patched(method))
    assert saved(model, tmp_path / "after") == before
    assert not set(OLDER) & set(vars(model.config))
    rope_ext.patch(model, "ntk", factor=4)
    assert saved(model, tmp_path / "ntk") == saved(patched("ntk"), tmp_path / "only")


def test_a_text_model_within_another_has_them_beside_its_parameters(tmp_path) -> None:
    model = tiny_llava(tiny_llama().config)
    rope_ext.patch(model, "yarn", factor=4)
    written = saved(model, tmp_path)
    assert not set(OLDER) & set(written)
    assert written["text_config"]["rope_scaling"] == written["text_config"]["rope_parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_mlx_computes_the_same_or_stops(tmp_path, family: str) -> None:
    pytest.importorskip("mlx_lm")
    from rope_eval.engines import verifying
    from tests.helpers.engines import TOLERANCE, built, expected, prompts
    from tests.helpers.models import LENGTH
    from tests.helpers.saved_patches import PATCHES

    equal = set()
    for case, (method, options) in PATCHES.items():
        folder = tmp_path / case
        model = rope_ext.patch(built(family), method, **{"factor": 4, **options})
        config = saved(model, folder)
        if isinstance(config["rope_theta"], str):
            with pytest.raises(rope_ext.ExportError, match="cannot run this folder"):
                verifying.mlx(folder, prompts(4 * LENGTH))
            continue
        got, want = verifying.mlx(folder, prompts(4 * LENGTH)), expected(model, 4 * LENGTH)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
        equal.add(method)
    assert {"yarn", "pi", "ntk", "abf", "llama3", "longrope", "dynamic_ntk"} <= equal
