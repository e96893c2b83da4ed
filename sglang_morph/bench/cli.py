"""`sglang-morph bench`: replay a trace, compare arms, search for capacity, report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from sglang_morph.demo.provenance import provenance

if TYPE_CHECKING:
    from sglang_morph.bench.comparison_run import Prepared

app = typer.Typer(
    help="Replay request traces and compare memory backends.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_MORE = 3
"""Exit status of `ab` when runs are left for the next call."""


@app.command()
def replay(
    trace: Annotated[Path, typer.Option(help="Azure, BurstGPT or Mooncake trace, may be .gz.")],
    model: Annotated[Path, typer.Option(help="Folder with the model's tokenizer.json.")],
    url: Annotated[str, typer.Option(help="Of the running server.")] = "http://127.0.0.1:30000",
    output: Annotated[Path, typer.Option(help="Folder for rows and requests.")] = Path("replay"),
    name: Annotated[str, typer.Option(help="Names the files of this replay.")] = "replay",
    route: Annotated[str, typer.Option(help="sglang, sglang-oai or sglang-oai-chat.")] = "sglang",
    served_model: Annotated[str, typer.Option(help="Model that OpenAI requests name.")] = "default",
    start: Annotated[float, typer.Option(min=0, help="Window's start, s into the trace.")] = 0.0,
    duration: Annotated[float | None, typer.Option(help="Window's length in s.")] = None,
    densest: Annotated[bool, typer.Option("--densest", help="Busiest window instead.")] = False,
    rate: Annotated[float | None, typer.Option(help="Requests a second wanted.")] = None,
    factor: Annotated[float | None, typer.Option(help="Rate over the trace's own.")] = None,
    scaling: Annotated[str, typer.Option(help="How the rate is changed: stretch or thin.")] = (
        "stretch"
    ),
    seed: Annotated[int, typer.Option(help="Of prompts and thinning.")] = 0,
    text: Annotated[Path | None, typer.Option(help="Text prompts are cut from.")] = None,
    sharing: Annotated[str, typer.Option(help="none, prefix, sessions or blocks.")] = "none",
    prefix_tokens: Annotated[int, typer.Option(help="Length of a shared prefix.")] = 0,
    prefix_groups: Annotated[int, typer.Option(help="Number of shared prefixes.")] = 1,
    token_factor: Annotated[float, typer.Option(help="Multiplies token counts.")] = 1.0,
    max_input_tokens: Annotated[int | None, typer.Option(help="Cut longer prompts.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(help="Cut longer answers.")] = None,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Count, go on.")] = False,
    slo_ttft: Annotated[float, typer.Option(help="SLO of the first token, s.")] = 2.0,
    gap_factor: Annotated[float, typer.Option(help="SLO of gaps, in base TBTs.")] = 5.0,
    base_tbt: Annotated[
        float | None, typer.Option(help="Unloaded time between tokens, s; none: gaps are free.")
    ] = None,
    drain_timeout: Annotated[float, typer.Option(help="Give up so many s after the last.")] = 300.0,
    event_log: Annotated[
        Path | None, typer.Option(help="The server's event log, if it can be read here.")
    ] = None,
    details: Annotated[bool, typer.Option("--output-details", help="Lists per request.")] = False,
) -> None:
    """Replay a trace against a running server, in open loop.

    Appends a row to OUTPUT/results.jsonl as sglang.bench_serving does, and writes each request to
    OUTPUT/NAME.requests.parquet.
    """
    import msgspec

    from sglang_morph.bench.measured_server import MeasuredServer
    from sglang_morph.bench.prompts import default_text, text_tokens
    from sglang_morph.bench.record import write_record
    from sglang_morph.bench.routes import RouteName, make_route
    from sglang_morph.bench.statistics import Slo, append_row
    from sglang_morph.bench.statistics import details as detail_lists
    from sglang_morph.bench.workload import WorkloadSpec, make_workload

    with _one_line_errors():
        spec = msgspec.convert(
            {
                "name": name,
                "trace": trace,
                "start_s": start,
                "duration_s": duration,
                "densest": densest,
                "rate": rate,
                "factor": factor,
                "scaling": scaling,
                "token_factor": token_factor,
                "max_input_tokens": max_input_tokens,
                "max_output_tokens": max_output_tokens,
                "sharing": sharing,
                "prefix_tokens": prefix_tokens,
                "prefix_groups": prefix_groups,
                "skip_damaged": skip_damaged,
            },
            WorkloadSpec,
        )
        route_name = msgspec.convert(route, RouteName)
        prose = default_text() if text is None else text.read_text(encoding="utf-8")
        workload = make_workload(spec, text_tokens(model, prose), seed)
        slo = Slo(ttft_s=slo_ttft, gap_factor=gap_factor, base_tbt_s=base_tbt)
        server = MeasuredServer(
            url.rstrip("/"),
            make_route(route_name, served_model),
            model,
            event_log,
            settle_timeout_s=0.0,
            drain_timeout_s=drain_timeout,
        )
        record = server.measure(workload, slo, name)
    output.mkdir(parents=True, exist_ok=True)
    write_record(output, name, record)
    extra = detail_lists(record.outcomes) if details else {}
    append_row(output / "results.jsonl", record.row | extra)
    _print_row(record.row)
    if record.row["completed"] == 0:
        _fail(f"no request was answered; the first error: {record.outcomes[0].error}")


@app.command()
def ab(
    plan: Annotated[Path, typer.Option(help="TOML file with arms and workloads.")],
    output: Annotated[Path, typer.Option(help="Folder of the runs; give it again to resume.")],
    time_budget: Annotated[
        float | None, typer.Option(help="Length of a slot in s: splits the plan into slots.")
    ] = None,
    slot: Annotated[int | None, typer.Option(min=0, help="Do the runs of this slot only.")] = None,
    stop_after: Annotated[
        float | None,
        typer.Option(help="Begin nothing that would end later than this many s."),
    ] = None,
    gpu_memory_gib: Annotated[
        float | None, typer.Option(help="Emulate a GPU of so many GiB, whatever the plan says.")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Do the plan's workload of this name only. May be given again."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="Run this arm only, the others in a later call. May be given again."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the schedule only.")] = False,
) -> None:
    """Compare arms: the same prompts, in counterbalanced order, and a fresh server a run unless the
    plan says otherwise.

    Exit status 0: all runs asked for are done; 3: runs are left, call again; 2: it could not run.
    """
    from sglang_morph.bench.comparison_run import carry_out, open_folder, pending_runs
    from sglang_morph.bench.ending import end_on_sigterm
    from sglang_morph.bench.progress import RunLine
    from sglang_morph.bench.together_run import carry_out_together

    end_on_sigterm()
    origin = provenance(shlex.join(["sglang-morph", *sys.argv[1:]]))
    with _one_line_errors():
        prepared = _prepare(plan, time_budget, gpu_memory_gib, workload or ())
        if dry_run:
            _print_schedule(prepared)
            return
        open_folder(output, prepared)
        arms = prepared.plan.known_arms(arm or ())
        asked = [r for r in prepared.schedule if slot in (None, r.block) and r.arm in arms]
        runs = pending_runs(output, asked)
        run_all = carry_out if prepared.plan.servers == "fresh" else carry_out_together
        left = run_all(prepared, runs, output, origin, lambda run: RunLine(run.folder), stop_after)
    if left:
        typer.echo(f"{len(left)} runs are left: call again with the same --output")
        raise typer.Exit(_MORE)
    typer.echo(f"done; see `sglang-morph bench report {output}`")


@app.command()
def sweep(
    plan: Annotated[Path, typer.Option(help="TOML file with [[sweeps]].")],
    output: Annotated[
        Path, typer.Option(help="Folder of the comparison; resumed by workload and arm.")
    ],
    gpu_memory_gib: Annotated[
        float | None, typer.Option(help="Emulate a GPU of so many GiB, whatever the plan says.")
    ] = None,
    stop_after: Annotated[
        float | None, typer.Option(help="Try no more rates after this many s.")
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="Only this one's sweeps. May be given again.")
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Search this arm's only. May be given again.")
    ] = None,
) -> None:
    """Search the highest rate that each arm sustains within the SLO."""
    from sglang_morph.bench.ending import end_on_sigterm
    from sglang_morph.bench.progress import RunLine
    from sglang_morph.bench.report import capacity_table
    from sglang_morph.bench.sweep import read_capacities
    from sglang_morph.bench.sweep_run import sweep_arms
    from sglang_morph.bench.tables import markdown

    end_on_sigterm()
    origin = provenance(shlex.join(["sglang-morph", *sys.argv[1:]]))
    with _one_line_errors():
        prepared = _prepare(plan, None, gpu_memory_gib)
        sweeps = prepared.plan.searches(workload or [])
        arms = prepared.plan.known_arms(arm or ())
        sweep_arms(prepared, sweeps, arms, output, origin, RunLine, stop_after)
    typer.echo(markdown(capacity_table(read_capacities(output))))


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="Output of `bench ab`.")]) -> None:
    """Write FOLDER/report.html (one file), FOLDER/report.md and FOLDER/measures.json."""
    from sglang_morph.bench.report import write_report

    with _one_line_errors():
        page, text = write_report(folder)
    typer.echo(f"wrote {page} and {text}")


def _prepare(
    file: Path,
    time_budget: float | None,
    gpu_memory_gib: float | None,
    workloads: Sequence[str] = (),
) -> Prepared:
    import msgspec

    from sglang_morph.bench.comparison_run import prepare
    from sglang_morph.bench.plan import read_plan

    plan = read_plan(file)
    if gpu_memory_gib is not None:
        plan = msgspec.structs.replace(plan, gpu_memory_gib=gpu_memory_gib)
    if workloads:
        plan = plan.part(workloads)
    return prepare(plan, time_budget)


class _one_line_errors:  # noqa: N801 - used as a statement
    """Turns what a user can mend into one line and exit status 2."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        import httpx

        from sglang_morph.bench.server_control import NotSettled
        from sglang_morph.demo.server import ServerFailed

        if isinstance(error, (ValueError, OSError, ServerFailed, NotSettled, httpx.HTTPError)):
            _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(f"sglang-morph bench: {message}", file=sys.stderr)
    raise typer.Exit(2)


