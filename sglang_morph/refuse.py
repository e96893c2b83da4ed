"""How a command of `sglang-morph` ends that cannot do what was asked."""

from __future__ import annotations

from typing import NoReturn

import typer

from sglang_morph.refusals import REFUSED


def refuse(message: str) -> NoReturn:
    """One line, with cause and remedy, and status `REFUSED`."""
    typer.echo(f"sglang_morph: {message}", err=True)
    raise typer.Exit(REFUSED)
