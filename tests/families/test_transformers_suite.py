"""transformers' own tests of its models hold on extended ones, but for the rows of ``CANNOT``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers

PINS = (Path(__file__).parents[2] / "constraints.txt").read_text()
FAMILIES = ("llama", "qwen3", "mistral", "gemma2")
FREQUENCY = ("yarn", "dynamic_ntk")
POSITION = ("rerope", "self_extend")
# A method on each family, on the first none as well.
RUNS = [
    ("llama", None),
    ("llama", "rerope"),
    ("qwen3", "dynamic_ntk"),
    ("mistral", "yarn"),
    ("gemma2", "self_extend"),
]


@dataclass(frozen=True)
class Cannot:
    """Tests that fail, all of them, on every model of some methods and families.

    Args:
        tests: pattern of their whole names.
        raised: pattern of the last line of what they raise.
        why: it is right, or at least known.
    """

    tests: str
    raised: str
    why: str
    methods: tuple[str, ...] = FREQUENCY + POSITION
    families: tuple[str, ...] = FAMILIES


CANNOT = (
    Cannot(
        "test_model_rope_scaling_from_config_.*",
        "AlreadyScaledError: .* is scaled by ",
        "a model that its configuration scales already is extended on request only",
        FREQUENCY,
    ),
    Cannot(
        "test_model_rope_scaling_from_config_1_dynamic",
        "AlreadyScaledError: .* whose frequencies change with the sequence",
        "no positions can be mapped under frequencies that change with the sequence",
        POSITION,
    ),
    Cannot(
        "test_attention_outputs",
        "AlreadyScaledError: .* is scaled by ",
        "builds another model from the configuration of an extended one, which tells of that",
        FREQUENCY,
    ),
    Cannot(
        "test_eager_matches_sdpa_inference_.*",
        "UnsupportedModelError: .* every layer .* limited window",
        "gives every layer a window of two tokens, beyond which there is nothing to reach",
        FREQUENCY + POSITION,
        ("mistral",),
    ),
    Cannot(
        "test_eager_matches_sdpa_inference_.*",
        "UnsupportedModelError: the attention implementation was set to 'eager'",
        "another attention would rotate no keys, so it is refused once the model is patched",
        POSITION,
        ("llama", "qwen3"),  # skipped on gemma2, whose soft caps sdpa lacks
    ),
    Cannot(
        "test_can_set_attention_dynamically|test_sdpa_can_dispatch_non_composite_models",
        "AssertionError: False is not true",
        "a mapped model's attention is rope_ext's own, not the one that it was loaded with",
        POSITION,
    ),
    Cannot(
        "test_attention_outputs",
        "ValueError: The `output_attentions` attribute is not supported",
        "asks for the weights in the configuration, which transformers allows with eager alone",
        POSITION,
    ),
    Cannot(
        "test_retain_grad_hidden_states_attentions",
        "OptionError: config.output_attentions=True",
        "likewise; as an argument of the call it is allowed",
        POSITION,
    ),
    Cannot(
        "test_(all_tensors_are_parameter_or_buffer|can_be_initialized_on_meta"
        "|init_weights_can_init_buffers)",
        "UnsupportedModelError: .* meta device",
        "how a model rotates cannot be probed without weights",
        POSITION,
    ),
)


@pytest.mark.slow
@pytest.mark.skipif(
    f"transformers=={transformers.__version__}; python_version >=" not in PINS,
    reason="the table is that of the version that is pinned for newer Pythons",
)
@pytest.mark.parametrize(("family", "method"), RUNS)
def test_transformers_tests_hold(family: str, method: str | None) -> None:
    """Exactly the tests of the table fail, as it says: less, or otherwise, is out of date."""
    from tests.helpers.transformers_suite import run  # not with the fast tests

    found = run(family, method)
    assert len(found) > 80
    rows = [row for row in CANNOT if method in row.methods and family in row.families]
    for row in rows:
        assert any(re.fullmatch(row.tests, test) for test in found), row
    wrong = {}
    for test, trace in found.items():
        raised = None if trace is None else trace.strip().splitlines()[-1]
        expected = [row.raised for row in rows if re.fullmatch(row.tests, test)]
        if bool(expected) != (raised is not None) or (
            raised is not None and not any(re.search(pattern, raised) for pattern in expected)
        ):
            wrong[test] = trace or f"passes, though {expected} was expected"
    assert not wrong, "\n".join(f"{test}: {trace}" for test, trace in wrong.items())