def _print_row(row: dict[str, Any]) -> None:
    late = row["lateness_ms"]["p99"]
    lines = {
        "completed": f"{row['completed']} of {row['requests']}",
        "offered": f"{row['offered_rate']:.2f} requests/s for {row['arrival_window_s']:.1f} s",
        "SLO attainment": f"{row['slo_attainment']:.1%}",
        "goodput": f"{row['goodput']:.2f} requests/s",
        "output tokens/s": f"{row['output_throughput']:.1f}",
        "TTFT P50 / P95 / P99 (ms)": _triple(row, "ttft_ms"),
        "TPOT P50 / P95 / P99 (ms)": _triple(row, "tpot_ms"),
        "replayer's lateness P99 (ms)": "unknown" if late is None else f"{late:.2f}",
    }
    for label, value in lines.items():
        typer.echo(f"{label:32}{value}")


def _triple(row: dict[str, Any], name: str) -> str:
    values = [row[f"{key}_{name}"] for key in ("median", "p95", "p99")]
    return " / ".join("-" if value is None else f"{value:.1f}" for value in values)


def _print_schedule(prepared: Prepared) -> None:
    for workload in prepared.workloads:
        typer.echo(
            f"{workload.name}: {len(workload.requests)} requests in {workload.duration_s:.1f} s"
        )
    for run in prepared.schedule:
        names = ", ".join(workload.name for workload in prepared.workloads_of(run.arm))
        typer.echo(f"slot {run.block}: {run.arm}, repetition {run.repetition}: {names}")
