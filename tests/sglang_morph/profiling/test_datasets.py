from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from sglang_morph.cli import app
from sglang_morph.profiling.datasets import MOST_CHARACTERS, choose_text, load_dataset
from sglang_morph.profiling.text import TextError, load_text

PARAGRAPHS = [f"Paragraph {n}: " + f"words number {n} and more of them. " * 20 for n in range(40)]


def both(name: str, seed: int = 0) -> set[str]:
    """All paragraphs, which must not lie on both sides."""
    found = load_dataset(name, seed)
    sides = [set(side.split("\n\n")) for side in (found.calibration, found.evaluation)]
    assert all(sides)
    assert not sides[0] & sides[1]
    assert found == load_dataset(name, seed)
    return {paragraph.strip() for side in sides for paragraph in side}


ALL = {paragraph.strip() for paragraph in PARAGRAPHS}


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)) + b"\n")
    return path


def messages(text: str) -> list[dict[str, Any]]:
    """A chat whose turns are `text`, the second in parts, as with images."""
    half = len(text) // 2
    parts = [{"type": "text", "text": text[half:]}]
    return [{"role": "user", "content": text[:half]}, {"role": "assistant", "content": parts}]


def test_the_default_by_name() -> None:
    assert load_dataset("python-docs", 3) == load_text(seed=3)
    assert choose_text(None, None, 1) == load_text(seed=1)


@pytest.mark.parametrize("field", ["text", "prompt"])
def test_json_lines(tmp_path: Path, field: str) -> None:
    file = lines(tmp_path / "rows.jsonl", [{"id": 1, field: text} for text in PARAGRAPHS])
    assert both(str(file)) == both(f"jsonl:{file}") == ALL
    assert load_dataset(str(file)).origin.source == "rows.jsonl"


def test_chats(tmp_path: Path) -> None:
    file = lines(tmp_path / "chats.jsonl", [{"messages": messages(text)} for text in PARAGRAPHS])
    found = both(str(file))
    assert len(found) == 2 * len(PARAGRAPHS)
    assert {one[:12] for one in found} >= {text[:12] for text in PARAGRAPHS}
    turns = [
        {"id": "a", "conversations": [{"from": "human", "value": text}]} for text in PARAGRAPHS
    ]
    shared = tmp_path / "shared.json"
    shared.write_bytes(orjson.dumps(turns, option=orjson.OPT_INDENT_2))
    assert both(str(shared)) == both(f"sharegpt:{shared}") == ALL


def test_longbench(tmp_path: Path) -> None:
    rows = [
        {"input": f"What is {n}?", "context": text, "answers": ["x"]}
        for n, text in enumerate(PARAGRAPHS)
    ]
    file = lines(tmp_path / "qasper.jsonl", rows)
    assert both(f"longbench:{file}") == ALL | {f"What is {n}?" for n in range(len(PARAGRAPHS))}
    assert both(str(file)) == ALL


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"n": list(range(40)), "text": PARAGRAPHS}), file)
    assert both(str(file)) == both(f"parquet:{file}") == ALL
    parquet.write_table(pa.table({"n": [1], "body": ["a"]}), file)
    with pytest.raises(
        TextError, match="train.parquet has the columns n, body; one of text, prompt"
    ):
        load_dataset(str(file))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(TextError, match="train.parquet, after row 0: .*; copy the file again"):
        load_dataset(str(file))


def test_a_folder_of_files(tmp_path: Path) -> None:
    lines(tmp_path / "b.jsonl", [{"text": text} for text in PARAGRAPHS[:20]])
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "a.txt").write_text("\n\n".join(PARAGRAPHS[20:]), encoding="utf-8")
    (tmp_path / "ignored.bin").write_bytes(b"\xff\xfe")
    assert both(str(tmp_path)) == ALL
    assert both(f"jsonl:{tmp_path}") < ALL
    with pytest.raises(TextError, match="holds no file that ends in .parquet; give another"):
        load_dataset(f"parquet:{tmp_path}")


def test_what_occurs_twice_is_on_one_side(tmp_path: Path) -> None:
    file = lines(tmp_path / "rows.jsonl", [{"text": text} for text in PARAGRAPHS * 2])
    assert both(str(file), seed=5) == ALL


