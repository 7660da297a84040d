"""Downloads source releases from PyPI whose SHA-256 is known."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


class DownloadError(RuntimeError):
    """A release cannot be downloaded, or is not what it was."""


def download(package: str, version: str, sha256: str, folder: Path) -> None:
    """Download the source release of a package into ``folder`` with pip.

    pip executes the release to read its metadata, so pip checks the sum first.

    Raises:
        DownloadError: pip fails, or the sum is another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--disable-pip-version-check", "--require-hashes", "--no-binary", package]
    with tempfile.TemporaryDirectory() as temporary:
        requirements = Path(temporary) / "requirements.txt"
        requirements.write_text(f"{package}=={version} --hash=sha256:{sha256}\n")
        words = ["--dest", str(folder), "--requirement", str(requirements)]
        done = subprocess.run([*pip, *words], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "pip failed").splitlines()[-1].strip()
        raise DownloadError(f"cannot download {package} {version}: {reason}")
