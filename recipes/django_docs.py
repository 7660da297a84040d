"""Downloads one release of Django's documentation from PyPI, as prose that every machine can get.

    python recipes/django_docs.py OUTPUT.jsonl  # writes the training documents

Django's license (BSD 3-Clause) covers its documentation. Release notes are left out, because they
are lists of fixed bugs. One document in ten, chosen by a hash of its name, is held out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tarfile
from pathlib import Path
from typing import Literal

from checkpoints.sources import DownloadError, download

RELEASE = "5.2.8"
ARCHIVE = f"django-{RELEASE}.tar.gz"
SHA256 = "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f"
FOLDER = Path("runs/django")


def archive() -> Path:
    """Download the release with pip, unless it is already here.

    Raises:
        SystemExit: the download fails, or the checksum does not match.
    """
    path = FOLDER / ARCHIVE
    if not path.exists():
        try:
            download("django", version=RELEASE, sha256=SHA256, folder=FOLDER)
        except DownloadError as error:
            raise SystemExit(str(error)) from None
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{path} has the SHA-256 {found}, expected {SHA256}; remove it")
    return path


def is_held_out(name: str) -> bool:
    """Whether the document called ``name``, such as ``docs/topics/cache.txt``, is held out."""
    return hashlib.sha256(name.encode()).digest()[0] < 26


def django_docs(split: Literal["train", "held_out"]) -> list[str]:
    """The documents, sorted by name."""
    texts = {}
    with tarfile.open(archive()) as files:
        for file in files:
            name = file.name.partition("/")[2]
            prose = name.startswith("docs/") and name.endswith(".txt")
            content = files.extractfile(file) if file.isfile() else None
            if prose and content is not None and not name.startswith("docs/releases/"):
                texts[name] = content.read().decode()
    held_out = split == "held_out"
    return [texts[n] for n in sorted(texts) if is_held_out(n) == held_out and texts[n].strip()]


def as_jsonl(texts: list[str]) -> str:
    """One document per line."""
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the training documents.")
    parser.add_argument("output", type=Path, help="JSON Lines file to write")
    output = parser.parse_args(arguments).output
    texts = django_docs("train")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(as_jsonl(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
