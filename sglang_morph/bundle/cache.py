"""Where bundles and measurements are kept unless told otherwise: models may lie in folders that
can't be written."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "SGLANG_MORPH_CACHE"


def bundle_folder(model: str, fingerprint: str) -> Path:
    """Of the bundle with `fingerprint` for the model of that name or path."""
    name = Path(model).name or "model"
    return _root() / "bundles" / f"{name}-{fingerprint[:16]}"


def kernel_times_file(gpu: str, fingerprint: str) -> Path:
    """Of what kernels cost on GPUs of that name."""
    return _root() / "kernel_times" / f"{gpu}-{fingerprint[:16]}.json"


def _root() -> Path:
    """`$SGLANG_MORPH_CACHE`, else the user's cache folder."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "sglang_morph"
