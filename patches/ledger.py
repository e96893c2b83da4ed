"""A patch: one seam of SGLang, what is done there, and why. No patch copies upstream code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

HookKind = Literal["before", "after", "around"]
Process = Literal["server", "scheduler"]


@dataclass(frozen=True, slots=True)
class Patch:
    """A ledger entry. `make_hook(runtime)` returns the hook for SGLang's `HookRegistry`."""

    name: str
    target: str
    """Dotted path of the hooked SGLang function."""
    kind: HookKind
    process: Process
    """The process in which the hook acts."""
    why: str
    why_not_milder: str
    """Why neither a public extension point nor a subclass does."""
    upstream: str
    """Upstream issue or pull request, or `none found`."""
    remove_when: str
    source_sha256: str
    """SHA-256 of `inspect.getsource(target)` in the pinned SGLang."""
    make_hook: Callable[[Any], Callable[..., Any]]
