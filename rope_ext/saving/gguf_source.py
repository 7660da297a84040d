"""Loads GGUF files as models, and reads the RoPE scaling that transformers ignores.

transformers reads a GGUF file's configuration, tokenizer and weights (``gguf_file=``), but not its
``rope.scaling.*`` keys and frequency tables, except for gpt-oss.
"""

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.utils import cached_file

from rope_ext.config.nested import text_of
from rope_ext.config.record import patch_call
from rope_ext.errors import LoadError, RopeExtError, first_line, optional
from rope_ext.methods import PI, FrequencyMethod, Llama3, LongRoPE, Rope, YaRN, all_methods
from rope_ext.methods.temperature import yarn_factor
from rope_ext.rotary.sites import unwrap
from rope_ext.saving.gguf_header import require_sound

SUFFIX = ".gguf"
TABLE = "rope_freqs.weight"
"""Tensor with one divisor of the frequency per pair."""
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
_IN_FORCE = ("gpt-oss", "gemma4")
"""Architectures for which transformers reads the scaling."""
_MOST_PAIRS = 2**16  # in a table of frequencies
_STILL = 1e29  # a pair with a larger divisor does not rotate
_logger = logging.getLogger("rope_ext")


def is_file_name(name: str) -> bool:
    """Whether a model's name is that of a GGUF file, on disk or on the Hub."""
    return name.endswith(SUFFIX) and not os.path.isdir(name)


def split(given: str | PathLike[str]) -> tuple[Any, dict[str, str]]:
    """Split ``FOLDER/FILE.gguf`` or ``OWNER/NAME/FILE.gguf`` into the arguments of transformers.

    They are a folder or Hub ID, and ``{"gguf_file": FILE}``; for other models, the name and ``{}``.
    """
    name = str(given)
    if not is_file_name(name):
        return given, {}
    folder, file = os.path.split(name)
    if name.count("/") > 1 and not os.path.isdir(folder) and not os.path.isabs(name):
        owner, repository, file = name.split("/", 2)
        folder = f"{owner}/{repository}"
    return folder or os.curdir, {"gguf_file": file}


def joined(folder: str, gguf_file: str) -> str:
    """The inverse of :func:`split`; transformers also accepts a full path as ``gguf_file``."""
    return gguf_file if os.path.isfile(gguf_file) else os.path.join(folder, gguf_file)


def load_config(folder: str, gguf_file: str, **options: Any) -> Any:
    """Return the configuration of a GGUF file, with the trained length of its weights."""
    name = joined(folder, gguf_file)
    if os.path.isfile(name):
        config = copy.deepcopy(_config(folder, gguf_file, os.stat(name).st_mtime_ns))
    else:
        require_readable(folder, gguf_file, **options)
        config = AutoConfig.from_pretrained(folder, gguf_file=gguf_file, **options)
    config.name_or_path = name
    return config


def require_readable(folder: str, gguf_file: str, **options: Any) -> None:
    """Raise LoadError unless a GGUF file in a folder or on the Hub can be read with bounds.

    transformers reads it without.
    """
    name = joined(folder, gguf_file)
    if not os.path.isfile(name):
        name = cached_file(folder, gguf_file, **options)
    if name is not None:
        try:
            require_sound(name)
        except (OSError, ValueError) as error:
            raise LoadError(f"cannot read {name} as a GGUF file ({first_line(error)})") from error


@lru_cache(maxsize=4)  # the library takes seconds to parse a vocabulary
def _config(folder: str, gguf_file: str, changed: int) -> Any:
    found = read_scaling(joined(folder, gguf_file))  # first, since its errors name the file
    config = AutoConfig.from_pretrained(folder, gguf_file=gguf_file)
    if found is not None and found.method is not None:
        text_of(config).max_position_embeddings = found.length
    return config


def adopt(model: nn.Module, name: str | None = None) -> None:
    """Turn a model dequantized from a GGUF file into an ordinary one, named after the file.

    transformers would refuse to save, train or cast it. Warns if the file scales RoPE.
    """
    outermost: Any = unwrap(model)
    quantizer: Any = getattr(outermost, "hf_quantizer", None)
    file = getattr(getattr(quantizer, "quantization_config", None), "gguf_file", None)
    if file is not None and not quantizer.packed_modules:  # its weights are dequantized
        name = name or joined(outermost.config.name_or_path, file)
        quantizer.remove_quantization_config(outermost)
    if name is not None:
        outermost.config.name_or_path = outermost.name_or_path = name
        for note in scaling_notes(outermost.config):
            _logger.warning("rope_ext: %s", note)


def file_of(config: Any) -> str | None:
    """Return the GGUF file that a model was loaded from, according to its configuration."""
    name = getattr(config, "name_or_path", None) or ""
    return name if is_file_name(name) else None


@dataclass(frozen=True)
class FileScaling:
    """RoPE scaling in a GGUF file that transformers ignores."""

    text: str  # its keys and tensors
    length: int  # trained length, tokens
    method: FrequencyMethod | None  # equivalent method; None: none is known


def scaling_notes(config: Any) -> tuple[str, ...]:
    """Describe the scaling in a GGUF file that transformers ignores, and how to restore it."""
    name = file_of(config)
    found = read_scaling(name) if name is not None and os.path.isfile(name) else None
    if found is None:
        return ()
    note = f"{name} scales RoPE ({found.text}), which transformers ignores"
    if found.method is None:
        return (f"{note}; no method of rope_ext is known to restore it",)
    call = patch_call(found.method, original_max_position_embeddings=found.length)
    return (f"{note}; restore it with {call}",)


