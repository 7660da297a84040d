"""Export of patches to other engines, each of which registers itself."""

# isort: off
from rope_ext.engines.base import (
    Engine,
    Export,
    all_engines,
    build_engine,
    engines_for,
    export,
    serving_commands,
)
from rope_ext.engines import servers, llama_cpp, configs  # noqa: F401 - in the order of tables
# isort: on

__all__ = [
    "Engine",
    "Export",
    "all_engines",
    "build_engine",
    "engines_for",
    "export",
    "serving_commands",
]
