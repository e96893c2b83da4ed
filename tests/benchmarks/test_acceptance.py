import json

import msgspec
import pytest

from benchmarks.acceptance import ACCEPTANCE, Row, load, upsert


def row(name, value, **changes):
    fields = {
        "name": name,
        "value": value,
        "unit": "s",
        "bar": "< 2",
        "holds": True,
        "command": "make demo",
        "commit": "abc123",
        "date": "2030-01-01T00:00:00+00:00",
        "hardware": "a CPU",
    }
    return Row(**fields | changes)


def test_the_committed_file_keeps_the_schema():
    rows = load(ACCEPTANCE)
    names = [r.name for r in rows]
    assert names == sorted(set(names))
    assert all(r.command and r.commit and r.date and r.hardware for r in rows)
    root = ACCEPTANCE.parents[2]
    assert [r.raw for r in rows if r.raw and not (root / r.raw).exists()] == []


def test_a_new_number_replaces_the_old_one_of_its_name(tmp_path):
    path = tmp_path / "results" / "acceptance.json"
    upsert([row("b", 1.5), row("a", 1)], path)
    upsert([row("b", 3.5, holds=False), row("c", True, unit="")], path)
    assert load(path) == [row("a", 1), row("b", 3.5, holds=False), row("c", True, unit="")]
    assert list(path.parent.iterdir()) == [path]


def test_rows_are_plain_objects_with_exactly_the_agreed_fields(tmp_path):
    path = tmp_path / "acceptance.json"
    upsert([row("a", 1)], path)
    (entry,) = json.loads(path.read_text())
    assert list(entry) == [
        "name", "value", "unit", "bar", "holds", "command", "commit", "date", "hardware", "raw",
    ]  # fmt: skip


def test_no_file_means_no_rows(tmp_path):
    assert load(tmp_path / "none.json") == []


@pytest.mark.parametrize(
    "content", ['[{"name": "a"}]', '[{"name": "a", "surprise": 1}]', '{"rows": []}']
)
def test_a_file_that_breaks_the_schema_is_refused(tmp_path, content):
    path = tmp_path / "acceptance.json"
    path.write_text(content)
    with pytest.raises(msgspec.ValidationError):
        load(path)
    with pytest.raises(msgspec.ValidationError):
        upsert([row("b", 1)], path)
    assert path.read_text() == content
