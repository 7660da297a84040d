"""Names of the engines of :func:`rope_ext.export`, which the command line reads without torch."""

from typing import Any

from rope_ext.errors import ExportError, nearest

ENGINES = ("vllm", "sglang", "llama.cpp", "ollama", "mlx", "transformers")
_TEI = (
    "it reads every RoPE scaling with a factor but llama3 as an NTK of its own "
    "(backends/candle/src/layers/rotary.rs), and no method was run in it; 'vllm' serves embedders "
    "under frequency methods"
)
NOT_SUPPORTED = {
    "text-embeddings-inference": _TEI,
    "tei": _TEI,
    "sentence-transformers": (
        "it needs no settings: save the model, then load SentenceTransformer(FOLDER), or "
        "rope_ext.from_pretrained(FOLDER) for a method that it cannot load"
    ),
    "onnx": "docs/embedders.md has the call of torch.onnx.export for frequency methods",
}
"""What users may ask for in place of an engine, and the reason why it is none."""


def check_name(engine: Any) -> None:
    """Raise ExportError unless there is an engine of this name."""
    if isinstance(engine, str) and engine in NOT_SUPPORTED:
        raise ExportError(f"engine={engine!r} is not supported: {NOT_SUPPORTED[engine]}")
    if not isinstance(engine, str) or engine not in ENGINES:
        known = ", ".join(map(repr, ENGINES))
        near = nearest(str(engine), ENGINES)
        raise ExportError(f"engine={engine!r} is not known; choose one of {known}{near}")
