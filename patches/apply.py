"""Puts patches into this process through SGLang's `HookRegistry`, and refuses what doesn't fit.

The registry only logs a hook that it could not apply, and the server would run without it. Here
every patch fits and is in place, or an error names the one that is not.
"""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
from collections.abc import Sequence
from enum import Enum
from typing import Any

from patches.ledger import Patch
from patches.upstream import installed_version, pinned


class PatchError(RuntimeError):
    """A patch cannot be used. One line, with the remedy."""


class PatchState(Enum):
    """How a patch compares with the installed SGLang."""

    OK = "ok"
    CHANGED = "changed"
    MISSING = "missing"


def source_sha256(target: str) -> str:
    """SHA-256 of the target's source as upstream wrote it, hooked or not.

    Raises AttributeError or ModuleNotFoundError where the target does not exist.
    """
    parent, _, name = target.rpartition(".")
    function = getattr(pkgutil.resolve_name(parent), name)
    source = inspect.getsource(inspect.unwrap(function))
    return hashlib.sha256(source.encode()).hexdigest()


def state_of(patch: Patch) -> PatchState:
    """Compare the recorded hash with the installed source.

    Raises `PatchError` where the target's module exists but cannot be imported.
    """
    try:
        found = source_sha256(patch.target)
    except AttributeError:
        return PatchState.MISSING
    except (OSError, TypeError):  # something without source has taken its place
        return PatchState.CHANGED
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and patch.target.startswith(f"{error.name}."):
            return PatchState.MISSING
        raise PatchError(
            f"patch {patch.name!r} cannot be checked, {patch.target} is not importable here: "
            f"{error}; start SGLang without patches to see why"
        ) from error
    return PatchState.OK if found == patch.source_sha256 else PatchState.CHANGED


def check_version() -> None:
    """Raises `PatchError` unless the installed SGLang is the pinned one."""
    upstream, installed = pinned(), installed_version()
    if installed != upstream.version:
        raise PatchError(
            f"the patches fit {upstream.name} {upstream.version}, installed is "
            f"{installed or 'none'}; install {upstream.name}=={upstream.version}"
        )


def check(patches: Sequence[Patch]) -> None:
    """Raises `PatchError` unless the version is the pinned one and every target is unchanged."""
    check_version()
    for patch in patches:
        if (state := state_of(patch)) is not PatchState.OK:
            raise PatchError(
                f"patch {patch.name!r} does not fit: its target {patch.target} is {state.value}; "
                f"reinstall {pinned().name}=={pinned().version}"
            )


def install(runtime: Any, patches: Sequence[Patch]) -> None:
    """Check, register and apply `patches` with hooks bound to `runtime`, then verify them.

    Once per process and patch. Raises `PatchError` naming the patch that does not work.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    check(patches)
    for patch in patches:
        # The registry skips a target that it has hooked before: this hook would never run.
        if patch.target in HookRegistry._patched:
            raise PatchError(
                f"patch {patch.name!r} comes too late: {patch.target} is hooked already; "
                "restrict plugins with SGLANG_PLUGINS"
            )
    source = HookSource(plugin_name="sglang_morph", dist_name="sglang-morph")
    for patch in patches:
        hook = patch.make_hook(runtime)
        HookRegistry.register(patch.target, hook, HookType(patch.kind), source=source)
    HookRegistry.apply_hooks()
    verify(patches)


def verify(patches: Sequence[Patch]) -> None:
    """Raises `PatchError` unless every target is hooked in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    for patch in patches:
        if patch.target not in HookRegistry._patched:
            raise PatchError(
                f"patch {patch.name!r} was not applied to {patch.target}; "
                "SGLang's log above says why"
            )