def read_scaling(path: str | Path) -> FileScaling | None:
    """Read the scaling of a GGUF file that transformers ignores; None if there is none."""
    changed = os.stat(path).st_mtime_ns if os.path.exists(path) else 0  # `read` says what is wrong
    return _scaling(str(path), changed)


@lru_cache(maxsize=4)
def _scaling(path: str, changed: int) -> FileScaling | None:
    _, keys, tables = read(path)
    family = str(keys.get("general.architecture"))
    if not scales(keys, tables) or family in _IN_FORCE:
        return None
    prefix = f"{family}.rope.scaling."
    own = {name.removeprefix(prefix): v for name, v in keys.items() if name.startswith(prefix)}
    context = keys[f"{family}.context_length"]
    base = keys.get(f"{family}.rope.freq_base", 10000.0)
    method, length = _equivalent(own, tables, base=base, context=context)
    shown = [f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in own.items()]
    return FileScaling(text=", ".join([*shown, *tables]), length=length or context, method=method)


def _equivalent(
    own: Mapping[str, Any], tables: Mapping[str, list[float]], base: float, context: int
) -> tuple[FrequencyMethod | None, int | None]:
    """Return the method that a file's scaling is, and its trained length in tokens, if known.

    ``own`` has the keys of ``rope.scaling``, without this prefix; ``context`` is the length with
    scaling, in tokens.
    """
    kind = own.get("type", "none")
    factor = own.get("factor")
    length = own.get("original_context_length")
    multiplier = own.get("attn_factor")
    temperature = {} if multiplier is None else {"attention_factor": multiplier}
    if kind == "yarn" and factor:
        return _yarn(own, factor), length
    if kind == "linear" and factor:
        return PI(factor=factor, **temperature), length or round(context / factor)
    if LONG in tables:
        method = LongRoPE(
            factor=context / (length or context),
            long_factor=tables[LONG],
            short_factor=tables.get(SHORT),
            **temperature,
        )
        return method, length
    if TABLE in tables:
        return _of_table(
            tables[TABLE], base=base, context=context, length=length, multiplier=multiplier or 1.0
        )
    return None, length


def _yarn(own: Mapping[str, Any], factor: float) -> YaRN:
    options = {f"beta_{end}": own.get(f"yarn_beta_{end}") for end in ("fast", "slow")}
    multiplier = own.get("attn_factor")
    if multiplier is not None:  # llama.cpp multiplies it by its own
        options["attention_factor"] = multiplier * yarn_factor(factor)
    given = {name: value for name, value in options.items() if value is not None}
    return YaRN(factor=factor, **given)


def scales(keys: Mapping[str, Any], tables: Mapping[str, Any]) -> bool:
    """Whether a file scales RoPE, by its keys and tables."""
    rope = f"{keys.get('general.architecture')}.rope.scaling."
    multiplied = keys.get(f"{rope}attn_factor") not in (None, 1)
    return bool(tables) or keys.get(f"{rope}type", "none") != "none" or multiplied


def _of_table(
    table: list[float], base: float, context: int, length: int | None, multiplier: float
) -> tuple[FrequencyMethod, int]:
    """Return the method whose frequencies match a table, and the trained length."""
    divisors = torch.tensor(table, dtype=torch.float64)
    largest = max((number for number in table if number < _STILL), default=1.0)
    trained = length or round(context / largest)
    factor = context / trained
    known = [cls for cls in all_methods() if issubclass(cls, FrequencyMethod)]
    # Llama 3 models were trained on 8192 tokens; their files do not contain this length.
    tried = [(Llama3, largest, 8192), *((cls, factor, trained) for cls in known)]
    for cls, by, tokens in tried:
        rope = Rope.geometric(base, 2 * len(table), tokens)
        try:
            method = cls(factor=by)
            inv_freq = method.inv_freq(rope)
        except (RopeExtError, TypeError):  # for example, required options are missing
            continue
        if method.is_dynamic or not torch.allclose(inv_freq, rope.inv_freq / divisors, 1e-5, 1e-25):
            continue
        if abs(method.attention_scaling(rope) / multiplier - 1) > 1e-5:
            method = cls(factor=by, attention_factor=multiplier)
        return method, tokens
    return LongRoPE(factor=factor, long_factor=table, attention_factor=multiplier), trained


def read(path: str | Path) -> tuple[Any, dict[str, Any], dict[str, list[float]]]:
    """Open a GGUF file; raises LoadError if it cannot be read.

    Returns the library's reader, the keys besides those of the tokenizer, and frequency tables.
    """
    gguf = optional("gguf", needs="GGUF files need", extra="gguf", kind=LoadError)
    try:
        require_sound(path)
        reader = gguf.GGUFReader(path)
        fields = [field for field in reader.fields.values() if "tokenizer." not in field.name]
        keys = {field.name: field.contents() for field in fields}
        found = [tensor for tensor in reader.tensors if tensor.name in (TABLE, LONG, SHORT)]
        if any(tensor.n_elements > _MOST_PAIRS for tensor in found):
            raise ValueError("its table of frequencies is too large")
        tables = {tensor.name: tensor.data.tolist() for tensor in found}
    except LoadError:
        raise
    except Exception as error:  # of many kinds, where the file is cut or no GGUF file
        raise LoadError(f"cannot read {path} as a GGUF file ({first_line(error)})") from error
    if keys.get("split.count", 1) > 1:
        raise LoadError(
            f"{path} is one of several parts; join them first (llama-gguf-split --merge)"
        )
    return reader, keys, tables
