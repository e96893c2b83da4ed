"""Put the numbers of a `bench ab` into `acceptance.json`, and its rows and requests beside it.

    python -m benchmarks.record_ab FOLDER --name ab_cpu

FOLDER is the output of `sglang-morph bench ab`, of `bench sweep`, or of both.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.acceptance import ACCEPTANCE, Row, upsert
from benchmarks.emulated_card import card_measures, is_card
from sglang_morph.bench.comparison_run import PLAN
from sglang_morph.bench.figures import Point, as_png, goodput_against_rate
from sglang_morph.bench.measures import capacity_measure, measures_of
from sglang_morph.bench.record import Record, read_record
from sglang_morph.bench.report import write_report
from sglang_morph.bench.results import Comparison, load_comparison
from sglang_morph.bench.sweep import Capacity, read_capacities, search_folder, try_name

ROWS, REQUESTS, REPORT = "rows.jsonl", "requests.parquet", "report.md"
SWEEP, SWEEP_ROWS, SWEEP_REQUESTS = "sweep.jsonl", "sweep_rows.jsonl", "sweep_requests.parquet"
_OF_A_MACHINE = "server_info"
"""Key of a row that is long and has paths of the machine in it."""
_TEXT = "text"
_ARRIVALS = "arrivals_s"


def record_ab(folder: Path, name: str, acceptance: Path) -> None:
    """Upsert every number, and write the raw data to a folder `name` beside `acceptance`.

    Raises `PlanError` for a comparison without finished runs, or a folder with neither.
    """
    capacities = read_capacities(folder)
    found = load_comparison(folder) if (folder / PLAN).exists() or not capacities else None
    target = acceptance.parent / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    raw = str(target.relative_to(acceptance.parents[2]))
    kept = []
    if found is not None:
        _write_comparison(found, folder, target)
        kept += _compared(found, raw)
    if capacities:
        _write_searches(capacities, folder, target)
        kept += _sustained(capacities, raw)
    upsert(kept, acceptance)


def _compared(found: Comparison, raw: str) -> list[Row]:
    origins = {run.arm: run.report["origin"] for run in reversed(found.runs)}
    kept = [
        Row(**asdict(measure), **origin, raw=raw)
        for workload in found.workloads
        if not is_card(workload)
        for arm, origin in origins.items()
        for measure in measures_of(found, workload, arm)
    ]
    first = found.runs[0].report["origin"]
    card = card_measures(list(_rows(found)))
    return [*kept, *(Row(**asdict(measure), **first, raw=raw) for measure in card)]


def _sustained(capacities: Iterable[Capacity], raw: str) -> list[Row]:
    return [Row(**asdict(capacity_measure(c)), **c.origin, raw=raw) for c in capacities]


def _write_comparison(found: Comparison, folder: Path, target: Path) -> None:
    _write_lines(target / ROWS, _rows(found))
    requests = (
        _requests(run.folder, name, block=run.block, arm=run.arm)
        for run in found.runs
        for name in run.records
    )
    _write_requests(target / REQUESTS, requests)
    _, text = write_report(folder)
    shutil.copyfile(text, target / REPORT)


def _write_searches(capacities: Iterable[Capacity], folder: Path, target: Path) -> None:
    """What was found, and of every rate tried what a comparison keeps of a run."""
    _write_lines(target / SWEEP, (_tries(capacity) for capacity in capacities))
    tries = [
        (c.arm, search_folder(folder, c.workload, c.arm), try_name(c.workload, t.rate))
        for c in capacities
        for t in c.tries
    ]
    rows = (_row(read_record(tried, name), arm=arm) for arm, tried, name in tries)
    _write_lines(target / SWEEP_ROWS, rows)
    requests = (_requests(tried, name, arm=arm) for arm, tried, name in tries)
    _write_requests(target / SWEEP_REQUESTS, requests)
    for workload, points in _points(capacities).items():
        picture = as_png(goodput_against_rate(points))
        (target / f"goodput-{workload}.png").write_bytes(picture)


def _points(capacities: Iterable[Capacity]) -> dict[str, dict[str, list[Point]]]:
    """By workload and arm: requests a second offered, and of those that met the SLO."""
    points: dict[str, dict[str, list[Point]]] = {}
    for capacity in capacities:
        points.setdefault(capacity.workload, {})[capacity.arm] = capacity.goodputs
    return points


def _write_lines(path: Path, rows: Iterable[dict]) -> None:
    path.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))


def _rows(found: Comparison) -> Iterator[dict]:
    """A row for each workload of each run, with what the server did meanwhile."""
    for run in found.runs:
        for record in run.records.values():
            yield _row(record, arm=run.arm, block=run.block)


def _row(record: Record, **labels: str | int) -> dict:
    return labels | {key: value for key, value in record.row.items() if key != _OF_A_MACHINE}


def _requests(folder: Path, name: str, **labels: str | int) -> pa.Table:
    """Every request of one replay; without the text of the answer."""
    table = pq.read_table(folder / f"{name}.requests.parquet").drop_columns([_TEXT])
    for label, value in {"workload": name, **labels}.items():
        table = table.add_column(0, label, pa.array([value] * len(table)))
    return table


def _write_requests(path: Path, parts: Iterable[pa.Table]) -> None:
    """With arrivals to 0.01 ms."""
    table = pa.concat_tables(parts)
    column = table.column_names.index(_ARRIVALS)
    table = table.set_column(column, _ARRIVALS, table[_ARRIVALS].cast(pa.list_(pa.float32())))
    pq.write_table(
        table,
        path,
        compression="zstd",
        use_dictionary=False,
        use_byte_stream_split=[f"{_ARRIVALS}.list.element"],
    )


def _tries(capacity: Capacity) -> dict:
    tries = [
        {"rate": t.rate, "attainment": t.attainment, "goodput": t.goodput} for t in capacity.tries
    ]
    told = {"workload": capacity.workload, "arm": capacity.arm, "wanted": capacity.wanted}
    return {**told, "tries": tries, **capacity.origin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="output of `bench ab`, `bench sweep` or both")
    parser.add_argument("--name", required=True, help="folder of the raw data, such as ab_cpu")
    arguments = parser.parse_args()
    record_ab(arguments.folder, arguments.name, ACCEPTANCE)


if __name__ == "__main__":
    main()
