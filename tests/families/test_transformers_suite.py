"""transformers' own tests of its models hold on extended ones, but for the rows of ``CANNOT``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

PINS = (Path(__file__).parents[2] / "constraints.txt").read_text()
# A method on each family, on the first none as well.
RUNS = [
    ("llama", None),
    ("llama", "rerope"),
    ("qwen3", "dynamic_ntk"),
    ("mistral", "yarn"),
    ("gemma2", "self_extend"),
]
FREQUENCY = {
    # A model that its configuration scales already is extended on request only.
    "test_model_rope_scaling_from_config_.*": "AlreadyScaledError: .* is scaled by ",
    "test_attention_outputs": "AlreadyScaledError: .* is scaled by ",
}
POSITION = {
    "test_model_rope_scaling_from_config_1_dynamic": "AlreadyScaledError: .* cannot go on top",
    # The attention of a mapped model is rope_ext's own, and rotates keys.
    "test_can_set_attention_dynamically": "AssertionError: False is not true",
    "test_attention_outputs": "ValueError: The `output_attentions` attribute is not supported",
    "test_retain_grad_hidden_states_attentions": "OptionError: config.output_attentions=True",
    # How a model rotates cannot be probed without weights.
    "test_(all_tensors_are_parameter_or_buffer|can_be_initialized_on_meta|init_weights_can_.*)": (
        "UnsupportedModelError: .* meta device"
    ),
}
EAGER = "test_eager_matches_sdpa_inference_.*"
CANNOT: dict[str | None, dict[str, str]] = {
    None: {},
    "yarn": {**FREQUENCY, EAGER: "UnsupportedModelError: .* every layer .* limited window"},
    "dynamic_ntk": FREQUENCY,
    "rerope": {
        **POSITION,
        EAGER: "UnsupportedModelError: the attention implementation was set to",
        "test_sdpa_can_dispatch_non_composite_models": "AssertionError: False is not true",
    },
    "self_extend": POSITION,
}
"""Of each method the tests that fail, and the last line of what they raise."""


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
    rows = CANNOT[method]
    assert all(any(re.fullmatch(row, test) for test in found) for row in rows)
    wrong = {}
    for test, trace in found.items():
        raised = None if trace is None else trace.strip().splitlines()[-1]
        expected = [pattern for row, pattern in rows.items() if re.fullmatch(row, test)]
        if bool(expected) != (raised is not None) or (
            raised is not None and not any(re.search(pattern, raised) for pattern in expected)
        ):
            wrong[test] = trace or f"passes, though {expected} was expected"
    assert not wrong, "\n".join(f"{test}: {trace}" for test, trace in wrong.items())
