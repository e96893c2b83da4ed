"""Put the demo's numbers into `acceptance.json`, and its raw data beside it.

python -m benchmarks.record_demo demo/results.json
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import orjson

from benchmarks.acceptance import ACCEPTANCE, Row, upsert

RAW_NAME = "demo.json"


def record_demo(source: Path, acceptance: Path) -> None:
    """Upsert every number of `source`, a `results.json` of the demo, into `acceptance`.

    Numbers that miss their bar are recorded too, as such. Raises OSError, ValueError, KeyError for
    a file that is none of the demo's.
    """
    content = orjson.loads(source.read_bytes())
    origin = {key: content[key] for key in ("command", "commit", "date", "hardware")}
    raw = acceptance.with_name(RAW_NAME)
    shown = raw.relative_to(acceptance.parents[2])
    rows = [Row(**measure, **origin, raw=str(shown)) for measure in content["measures"]]
    upsert(rows, acceptance)
    shutil.copyfile(source, raw)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.record_demo RESULTS_JSON")
    record_demo(Path(sys.argv[1]), ACCEPTANCE)
