"""Prompt tokens in a queue, in constant time: counted where it is short, estimated where long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

COUNTED = 64
"""Requests looked at; a longer queue is taken to go on as it begins."""

Request = TypeVar("Request")


def waiting_tokens(queue: Sequence[Request], tokens_of: Callable[[Request], int]) -> int:
    """Tokens of all requests in `queue`. SGLang replaces its queue as a whole and takes requests
    out in several places, so a running count would drift."""
    counted = sum(tokens_of(queue[index]) for index in range(min(len(queue), COUNTED)))
    return counted if len(queue) <= COUNTED else round(counted * len(queue) / COUNTED)