def test_a_large_dataset_is_read_as_far_as_needed(tmp_path: Path) -> None:
    """The damage behind that is never seen."""
    file = tmp_path / "large.jsonl"
    rows = [orjson.dumps({"text": f"{n} {'words ' * 20_000}"}) for n in range(80)]
    file.write_bytes(b"\n".join([*rows, b"{damaged"]))
    assert file.stat().st_size > MOST_CHARACTERS
    found = load_dataset(str(file))
    assert len(found.calibration) + len(found.evaluation) <= MOST_CHARACTERS + 130_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n\n{"text": "b"', r"rows.jsonl, line 3: not JSON \(.*\); mend it"),
        (b'{"text": "a"}\n{"text": "\xff"}', "rows.jsonl, line 2: not JSON"),
        (b'{"text": "a"}\n["b"]\n', "rows.jsonl, line 2: this is no object with fields; text or"),
        (b'{"text": "a"}\n{"body": "b"}\n', "rows.jsonl, line 2: no text in it; text or prompt"),
        (b'{"text": "a"}\n{"text": 7}\n', "rows.jsonl, line 2: text is neither text nor messages"),
        (b'{"text": "a"}\n', "rows.jsonl has under .* give a longer text"),
        (b"", "rows.jsonl has under .* give a longer text"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(TextError, match=message) as refused:
        load_dataset(str(tmp_path / "rows.jsonl"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[\n {"conversations": []},\n {"conversations": ]\n]', "shared.json, line 3: not JSON"),
        (b'{"conversations": []}', "shared.json: a list of conversations is needed"),
        (b'[{"conversations": [{"value": "a"}]}, {"text": "b"}]', "shared.json, item 2: no text"),
        (b'[{"conversations": [{"value": [3]}]}]', "shared.json, item 1: conversations is neither"),
    ],
)
def test_damaged_conversations_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "shared.json").write_bytes(content)
    with pytest.raises(TextError, match=message):
        load_dataset(str(tmp_path / "shared.json"))


@pytest.mark.parametrize("name", ["jsonl:missing.jsonl", "sharegpt:missing.json", "text:missing"])
def test_a_missing_file(name: str) -> None:
    with pytest.raises(TextError, match="missing.* can't be read: No such file"):
        load_dataset(name)


def test_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laid out as the library leaves it after a download; nothing is asked of the network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    for config, texts in (("small", PARAGRAPHS[:20]), ("large", PARAGRAPHS)):
        folder = tmp_path / "someone___prose" / config / "0.0.0" / "0123abcd"
        rows = datasets.Dataset.from_dict({"text": texts})
        folder.mkdir(parents=True)
        with datasets.arrow_writer.ArrowWriter(
            path=str(folder / "prose-train.arrow"), features=rows.features
        ) as writer:
            for text in texts:
                writer.write({"text": text})
            examples, nbytes = writer.finalize()
        split = {"name": "train", "num_bytes": nbytes, "num_examples": examples}
        info = datasets.DatasetInfo(
            features=rows.features,
            splits={"train": split},
            config_name=config,
            dataset_name="prose",
            builder_name="cache",
        )
        info.write_to_directory(str(folder))
    assert both("someone/prose:large") == ALL
    assert both("someone/prose:small") == {text.strip() for text in PARAGRAPHS[:20]}
    with pytest.raises(TextError, match="jsonl is neither a file"):  # no colon: not a format
        load_dataset("jsonl")
    with pytest.raises(TextError, match="someone/verse is neither .*; download it where there is"):
        load_dataset("someone/verse")
    assert datasets.config.HF_HUB_OFFLINE


def test_without_the_library_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "datasets" else find(name)
    )
    with pytest.raises(TextError, match="nor python-docs, .* the library `datasets` is needed"):
        load_dataset("someone/prose")


@pytest.mark.parametrize("command", ["profile", "quality"])
def test_commands_refuse_in_one_line(command: str, llama_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"{")
    arguments = [command, str(llama_folder), "--dataset", str(file)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "rows.jsonl, line 1: not JSON" in done.stderr
    done = CliRunner().invoke(app, [*arguments, "--text", str(file)])
    assert "--text and --dataset both name a text" in done.stderr
