"""`bundle.json`: what a bundle holds, what it was made for, and the digests of its files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from sglang_morph.bundle.errors import BundleError
from sglang_morph.precision.plan import ModelIdentity

SCHEMA_VERSION = 1
MANIFEST = "bundle.json"
PLAN = "plan.json"
SCORES = "scores.json"


class StoredFile(msgspec.Struct, frozen=True):
    """A file of the bundle, whole."""

    path: str
    """From the bundle's folder."""
    nbytes: int
    sha256: str

    @classmethod
    def of(cls, folder: Path, path: str) -> StoredFile:
        file = folder / path
        return cls(path, file.stat().st_size, _sha256(file))

    def check(self, folder: Path) -> None:
        """Raises `BundleError` unless the file is what it was."""
        file = folder / self.path
        try:
            size = file.stat().st_size
            if size != self.nbytes:
                raise _damaged(folder, f"{self.path} has {size} bytes, not {self.nbytes}")
            if _sha256(file) != self.sha256:
                raise _damaged(folder, f"the SHA-256 of {self.path} is not the recorded one")
        except OSError as error:
            raise _damaged(folder, f"{self.path}: {error.strerror}") from error


class StoredVariant(msgspec.Struct, frozen=True):
    """A variant of all layers."""

    quantizer: str
    layouts: dict[str, str]
    """Linear's path -> `Variant.layout` of its parts; of variants that are stored."""
    layers: tuple[StoredFile, ...]
    """By layer; empty where the server derives the variant from the full weights."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`bundle.json`."""

    schema_version: int = SCHEMA_VERSION
    tool_version: str
    fingerprint: str
    """Of all that the content depends on: equal ones mean equal bundles."""
    model: ModelIdentity
    checkpoint_digest: str
    checkpoint_digest_of: str
    """What the digest looks at, for people."""
    device: str
    """Device type that the stored tensors are for."""
    dtype: str
    """Of the weights that were quantized, such as `bfloat16`."""
    calibration: dict[str, Any]
    """Where the text comes from and how much of it was used; empty if none was."""
    plan: StoredFile
    scores: StoredFile | None
    variants: dict[str, StoredVariant]

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Raises `BundleError` where there is none, or it is of another schema."""
        path = folder / MANIFEST
        try:
            document = msgspec.json.decode(path.read_bytes())
        except OSError as error:
            raise BundleError(
                f"{folder} is no morph bundle ({MANIFEST}: {error.strerror}); "
                "give a folder that `sglang-morph profile` has written"
            ) from error
        except msgspec.DecodeError as error:
            raise _damaged(folder, f"{MANIFEST} is not JSON: {error}") from error
        # The version goes first: a newer schema would otherwise be reported as a wrong field.
        version = document.get("schema_version") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"bundle {folder} has schema version {version}, this program reads "
                f"{SCHEMA_VERSION}; make the bundle again"
            )
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            raise _damaged(folder, f"{MANIFEST}: {error}") from error

    def save(self, folder: Path) -> None:
        content = msgspec.json.format(msgspec.json.encode(self), indent=2)
        (folder / MANIFEST).write_bytes(content + b"\n")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _damaged(folder: Path, what: str) -> BundleError:
    return BundleError(f"bundle {folder} is damaged: {what}; make or copy it again")
