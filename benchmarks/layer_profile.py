"""How long it takes to find the order of layers, and how far the orders agree.

    python -m benchmarks.layer_profile smollm2 [--record]   # `sglang-morph profile` as it comes
    python -m benchmarks.layer_profile orders --work FOLDER # every search, exact and lazy
    python -m benchmarks.layer_profile llama8b              # 32 layers of random weights, on a GPU
    python -m benchmarks.layer_profile record8b             # what that wrote, into acceptance.json

`smollm2` and `orders` take SmolLM2-135M-Instruct on the CPU. All write JSON to benchmarks/results.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import layer_profile_8b
from benchmarks.acceptance import ACCEPTANCE, RESULTS, Row, upsert
from benchmarks.layer_profile_8b import CALIBRATION, LEAST_SAVED
from sglang_morph.demo.provenance import provenance
from sglang_morph.precision.quantizers.awq import Awq
from sglang_morph.precision.quantizers.layer import AsTheyAre
from sglang_morph.precision.variants.registry import default_variants
from sglang_morph.profiling.evaluations import Evaluations
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.profiling.profile import Calibration, collect, profile
from sglang_morph.profiling.ranking import Ranking, Search, rank
from sglang_morph.profiling.text import load_text
from sglang_morph.profiling.variants import make_variants

COMPARED = Calibration(blocks=1, length=64)
"""Small, because `kl` without `lazy` tries 930 candidates."""
MOST_MINUTES = 15
SEARCHES = {
    "lis": Search("lis"),
    "kl": Search("kl"),
    "kl, lazy": Search("kl", lazy=True),
    "contiguous": Search("contiguous"),
}
GRACE_S = 60
"""After a time budget, before a run that hangs is ended."""


def smollm2(record: bool, command: str, console: Console) -> bool:
    """Time `sglang-morph profile` with its defaults, from loading to the finished bundle."""
    folder = _small_model(console)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        model = LayeredModel.load(folder)
        variants = default_variants("cpu")
        out = Path(scratch) / "bundle"
        done = profile(
            folder, model, load_text(), variants, Awq(), CALIBRATION, Search(lazy=True), out
        )
    minutes = (time.monotonic() - began) / 60
    assert done.ranking is not None
    origin = asdict(provenance(command))
    _write("profile_smollm2.json", origin, CALIBRATION, {"kl, lazy": done.ranking})
    raw = "benchmarks/results/profile_smollm2.json"
    saved = done.ranking.forwards_saved_ratio
    rows = [
        Row(
            "profile.smollm2_minutes",
            round(minutes, 2),
            "min",
            f"< {MOST_MINUTES}",
            minutes < MOST_MINUTES,
            raw=raw,
            **origin,
        ),
        Row(
            "profile.forwards_saved_ratio",
            round(saved, 3),
            "",
            f">= {LEAST_SAVED}",
            saved >= LEAST_SAVED,
            raw=raw,
            **origin,
        ),
    ]
    _say_rows(rows, console)
    if record:
        upsert(rows, ACCEPTANCE)
    return all(row.holds for row in rows)


def orders(names: Sequence[str], work: Path, console: Console) -> None:
    """Every search on the same variants and text, and how far their orders agree.

    Goes on with the evaluations that an earlier run has left in `work`.
    """
    folder = _small_model(console)
    model, text = LayeredModel.load(folder), load_text()
    token_ids = COMPARED.token_ids(text, folder)
    variants = default_variants("cpu")
    ladder = collect(make_variants(model, variants, AsTheyAre(), token_ids), model, variants)
    found: dict[str, Ranking] = {}
    for name in names:
        evaluations = Evaluations(work / f"{name}.jsonl", name)
        found[name] = rank(model, token_ids, ladder, SEARCHES[name], evaluations)
        _say(name, found[name], console)
    agreed = agreement(found)
    origin = asdict(provenance("python -m benchmarks.layer_profile orders --work FOLDER"))
    _write("profile_orders_smollm2.json", origin, COMPARED, found, agreed)
    console.print(_table(agreed))


def llama8b(device: str, out: Path, budget_s: float, console: Console) -> bool:
    """Whether all could be measured in time."""
    faulthandler.dump_traceback_later(budget_s + GRACE_S, exit=True)
    origin = provenance("python -m benchmarks.layer_profile llama8b")
    measuring = layer_profile_8b.Measuring(device, out, budget_s, origin, console)
    measuring.run()
    faulthandler.cancel_dump_traceback_later()
    return bool(measuring.document["finished"])


def record8b(console: Console) -> bool:
    rows = layer_profile_8b.acceptance_rows(json.loads(layer_profile_8b.RAW.read_bytes()))
    upsert(rows, ACCEPTANCE)
    _say_rows(rows, console)
    return all(row.holds for row in rows)


def agreement(found: Mapping[str, Ranking]) -> list[dict[str, Any]]:
    """Of every two searches, by variant."""
    rows = []
    for (a, first), (b, second) in itertools.combinations(found.items(), 2):
        for one, other in zip(first.stages, second.stages, strict=True):
            half = len(one.layers) // 2
            rows.append(
                {
                    "searches": [a, b],
                    "variant": one.variant,
                    "kendall_tau": round(kendall_tau(one.layers, other.layers), 3),
                    "same_in_first_half": len({*one.layers[:half]} & {*other.layers[:half]}) / half,
                }
            )
    return rows


def kendall_tau(first: Sequence[int], second: Sequence[int]) -> float:
    """1 for equal orders, -1 for opposite ones, about 0 for unrelated ones."""
    place = {layer: position for position, layer in enumerate(second)}
    pairs = list(itertools.combinations(first, 2))
    return sum(1 if place[a] < place[b] else -1 for a, b in pairs) / len(pairs)


def _small_model(console: Console) -> Path:
    from sglang_morph.demo.model import ensure_model  # a GPU machine may lack what converts it

    return ensure_model(console)


def _say_rows(rows: Sequence[Row], console: Console) -> None:
    for row in rows:
        console.print(f"{row.name}: {row.value} {row.unit}, bar {row.bar}")


def _say(name: str, ranking: Ranking, console: Console) -> None:
    console.print(
        f"{name}: {ranking.seconds:.0f} s, {ranking.candidates} candidates, "
        f"{ranking.full_forwards:.1f} full forwards of {ranking.full_forwards_plain:.0f} "
        f"({ranking.forwards_saved_ratio:.1%} saved)"
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("searches", "variant", "Kendall tau", "same layers in the first half")
    for row in rows:
        share = f"{row['same_in_first_half']:.0%}"
        table.add_row(" - ".join(row["searches"]), row["variant"], f"{row['kendall_tau']}", share)
    return table


def _write(
    name: str,
    origin: Mapping[str, str],
    calibration: Calibration,
    rankings: Mapping[str, Ranking],
    agreed: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Scores to 6 digits: they are for comparing, not for going on."""
    document = {
        "origin": origin,
        "calibration": asdict(calibration),
        "rankings": {one: _brief(ranking) for one, ranking in rankings.items()},
        "agreement": list(agreed),
    }
    (RESULTS / name).write_text(json.dumps(document, indent=1) + "\n")


