"""Put the numbers of a `bench ab` into `acceptance.json`, and its rows and requests beside it.

    python -m benchmarks.record_ab FOLDER --name ab_cpu

FOLDER is the output of `sglang-morph bench ab`, and of `bench sweep` where that was run too.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.acceptance import ACCEPTANCE, Row, upsert
from benchmarks.emulated_card import card_measures, is_card
from sglang_morph.bench.measures import capacity_measure, measures
from sglang_morph.bench.report import write_report
from sglang_morph.bench.results import Comparison, load_comparison
from sglang_morph.bench.sweep import Capacity, read_capacities

ROWS, REQUESTS, SWEEP, REPORT = "rows.jsonl", "requests.parquet", "sweep.jsonl", "report.md"
_OF_A_MACHINE = "server_info"
"""Key of a row that is long and has paths of the machine in it."""
_TEXT = "text"
_ARRIVALS = "arrivals_s"


def record_ab(folder: Path, name: str, acceptance: Path) -> None:
    """Upsert every number, and write the raw data to a folder `name` beside `acceptance`.

    Raises `PlanError` for a folder without finished runs.
    """
    found, capacities = load_comparison(folder), read_capacities(folder)
    target = acceptance.parent / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    _write_lines(target / ROWS, _rows(found))
    pq.write_table(
        _requests(found),
        target / REQUESTS,
        compression="zstd",
        use_dictionary=False,
        use_byte_stream_split=[f"{_ARRIVALS}.list.element"],
    )
    if capacities:
        _write_lines(target / SWEEP, (_tries(capacity) for capacity in capacities))
    _, text = write_report(folder)
    shutil.copyfile(text, target / REPORT)
    raw = str(target.relative_to(acceptance.parents[2]))
    origin = found.runs[0].report["origin"]
    compared = [m for m in measures(found) if not is_card(m.name.split(".")[1])]
    card = card_measures(list(_rows(found)))
    kept = [Row(**asdict(m), **origin, raw=raw) for m in (*compared, *card)]
    for capacity in capacities:
        measure = capacity_measure(capacity)
        if measure is not None:
            kept.append(Row(**asdict(measure), **capacity.origin, raw=raw))
    upsert(kept, acceptance)


def _write_lines(path: Path, rows: Iterator[dict]) -> None:
    path.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))


def _rows(found: Comparison) -> Iterator[dict]:
    """A row for each workload of each run, with what the server did meanwhile."""
    for run in found.runs:
        for record in run.records.values():
            plain = {key: value for key, value in record.row.items() if key != _OF_A_MACHINE}
            yield {"arm": run.arm, "block": run.block, **plain}


def _requests(found: Comparison) -> pa.Table:
    """Every request of every run; without the text of the answer, arrivals to 0.01 ms."""
    parts = []
    for run in found.runs:
        for name in run.records:
            table = pq.read_table(run.folder / f"{name}.requests.parquet").drop_columns([_TEXT])
            for label, value in (("workload", name), ("block", run.block), ("arm", run.arm)):
                table = table.add_column(0, label, pa.array([value] * len(table)))
            parts.append(table)
    table = pa.concat_tables(parts)
    column = table.column_names.index(_ARRIVALS)
    return table.set_column(column, _ARRIVALS, table[_ARRIVALS].cast(pa.list_(pa.float32())))


def _tries(capacity: Capacity) -> dict:
    tries = [
        {"rate": t.rate, "attainment": t.attainment, "goodput": t.goodput} for t in capacity.tries
    ]
    told = {"workload": capacity.workload, "arm": capacity.arm, "wanted": capacity.wanted}
    return {**told, "tries": tries, **capacity.origin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="output of `sglang-morph bench ab`")
    parser.add_argument("--name", required=True, help="folder of the raw data, such as ab_cpu")
    arguments = parser.parse_args()
    record_ab(arguments.folder, arguments.name, ACCEPTANCE)


if __name__ == "__main__":
    main()
