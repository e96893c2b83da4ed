"""The ledger is complete, and fits the installed SGLang."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from patches import apply, upstream
from patches.apply import PatchError, PatchState, check, state_of
from patches.ledger import Patch
from patches.registry import ALL_PATCHES
from patches.upstream import installed_version, pinned

each_patch = pytest.mark.parametrize("patch", ALL_PATCHES, ids=lambda patch: patch.name)


def test_installed_sglang_is_the_pinned_one() -> None:
    assert installed_version() == pinned().version
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in pinned().wheels.values())


def test_names_and_targets_are_unique() -> None:
    assert len({patch.name for patch in ALL_PATCHES}) == len(ALL_PATCHES)
    assert len({patch.target for patch in ALL_PATCHES}) == len(ALL_PATCHES)


@each_patch
def test_target_is_unchanged(patch: Patch) -> None:
    assert state_of(patch) is PatchState.OK


@each_patch
def test_ledger_entry_says_why(patch: Patch) -> None:
    for text in (patch.why, patch.why_not_milder, patch.upstream, patch.remove_when):
        assert text.strip()


def test_changed_source_is_refused_by_name() -> None:
    patch = replace(ALL_PATCHES[0], source_sha256="0" * 64)
    assert state_of(patch) is PatchState.CHANGED
    with pytest.raises(PatchError, match=f"'{patch.name}'.*changed"):
        check([patch])


@pytest.mark.parametrize(
    "target",
    ["sglang.srt.managers.scheduler.Scheduler.gone", "sglang.srt.gone.Scheduler.run"],
)
def test_missing_target_is_refused_by_name(target: str) -> None:
    patch = replace(ALL_PATCHES[0], target=target)
    assert state_of(patch) is PatchState.MISSING
    with pytest.raises(PatchError, match=f"'{patch.name}'.*missing"):
        check([patch])


@pytest.mark.parametrize("installed", ["0.5.18", None])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, installed: str | None) -> None:
    monkeypatch.setattr(apply, "installed_version", lambda: installed)
    with pytest.raises(PatchError, match=f"0.5.17, installed is {installed or 'none'}; install"):
        check([])


def test_absent_sglang_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(pinned(), name="no-such-distribution")
    monkeypatch.setattr(upstream, "pinned", lambda: absent)
    assert installed_version() is None
