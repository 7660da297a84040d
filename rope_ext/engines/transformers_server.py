"""transformers' OpenAI-compatible server, ``transformers serve``, with a patched model."""

import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch

from rope_ext.errors import LoadError, OptionError, brief
from rope_ext.saving import hub
from rope_ext.saving.checkpoints import resolve_device
from rope_ext.saving.gguf_source import is_file_name
from rope_ext.saving.load import from_pretrained


def run(model: str, apply_patch: Callable[[Any], Any] | None, **options: Any) -> None:
    """Load a model with its patch, and serve it until Ctrl-C or SIGTERM.

    Args:
        model: directory or Hub ID, which requests then have to name.
        apply_patch: called with the loaded model, patches it in place; default: the model is
            loaded with the patch that it was saved with.
        **options: arguments of ``transformers.cli.serve.Serve``.

    Raises:
        LoadError: the port is taken, the packages of ``transformers[serving]`` are missing, or no
            model loads.
        OptionError, MeasureError: there is no such dtype, port or device.
    """
    from transformers.utils.import_utils import is_serve_available

    if is_file_name(model):
        raise LoadError(
            f"this server loads no GGUF file such as {model}; serve it with llama-server, whose "
            f"options rope-ext export --engine llama.cpp prints, or save the model as a folder"
        )
    if not is_serve_available():
        raise LoadError(
            "the server needs fastapi and uvicorn; install it with: pip install "
            '"transformers[serving]"'
        )
    _require_dtype(options["dtype"])
    if options["device"] != "auto":
        resolve_device(options["device"])
    _require_free(options["host"], options["port"])
    from transformers.cli import serve
    from transformers.cli.serving import model_manager

    plain = model_manager.ModelManager

    class Patched(plain):
        """Loads each model with its patch; transformers alone refuses or ignores most of them."""

        def _load_model(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
            if apply_patch is not None:
                loaded = super()._load_model(model_id_and_revision, *args, **kwargs)
                apply_patch(loaded)
                return loaded
            name, revision = _split(model_id_and_revision)
            return from_pretrained(
                name,
                revision=revision,
                attn_implementation=self.attn_implementation,
                dtype=self.dtype,
                device_map=self.device,
            )

    # ``Serve`` takes the manager from this module when it is made, and has no argument for it.
    model_manager.ModelManager = Patched
    try:
        # Its blocking mode never stops the thread of continuous batching, and the process stays.
        with hub.loading("weights or tokenizer", model):
            server = serve.Serve(model, non_blocking=True, **options)
    finally:
        model_manager.ModelManager = plain
    try:
        while server._thread.is_alive():  # an interrupted join would call it stopped
            time.sleep(0.2)
    finally:
        server.kill_server()


def _split(model: str) -> tuple[str, str]:
    """Split a model, as transformers' server names it, into its name and revision.

    The server appends ``@main`` where no revision is given, and from transformers 5.24 on it does
    not.
    """
    if os.path.exists(model) or "@" not in model:
        return model, "main"
    name, _, revision = model.rpartition("@")
    return name, revision


def _require_dtype(name: str) -> None:
    if name != "auto" and not isinstance(getattr(torch, name, None), torch.dtype):
        raise OptionError(
            f"--dtype {brief(name)} is not valid; it must be auto, or a dtype of torch such as "
            f"bfloat16"
        )


def _require_free(host: str, port: int) -> None:
    """Raise LoadError if the server could not listen here, which uvicorn finds after loading."""
    if not 1 <= port <= 65535:
        raise OptionError(f"--port {port} is not valid; it must be between 1 and 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.getaddrinfo(host or None, port, family)
        socket.create_server((host, port), family=family).close()
    except socket.gaierror as error:
        raise LoadError(
            f"there is no host {host!r} ({error.strerror}); give --host localhost, or an address "
            f"of this machine"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise LoadError(
                f"{host} is not an address of this machine; give --host localhost, or 0.0.0.0 for "
                f"all of its addresses"
            ) from None
        raise LoadError(
            f"the server cannot listen on {host}:{port} ({error.strerror}); choose another --port"
        ) from None