def _brief(ranking: Ranking) -> dict[str, Any]:
    return {
        "seconds": round(ranking.seconds, 1),
        "candidates": ranking.candidates,
        "full_forwards": round(ranking.full_forwards, 2),
        "full_forwards_plain": ranking.full_forwards_plain,
        "forwards_saved_ratio": round(ranking.forwards_saved_ratio, 4),
        "stages": [
            {
                "variant": stage.variant,
                "layers": stage.layers,
                "harm": [float(f"{pick.harm:.6g}") for pick in stage.picks],
                "measured": [pick.measured for pick in stage.picks],
                "lts": [float(f"{value:.6g}") for value in stage.lts],
                "lrs": [float(f"{value:.6g}") for value in stage.lrs],
            }
            for stage in ranking.stages
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("smollm2")
    timed.add_argument("--record", action="store_true", help="write rows of acceptance.json")
    compared = commands.add_parser("orders")
    compared.add_argument("--only", nargs="*", default=list(SEARCHES), choices=SEARCHES)
    compared.add_argument("--work", type=Path, required=True, help="folder of what is measured")
    large = commands.add_parser("llama8b")
    large.add_argument("--device", default="cuda")
    large.add_argument(
        "--out", type=Path, default=layer_profile_8b.RAW, help="JSON, kept up to date"
    )
    large.add_argument("--time-budget", type=float, default=300, metavar="SECONDS")
    commands.add_parser("record8b")
    arguments = parser.parse_args()
    console = Console()
    command = shlex.join(["python", "-m", "benchmarks.layer_profile", *sys.argv[1:]])
    holds = True
    if arguments.command == "smollm2":
        holds = smollm2(arguments.record, command, console)
    elif arguments.command == "orders":
        arguments.work.mkdir(parents=True, exist_ok=True)
        orders(arguments.only, arguments.work, console)
    elif arguments.command == "llama8b":
        holds = llama8b(arguments.device, arguments.out, arguments.time_budget, console)
    else:
        holds = record8b(console)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
