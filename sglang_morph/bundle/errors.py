from __future__ import annotations


class BundleError(ValueError):
    """A bundle can't be made or used. One line with cause and remedy."""
