"""Export of patches to other engines: one file per engine, which registers it."""

# isort: off
from rope_ext.engines.base import (
    Engine,
    Export,
    all_engines,
    build_engine,
    engines_for,
    export,
    register,
    serving_commands,
)
from rope_ext.engines.vllm import VLLM
from rope_ext.engines.sglang import SGLang
from rope_ext.engines.llama_cpp import LlamaCpp
from rope_ext.engines.ollama import Ollama
from rope_ext.engines.mlx import MLX
from rope_ext.engines.transformers import Transformers
# isort: on

__all__ = [
    "MLX",
    "VLLM",
    "Engine",
    "Export",
    "LlamaCpp",
    "Ollama",
    "SGLang",
    "Transformers",
    "all_engines",
    "build_engine",
    "engines_for",
    "export",
    "register",
    "serving_commands",
]
