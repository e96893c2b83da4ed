"""The safetensors files of a checkpoint: what they hold, known without reading it, and reading."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open

from sglang_morph.precision.sources import SourceError


@dataclass(frozen=True, slots=True)
class Header:
    """What a file's header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """By the format's names, such as `F16`, `BF16`, `I32` or `F8_E4M3`."""


class CheckpointFiles:
    """`config.json` and all `*.safetensors` of a folder. Raises `SourceError` where unreadable."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = self._read_config()
        self._headers = self._read_headers()

    def header(self, name: str) -> Header | None:
        """None where the checkpoint has no such tensor."""
        return self._headers.get(name)

    def check(self, name: str, shape: Sequence[int], dtypes: Sequence[str], where: str) -> None:
        """Raises `SourceError` unless tensor `name` exists with that shape and one of `dtypes`."""
        header = self.header(name)
        if header is None:
            raise SourceError(f"{where}: {self.folder} has no tensor {name}; {REMEDY}")
        if header.shape != tuple(shape):
            raise SourceError(
                f"{where}: {name} is {list(header.shape)}, this model needs {list(shape)}; {REMEDY}"
            )
        if header.dtype not in dtypes:
            raise SourceError(
                f"{where}: {name} is {header.dtype}, not {' or '.join(dtypes)}; {REMEDY}"
            )

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the host."""
        try:
            with safe_open(self._headers[name].file, framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise SourceError(
                f"{name} cannot be read from {self.folder} ({error}); copy the checkpoint again"
            ) from error

    def _read_config(self) -> dict[str, Any]:
        path = self.folder / "config.json"
        with suppress(OSError, orjson.JSONDecodeError):
            config = orjson.loads(path.read_bytes())
            if isinstance(config, dict):
                return config
        raise SourceError(
            f"{self.folder} is not the folder of a checkpoint: it has no readable config.json; "
            "give --morph-variant-checkpoint a quantized model in Hugging Face's layout"
        )

    def _read_headers(self) -> dict[str, Header]:
        headers: dict[str, Header] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - it is no mapping
                        part = file.get_slice(name)
                        headers[name] = Header(path, tuple(part.get_shape()), part.get_dtype())
            except (SafetensorError, OSError) as error:
                raise SourceError(
                    f"{path} is not a whole safetensors file ({error}); copy the checkpoint again"
                ) from error
        if not headers:
            raise SourceError(
                f"{self.folder} has no *.safetensors; convert the checkpoint to that format"
            )
        return headers


REMEDY = "give a checkpoint of the model that is served"
