"""The demo: the same burst against stock SGLang and against an elastic memory budget."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_morph.demo.arm import STATIC, ArmRun, ArmSetup, run_arm
from sglang_morph.demo.burst import BurstRequest, make_burst
from sglang_morph.demo.client import RequestResult
from sglang_morph.demo.model import ensure_model
from sglang_morph.demo.model_shape import read_shape
from sglang_morph.demo.provenance import Provenance
from sglang_morph.demo.report import (
    Measure,
    checks,
    checks_table,
    comparison_table,
    measures,
    summarize,
    write_results,
)
from sglang_morph.demo.timeline import draw_timeline


class _Line:
    """One progress line for one arm (a `Reporter`)."""

    def __init__(self, progress: Progress, backend: str, requests: int) -> None:
        self._progress = progress
        self._backend = backend
        self._requests = requests
        self._task = progress.add_task(f"{backend}: starting the server", total=None)

    def starting(self, passed_s: float) -> None:
        self._progress.update(self._task, completed=0)

    def finished(self, result: RequestResult) -> None:
        self._progress.update(
            self._task, description=f"{self._backend}: requests", total=self._requests, advance=1
        )

    def settling(self, level: int) -> None:
        self._progress.update(self._task, description=f"{self._backend}: restoring, level {level}")


def run_demo(
    output: Path, backend: str, base_tokens: int, origin: Provenance, console: Console
) -> list[Measure]:
    """Run `static` and `backend`, print the tables, write what was measured into `output`.

    Returns what must hold. Raises `ModelUnavailable`, `ServerFailed`, `httpx.HTTPError`.
    """
    output.mkdir(parents=True, exist_ok=True)
    checkpoint = ensure_model(console)
    burst = make_burst()
    console.print(f"{len(burst)} requests against {base_tokens:,} base tokens of KV cache")
    setups = [ArmSetup(name, checkpoint, base_tokens, output) for name in (STATIC, backend)]
    runs = [_run_with_progress(setup, burst, console) for setup in setups]

    static, morph = summaries = [summarize(run) for run in runs]
    must_hold = checks(static, morph)
    console.print(comparison_table(summaries), checks_table(must_hold))
    found = [*must_hold, *measures(static), *measures(morph)]
    write_results(output / "results.json", runs, summaries, found, origin)
    draw_timeline(runs, read_shape(checkpoint).page_bytes, output / "timeline.png")
    console.print(f"Wrote {output / 'results.json'} and {output / 'timeline.png'}")
    return must_hold


def _run_with_progress(setup: ArmSetup, burst: list[BurstRequest], console: Console) -> ArmRun:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console.print(f"{setup.backend}: starting a server, which logs to {setup.server_log}")
    with Progress(*columns, console=console) as progress:
        return run_arm(setup, burst, _Line(progress, setup.backend, len(burst)))
