"""Morph bundles: a precision plan and its variants, made once and loaded at every start."""

from typing import Final

AUTO: Final = "auto"
"""Instead of a folder: the cache's bundle for this model and these variants, made if missing."""
