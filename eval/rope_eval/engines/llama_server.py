"""Runs the llama.cpp server in the ``xllamacpp`` package with a llama-server command line.

``python -m rope_eval.engines.llama_server --model MODEL.gguf ...`` prints the server's address and
serves until stdin closes. llama.cpp's own parser reads the command line.
"""

import ctypes
import importlib
import struct
import sys
from typing import Any

ADDRESS = ("--host", "127.0.0.1", "--port", "0")
_PARSER = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"


def parsed(xllamacpp: Any, words: list[str]) -> Any:
    """Parse ``words`` with llama.cpp's parser into parameters of ``xllamacpp.Server``."""
    probe = xllamacpp.CommonParams()
    # Made-up values of the first two fields, by which the structure is found in the object.
    probe.n_predict = 1_234_567
    probe.n_ctx = 7_654_321
    raw = ctypes.string_at(id(probe), type(probe).__basicsize__)
    offset = raw.find(struct.pack("<ii", 1_234_567, 7_654_321))
    parse = getattr(ctypes.CDLL(xllamacpp.xllamacpp.__file__), _PARSER, None)
    if offset < 0 or parse is None:
        raise RuntimeError(f"xllamacpp {xllamacpp.__version__} is not supported")
    parse.restype = ctypes.c_bool
    given = [word.encode() for word in ("llama-server", *words)]
    for program in range(32):  # of the parser's programs, only the server accepts --host
        params = xllamacpp.CommonParams()
        arguments = (ctypes.c_char_p * (len(given) + 1))(*given, None)
        if parse(len(given), arguments, ctypes.c_void_p(id(params) + offset), program, None):
            return params
    raise RuntimeError(f"llama.cpp does not accept {' '.join(words)}")


if __name__ == "__main__":
    xllamacpp: Any = importlib.import_module("xllamacpp")  # compiled, without type stubs
    server = xllamacpp.Server(parsed(xllamacpp, [*sys.argv[1:], *ADDRESS]))
    print(f"address {server.listening_address}", flush=True)
    sys.stdin.read()
