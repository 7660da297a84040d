"""The manuals that the evidence is measured on: long English text that pip can download anywhere.

Each document is the manual in the source release of one package, its chapters joined in the order
of their names. Their licenses allow redistribution.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rope_ext.errors import MeasureError, first_line


@dataclass(frozen=True)
class Manual:
    """The documentation in a source release on PyPI.

    Args:
        package: its name there.
        version: the release.
        sha256: of the archive.
        chapters: directories of it, in order.
    """

    package: str
    version: str
    sha256: str
    chapters: tuple[str, ...]

    def read(self, cache: Path) -> str:
        """Return the whole text; download the archive with pip if it is not in ``cache``.

        Raises:
            MeasureError: the download fails, or the archive is another one.
        """
        path = cache / f"{self.package}-{self.version}.tar.gz"
        if not path.exists():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            pip += ["--disable-pip-version-check", "--no-binary", self.package]
            pip += ["--dest", str(cache), f"{self.package}=={self.version}"]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip() or "pip failed").splitlines()[-1]
                raise MeasureError(f"cannot download {path.name}: {reason}; check the network")
        try:
            archive = path.read_bytes()
        except OSError as error:
            raise MeasureError(f"cannot read {path}: {first_line(error)}") from None
        found = hashlib.sha256(archive).hexdigest()
        if found != self.sha256:
            raise MeasureError(
                f"{path} has the SHA-256 {found}, expected {self.sha256}; remove the file"
            )
        texts: dict[tuple[int, str], str] = {}
        with tarfile.open(path) as files:
            for file in files:
                name = file.name.partition("/")[2]
                order = next((n for n, c in enumerate(self.chapters) if name.startswith(c)), None)
                content = files.extractfile(file) if name.endswith((".rst", ".txt")) else None
                if order is not None and content is not None:
                    texts[order, name] = content.read().decode()
        return "\n\n".join(texts[key].strip() for key in sorted(texts))


MANUALS = (
    Manual(
        "django",
        "5.2.5",
        "0745b25681b129a77aae3d4f6549b62d3913d74407831abaa0d9021a03954bae",
        ("docs/topics/",),
    ),
    Manual(
        "docutils",
        "0.21.2",
        "3a6b18732edf182daa3cd12775bbb338cf5691468f91eeeb109deff6ebfa986f",
        ("docs/user/", "docs/ref/rst/"),
    ),
    Manual(
        "celery",
        "5.5.3",
        "6c972ae7968c2b5281227f01c3a3f984037d21c5129d07bf3550cc2afc6b10a5",
        ("docs/userguide/", "docs/getting-started/"),
    ),
    Manual(
        "pyramid",
        "2.0.2",
        "372138a738e4216535cc76dcce6eddd5a1aaca95130f2354fb834264c06f18de",
        ("docs/narr/",),
    ),
    Manual(
        "pytest",
        "8.4.1",
        "7c67fd69174877359ed9371ec3af8a3d2b04741818c51e5e99cc1742251fa93c",
        ("doc/en/how-to/", "doc/en/explanation/", "doc/en/reference/"),
    ),
    Manual(
        "scrapy",
        "2.13.3",
        "bf17588c10e46a9d70c49a05380b749e3c7fba58204a367a5747ce6da2bd204d",
        ("docs/topics/",),
    ),
    Manual(
        "sphinx",
        "8.2.3",
        "398ad29dee7f63a75888314e9424d40f52ce5a6a87ae88e7071e80af296ec348",
        ("doc/usage/", "doc/tutorial/"),
    ),
    Manual(
        "flask",
        "3.1.2",
        "bf656c15c80190ed628ad08cdfd3aaa35beb087855e2f494910aa3774cc4fd87",
        ("docs/tutorial/", "docs/patterns/", "docs/"),
    ),
)


def read_manuals(manuals: Sequence[Manual], cache: Path) -> list[str]:
    """Return the text of each manual; see :meth:`Manual.read`.

    Raises:
        MeasureError: a download fails, or an archive is another one.
    """
    cache.mkdir(parents=True, exist_ok=True)
    return [manual.read(cache) for manual in manuals]
