"""The policy comparison, on small traces in the real traces' formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.compare_policies import (
    BEGIN,
    CASES,
    END,
    POLICIES,
    POLICIES_PAGE,
    quiet,
    tables,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    azure = [
        f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0000000,{500 + i},{20 + i}" for i in range(90)
    ]
    for case in CASES[:2]:
        header = "TIMESTAMP,ContextTokens,GeneratedTokens"
        (tmp_path / case.file).write_text("\n".join([header, *azure]))
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    burst = [f"{i},ChatGPT,{300 + i},{i},{300 + 2 * i},Conversation log" for i in range(60)]
    (tmp_path / CASES[2].file).write_text("\n".join([header, *burst]))
    return tmp_path


def test_one_markdown_table_per_trace(folder: Path) -> None:
    text, worst = tables(folder)
    assert worst >= 0
    for case in CASES:
        assert f"**{case.title}**" in text
    for name in POLICIES:
        assert text.count(f"| {name} |") == len(CASES)
    assert "1 rows left out" in text


def test_the_page_with_the_tables_has_their_markers() -> None:
    page = POLICIES_PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1


def test_quiet_hours_have_no_entry(folder: Path) -> None:
    entries, minutes = quiet(folder, minutes=60.0)
    assert entries == 0
    assert minutes >= 60.0
