"""Patches through SGLang's own registry, on a module of this test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from patches.apply import PatchError, install, source_sha256, state_of, verify
from patches.ledger import Patch
from patches.registry import ALL_PATCHES

SOURCE = """
class Thing:
    def double(self, number):
        return 2 * number
"""
TARGET = "hooked_module.Thing.double"


@pytest.fixture
def hooks() -> Iterator[None]:
    """SGLang's registry, empty, and put back afterwards."""
    saved = dict(HookRegistry._hooks), set(HookRegistry._patched)
    HookRegistry.reset()
    yield
    HookRegistry.reset()
    HookRegistry._hooks.update(saved[0])
    HookRegistry._patched.update(saved[1])


@pytest.fixture
def thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hooks: None) -> Iterator[Any]:
    (tmp_path / "hooked_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import hooked_module  # type: ignore[import-not-found]

    yield hooked_module.Thing()
    del sys.modules["hooked_module"]


@pytest.fixture
def patch(thing: Any) -> Patch:
    """Adds `runtime` to what `double` returns."""
    return replace(
        ALL_PATCHES[0],
        name="adds",
        target=TARGET,
        kind="after",
        source_sha256=source_sha256(TARGET),
        make_hook=lambda runtime: lambda result, *_: result + runtime,
    )


def test_installed_hook_acts(thing: Any, patch: Patch) -> None:
    install(1, [patch])
    assert thing.double(3) == 7


def test_hash_is_that_of_the_source_after_hooking_too(thing: Any, patch: Patch) -> None:
    install(1, [patch])
    assert source_sha256(TARGET) == patch.source_sha256


def test_nothing_is_hooked_when_one_patch_does_not_fit(thing: Any, patch: Patch) -> None:
    with pytest.raises(PatchError, match="'changed'"):
        install(1, [patch, replace(patch, name="changed", source_sha256="0" * 64)])
    assert thing.double(3) == 6


def test_second_installation_is_refused(thing: Any, patch: Patch) -> None:
    install(1, [patch])
    with pytest.raises(PatchError, match="'adds' comes too late.*SGLANG_PLUGINS"):
        install(1, [patch])
    assert thing.double(3) == 7


def test_hook_that_the_registry_drops_is_noticed(thing: Any, patch: Patch) -> None:
    # The registry refuses to wrap a class, and only logs it.
    broken = replace(patch, target="hooked_module.Thing")
    broken = replace(broken, source_sha256=source_sha256(broken.target))
    with pytest.raises(PatchError, match="'adds' was not applied to hooked_module.Thing"):
        install(1, [broken])


def test_verify_wants_every_patch(thing: Any, patch: Patch) -> None:
    with pytest.raises(PatchError, match="'adds' was not applied"):
        verify([patch])
    install(1, [patch])
    verify([patch])


def test_broken_module_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch: Patch
) -> None:
    (tmp_path / "broken_module.py").write_text("import no_such_module_anywhere")
    with pytest.raises(PatchError, match="cannot be checked.*no_such_module_anywhere"):
        state_of(replace(patch, target="broken_module.Thing.double"))
