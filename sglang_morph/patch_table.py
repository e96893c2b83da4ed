"""The ledger as a table: what is changed in SGLang, why, and whether it fits."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from patches.apply import PatchState, state_of
from patches.registry import ALL_PATCHES
from patches.upstream import installed_version, pinned

_STYLES = {PatchState.OK: "green", PatchState.CHANGED: "red", PatchState.MISSING: "red"}


def print_patches(*, only_misfits: bool) -> bool:
    """Print the ledger, or only what does not fit. Returns whether everything fits."""
    states = [(patch, state_of(patch)) for patch in ALL_PATCHES]
    version_fits = installed_version() == pinned().version
    console = Console(highlight=False)
    if only_misfits:
        for patch, state in states:
            if state is not PatchState.OK:
                console.print(f"{patch.name}: {patch.target} is {state.value}", soft_wrap=True)
    else:
        table = Table(show_lines=True)
        for heading in ("patch", "state", "target", "why", "removed when"):
            table.add_column(heading, overflow="fold")
        for patch, state in states:
            table.add_row(
                patch.name,
                f"[{_STYLES[state]}]{state.value}[/]",
                f"{patch.target}\n{patch.kind}, {patch.process} process",
                f"{patch.why}\n[dim]Nothing milder: {patch.why_not_milder}[/]",
                f"{patch.remove_when}\n[dim]Upstream: {patch.upstream}[/]",
            )
        console.print(table)
    misfits = sum(state is not PatchState.OK for _, state in states)
    console.print(
        f"{len(states)} patches for {pinned().name} {pinned().version}, installed is "
        f"{installed_version() or 'none'}: {misfits} do not fit",
        soft_wrap=True,
    )
    return version_fits and not misfits
