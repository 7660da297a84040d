"""Make the links of README.md absolute for the page of a package index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class AbsoluteLinks(MetadataHookInterface):
    """Sets the readme of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme: pictures are raw files of the repository, links its pages."""
        repository = metadata["urls"]["Homepage"]
        raw = repository.replace("//github.com/", "//raw.githubusercontent.com/") + "/main/"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"(!\[[^\]]*\]\()(?!http|#)", rf"\g<1>{raw}", text)
        text = re.sub(r"((?<!!)\[[^\]]*\]\()(?!http|#)", rf"\g<1>{repository}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
