"""The pinned SGLang: what `UPSTREAM.toml` says, and what is installed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True)
class Upstream:
    """`wheels` maps a wheel's file name to its SHA-256."""

    name: str
    version: str
    wheels: dict[str, str]


@cache
def pinned() -> Upstream:
    """The pin, as recorded in `UPSTREAM.toml`."""
    return Upstream(**tomllib.loads(files("patches").joinpath("UPSTREAM.toml").read_text("utf-8")))


def installed_version() -> str | None:
    """Version of the installed SGLang; None where there is none."""
    try:
        return version(pinned().name)
    except PackageNotFoundError:
        return None
