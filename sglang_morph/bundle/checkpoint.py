"""Which checkpoint a bundle belongs to, told from its files without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import orjson

from sglang_morph.bundle.errors import BundleError

SAMPLE_BYTES = 4096
METHOD = f"sizes, headers, and the first and middle {SAMPLE_BYTES} bytes of every tensor"
"""What `checkpoint_digest` looks at. Any usual retraining changes some bytes of every tensor."""

_LENGTH_BYTES = 8
"""A safetensors file begins with its header's length, little-endian."""


def checkpoint_folder(model_path: str, revision: str | None = None) -> Path:
    """`model_path` if it is a folder, else where the hub's client has it already.

    Raises `BundleError` where it isn't on this machine yet.
    """
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(model_path, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
        raise BundleError(
            f"{model_path} is not on this machine, and a bundle is made for files that are; "
            "download the model first, or give its folder"
        ) from error
    return Path(found)


def checkpoint_digest(folder: Path) -> str:
    """SHA-256, in hex, over `METHOD` of all safetensors files. Raises `BundleError`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BundleError(f"{folder} has no safetensors files; bundles need a model stored so")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        try:
            _update(digest, file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BundleError(
                f"{file} is not a whole safetensors file ({error}); download the model again"
            ) from error
    return digest.hexdigest()


def _update(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = file.read(min(length, path.stat().st_size))
        tensors = orjson.loads(header)
        digest.update(header)
        for name, tensor in tensors.items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            for offset in (start, start + (end - start) // 2):
                file.seek(_LENGTH_BYTES + length + offset)
                digest.update(file.read(min(SAMPLE_BYTES, end - offset)))
