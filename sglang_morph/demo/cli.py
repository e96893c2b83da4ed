"""`sglang-morph demo`: run the comparison and say whether everything held."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from sglang_morph.demo.provenance import provenance

app = typer.Typer(subcommand_metavar="")

ElasticBackend = Literal["layer_swap", "semi_unified"]


@app.callback(invoke_without_command=True)
def demo(
    output: Annotated[
        Path, typer.Option(help="Folder of results.json, timeline.png and the logs.")
    ] = Path("demo"),
    memory_backend: Annotated[
        ElasticBackend, typer.Option(help="What is compared with stock SGLang.")
    ] = "layer_swap",
    base_tokens: Annotated[
        int, typer.Option(min=512, help="KV cache tokens of both servers at full precision.")
    ] = 1280,
) -> None:
    """Replay one burst against stock SGLang and an elastic backend; exit code 0 if all held."""
    # The rest of the command line works without the libraries of the extra `bench`.
    import httpx

    from sglang_morph.demo.model import ModelUnavailable
    from sglang_morph.demo.run import run_demo
    from sglang_morph.demo.server import ServerFailed

    console = Console()
    signal.signal(signal.SIGTERM, _leave)
    origin = provenance(shlex.join(["sglang-morph", *sys.argv[1:]]))
    try:
        must_hold = run_demo(output, memory_backend, base_tokens, origin, console)
    except (ModelUnavailable, ServerFailed, httpx.HTTPError) as error:
        console.print(f"[bold red]The demo could not run:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None
    if not all(measure.holds for measure in must_hold):
        console.print("[bold red]Not everything held.[/]")
        raise typer.Exit(1)
    console.print("[green]Everything held.[/]")


def _leave(number: int, frame: FrameType | None) -> None:
    """Unwind as for Ctrl-C, so that the server is ended."""
    raise SystemExit(128 + number)
