"""What the benchmark asks a server besides tokens: its settings, its level, a flush, a digest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from sglang_morph.bench.checkpoint_size import checkpoint_bytes

_POLL_S = 0.5
_SHORT_S = 30.0
_DIGEST_S = 600.0


class NotSettled(RuntimeError):
    """A server that did not come to rest. The message says in what state it is."""


def server_info(url: str) -> dict[str, Any] | None:
    """SGLang's settings and state; None where the server has no such route."""
    response = httpx.get(f"{url}/server_info", timeout=_SHORT_S)
    if response.status_code != httpx.codes.OK:
        return None
    info: dict[str, Any] = response.json()
    return info


def memory_of(info: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`weight` and `kvcache` in GiB, `token_capacity`...; None where the server doesn't tell.

    SGLang measures `weight` as a fall of free memory. On a CPU that says little, since a
    checkpoint's file is mapped, so the weights are counted there.
    """
    states = (info or {}).get("internal_states") or [{}]
    usage: dict[str, Any] | None = states[0].get("memory_usage")
    if usage is None or info is None or info.get("device") != "cpu":
        return usage
    counted = checkpoint_bytes(Path(info["model_path"]), info["dtype"])
    return usage if counted is None else {**usage, "weight": counted / 2**30}


def morph_status(url: str) -> dict[str, Any]:
    response = httpx.get(f"{url}/morph/status", timeout=_SHORT_S)
    response.raise_for_status()
    status: dict[str, Any] = response.json()
    return status


def set_level(url: str, level: int) -> None:
    """Ask for a precision level, under `--morph-policy manual`. Raises `httpx.HTTPError`."""
    httpx.post(f"{url}/morph/level", json={"level": level}, timeout=_SHORT_S).raise_for_status()


def wait_for_level(url: str, level: int, timeout_s: float) -> None:
    """Return once the server rests at `level`. Raises `NotSettled`, `httpx.HTTPError`."""
    deadline = time.monotonic() + timeout_s
    while (found := _resting_level(url)) != level:
        if time.monotonic() > deadline:
            raise NotSettled(
                f"after {timeout_s:.0f} s the server is not at level {level} but "
                f"{'on its way there' if found is None else f'at level {found}'}"
            )
        time.sleep(_POLL_S)


def flush(url: str, timeout_s: float) -> None:
    """Empty the prefix cache once the server is idle. Raises `NotSettled`, `httpx.HTTPError`."""
    deadline = time.monotonic() + timeout_s
    while True:
        response = httpx.post(f"{url}/flush_cache", timeout=_SHORT_S)
        if response.status_code == httpx.codes.OK:
            return
        if time.monotonic() > deadline:
            raise NotSettled(f"the prefix cache could not be emptied: {response.text.strip()}")
        time.sleep(_POLL_S)


def freeze_gc(url: str) -> None:
    """Leave what lives as long as the server out of its garbage collections, where it can that.

    A full one stops a server for half a second, about once in a minute of load, and whoever is
    decoding then misses an SLO on gaps: chance, when arms are compared. Raises `httpx.HTTPError`.
    """
    response = httpx.post(f"{url}/freeze_gc", timeout=_SHORT_S)
    if response.status_code != httpx.codes.NOT_FOUND:
        response.raise_for_status()


def _resting_level(url: str) -> int | None:
    """None in the middle of a restore."""
    status = morph_status(url)
    return None if status.get("restoring") else int(status["level"])


def weights_digest(url: str) -> str:
    """SHA-256 over all parameters as they are now."""
    response = httpx.post(f"{url}/morph/verify", timeout=_DIGEST_S)
    response.raise_for_status()
    return str(response.json()["digest"])
