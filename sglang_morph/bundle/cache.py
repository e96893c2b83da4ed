"""Where bundles are kept unless told otherwise: models may lie in folders that can't be written."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "SGLANG_MORPH_CACHE"


def bundle_folder(model: str, fingerprint: str) -> Path:
    """Of the bundle with `fingerprint` for the model of that name or path."""
    name = Path(model).name or "model"
    return _root() / "bundles" / f"{name}-{fingerprint[:16]}"


def _root() -> Path:
    """`$SGLANG_MORPH_CACHE`, else the user's cache folder."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "sglang_morph"
