"""`sglang-morph policy`: replay on a recording, simulate on a trace, solve for two modes."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from sglang_morph.policy_cli.simulation import DEFAULT_TICK_S
from sglang_morph.refuse import refuse

app = typer.Typer(help="Try and compare policies without a server.", no_args_is_help=True)

_POLICIES = ["threshold", "slo", "two_mode"]
_ARMS = [
    "full",
    "low",
    "threshold:mode=accuracy",
    "threshold",
    "threshold:mode=performance",
    "two_mode",
    "slo",
]

PolicyOption = Annotated[
    list[str],
    typer.Option(
        "--policy",
        help="NAME or NAME:parameter=value,... with the names of the --morph-* flags "
        "(threshold:mode=accuracy). Give it again to compare.",
    ),
]
ProfileOption = Annotated[
    str, typer.Option(help="Measured service rates: a JSON file, or the name of a shipped one.")
]
PlotOption = Annotated[Path | None, typer.Option(help="Write a PNG picture here.")]


@app.command("replay")
def replay_command(
    events: Annotated[Path, typer.Argument(help="Event log (--morph-event-log) of a server.")],
    policy: PolicyOption = _POLICIES,
    top_level: Annotated[
        int | None, typer.Option(min=1, help="The plan's last level. None: highest level seen.")
    ] = None,
    plot: PlotOption = None,
) -> None:
    """Show when a policy would have acted on recorded signals, beside what happened."""
    from sglang_morph.observability.event_log import read_events
    from sglang_morph.policy_cli.replay import replay, runs_of
    from sglang_morph.policy_cli.spec import parse_spec
    from sglang_morph.policy_cli.tables import actions_table, agreement_table

    try:
        specs = [parse_spec(text) for text in policy]
        runs = runs_of(read_events(events), top_level)
        found = [replay(run, spec) for run in runs for spec in specs]
    except OSError as error:
        refuse(f"{events} can't be read: {error.strerror}; give an event log")
    except ValueError as error:
        refuse(str(error))
    Console().print(actions_table(found), agreement_table(found))
    if plot is not None:
        _need_matplotlib()
        from sglang_morph.policy_cli.plots import draw_replays

        longest = max(runs, key=lambda run: len(run.readings))
        draw_replays([one for one in found if one.run is longest], plot)
        Console().print(f"Wrote {escape(str(plot))}")


@app.command()
def simulate(
    trace: Annotated[Path, typer.Option(help="Request trace: Azure, BurstGPT or Mooncake.")],
    policy: PolicyOption = _ARMS,
    profile: ProfileOption = "h200-llama-8b",
    start: Annotated[float, typer.Option(help="Seconds of the trace to leave out.")] = 0.0,
    seconds: Annotated[
        float | None, typer.Option(help="Length of the window, before scaling. None: all.")
    ] = None,
    densest: Annotated[
        bool, typer.Option("--densest", help="Take the --seconds with most requests.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second wanted. None: the trace's own.")
    ] = None,
    thin: Annotated[
        bool, typer.Option("--thin", help="Lower the rate by leaving requests out, not by time.")
    ] = False,
    token_factor: Annotated[
        float, typer.Option(help="Multiplies token counts, for a smaller model than the trace's.")
    ] = 1.0,
    slo_ttft: Annotated[float, typer.Option(help="Time to first token to meet, seconds.")] = 2.0,
    slo_tpot: Annotated[
        float | None, typer.Option(help="Time per output token to meet, seconds.")
    ] = None,
    tick: Annotated[
        float, typer.Option(help="Least seconds between two looks of the policy, one a step.")
    ] = DEFAULT_TICK_S,
    seed: Annotated[int, typer.Option(help="Of --thin.")] = 0,
    plot: PlotOption = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown.")
    ] = False,
) -> None:
    """Compare policies on a trace by a queueing simulation over measured service rates."""
    from sglang_morph.policy_cli.profile import load_profile
    from sglang_morph.policy_cli.spec import parse_spec
    from sglang_morph.policy_cli.tables import Slo, comparison_table, markdown_table
    from sglang_morph.policy_cli.trial import Workload, load_requests, run_trials

    workload = Workload(
        trace, start, seconds, densest, rate, "thin" if thin else "stretch", token_factor, seed
    )
    began = time.perf_counter()
    try:
        rates = load_profile(profile)
        specs = [parse_spec(text) for text in policy]
        requests, note = load_requests(workload)
        trials = run_trials(
            rates, specs, requests, Slo(slo_ttft, slo_tpot), tick_s=tick, record=plot is not None
        )
    except ValueError as error:
        refuse(str(error))
    passed = time.perf_counter() - began
    summaries = [trial.summary for trial in trials]
    if markdown:
        typer.echo(markdown_table(summaries))
    else:
        Console().print(comparison_table(f"{trace.name}: {note}; profile {rates.name}", summaries))
        simulated = sum(summary.duration_s for summary in summaries)
        Console().print(f"{simulated / 3600:.2f} hours simulated in {passed:.1f} s")
    if plot is not None:
        _need_matplotlib()
        from sglang_morph.policy_cli.plots import draw_simulations

        pairs = [(trial.summary.policy, trial.outcome) for trial in trials]
        draw_simulations(pairs, rates.base_pages, rates.top_level, plot)
        Console().print(f"Wrote {escape(str(plot))}")


@app.command("solve")
def solve_command(
    profile: ProfileOption = "h200-llama-8b",
    trace: Annotated[
        Path | None, typer.Option(help="Take the sizes of requests from this trace.")
    ] = None,
    load: Annotated[
        float, typer.Option(help="Arriving requests over those that full precision completes.")
    ] = 0.9,
    accuracy_cost: Annotated[
        float | None,
        typer.Option(
            help="Price of a second below full precision, in seconds of delay of a full server."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a file for --morph-two-mode-solution.")
    ] = None,
) -> None:
    """Solve for the thresholds of the two_mode policy, by value iteration."""
    from dataclasses import replace

    from sglang_morph.bench.traces import read_trace
    from sglang_morph.policy_cli.profile import load_profile
    from sglang_morph.policy_cli.solve import Assumptions, solve_profile

    try:
        rates = load_profile(profile)
        assumed = Assumptions(load=load)
        if trace is not None:
            assumed = Assumptions.from_requests(read_trace(trace).requests, load)
        if accuracy_cost is not None:
            assumed = replace(assumed, accuracy_cost=accuracy_cost)
        solution = solve_profile(rates, assumed)
    except ValueError as error:
        refuse(str(error))
    console = Console()
    console.print(f"Lower precision from demand {solution.enter_demand:.2f} on (over base pages),")
    console.print(f"restore it at {solution.leave_demand:.2f} or less.")
    verdict = "holds" if not solution.submodularity_violations else "FAILS"
    console.print(
        f"Submodularity {verdict}: the low mode's gain falls with demand between "
        f"{solution.submodularity_violations} of "
        f"{solution.states - 1} pairs of neighbouring states."
    )
    if out is not None:
        import msgspec

        out.write_bytes(msgspec.json.format(msgspec.json.encode(solution), indent=1) + b"\n")
        console.print(f"Wrote {escape(str(out))}")


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        refuse("--plot needs matplotlib; install the extra: pip install 'sglang-morph[bench]'")
