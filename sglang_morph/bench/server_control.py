"""What the benchmark asks a server besides tokens: its settings, its level, a flush, a digest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx

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
    """`weight` and `kvcache` in GiB, `token_capacity`...; None where the server doesn't tell."""
    states = (info or {}).get("internal_states") or [{}]
    usage: dict[str, Any] | None = states[0].get("memory_usage")
    return usage


def morph_status(url: str) -> dict[str, Any]:
    response = httpx.get(f"{url}/morph/status", timeout=_SHORT_S)
    response.raise_for_status()
    status: dict[str, Any] = response.json()
    return status


def settle(url: str, morphs: bool, timeout_s: float) -> None:
    """Wait until the server is idle and at level 0, then empty its prefix cache.

    Raises `NotSettled`, `httpx.HTTPError`.
    """
    deadline = time.monotonic() + timeout_s
    while morphs and (level := int(morph_status(url)["level"])) > 0:
        if time.monotonic() > deadline:
            raise NotSettled(f"the server is still at level {level} after {timeout_s:.0f} s")
        time.sleep(_POLL_S)
    while True:
        response = httpx.post(f"{url}/flush_cache", timeout=_SHORT_S)
        if response.status_code == httpx.codes.OK:
            return
        if time.monotonic() > deadline:
            raise NotSettled(f"the prefix cache could not be emptied: {response.text.strip()}")
        time.sleep(_POLL_S)


def weights_digest(url: str) -> str:
    """SHA-256 over all parameters as they are now."""
    response = httpx.post(f"{url}/morph/verify", timeout=_DIGEST_S)
    response.raise_for_status()
    return str(response.json()["digest"])
