"""The benchmark on a small model: it goes on where it was ended, and its tables tell the truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import quality, quality_results, quality_tables
from benchmarks.quality import Measuring
from benchmarks.quality_results import ARMS, Found
from sglang_morph.quality.run import QualityOptions
from tests.sglang_morph.quality.tiny_llama import save_tiny_llama


class Ended(Exception):
    """The run was killed."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-llama"
    save_tiny_llama(folder)
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The benchmark made small; the folder of its results."""
    options = QualityOptions(blocks=4, block_tokens=16, continued_tokens=4, answer_tokens=4)
    monkeypatch.setattr(quality, "OPTIONS", options)
    monkeypatch.setattr(quality, "model_path", lambda: tmp_path / "model")
    monkeypatch.setattr(quality_results, "RAW", tmp_path / "found.json")
    monkeypatch.setattr(quality_tables, "PICTURE", tmp_path / "found.png")
    return tmp_path


def test_it_goes_on_where_it_was_ended(
    checkpoint: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Found.save
    saved = 0

    def save_and_end(found: Found) -> None:
        nonlocal saved
        save(found)
        saved += 1
        if saved == 9:  # three searches, then cells
            raise Ended

    monkeypatch.setattr(Found, "save", save_and_end)
    with pytest.raises(Ended):
        Measuring(checkpoint, Console(quiet=True), fresh=False).run()
    monkeypatch.setattr(Found, "save", save)
    measuring = Measuring(checkpoint, Console(quiet=True), fresh=False)
    assert len(measuring.found.cells) == 6
    assert len(measuring.found.orders["fp8"]) == 3
    measuring.run()
    found = measuring.found
    # 8 orders at a quarter and half, and all layers once.
    assert len(found.cells) == len(ARMS) * (8 * 2 + 1)
    assert len({(cell.arm, cell.order, cell.level) for cell in found.cells}) == len(found.cells)
    assert {len(cell.layers) for cell in found.cells if cell.level == "quarter"} == {1}
    assert {len(cell.layers) for cell in found.cells if cell.level == "half"} == {2}
    check_that_arms_are_told_apart(found)
    check_tables(found, small)
    check_that_an_arm_is_measured_again(checkpoint, found)


def check_that_arms_are_told_apart(found: Found) -> None:
    """int4 rtn and int4 awq are both int4, but not the same."""
    rtn, awq = (found.cell(f"int4 {name}", "front", "all") for name in ("rtn", "awq"))
    assert rtn is not None
    assert awq is not None
    assert rtn.text.kl != awq.text.kl


def check_that_an_arm_is_measured_again(checkpoint: Path, found: Found) -> None:
    """With the same result, and an origin of its own."""
    again = Measuring(checkpoint, Console(quiet=True), fresh=False, again="int4 gptq")
    assert len(again.found.cells) == len(found.cells) - 17
    again.run()
    before, after = (one.cell("int4 gptq", "front", "all") for one in (found, again.found))
    assert before == after
    rows = {row.name: row for row in quality_tables.acceptance_rows(again.found)}
    assert "--again 'int4 gptq'" in rows["quality.ppl.int4_gptq"].command
    assert "--fresh" in rows["quality.ppl.full"].command


def check_tables(found: Found, folder: Path) -> None:
    text = quality_tables.tables(found)
    cell = found.cell("int4 awq", "back", "half")
    assert cell is not None
    rows = [line for line in text.splitlines() if line.startswith("| int4 awq | half |")]
    assert (
        f"| {1000 * np.mean(cell.text.kl):.2f}" in rows[1]
    )  # by variant, KL by order, loss by order
    quality_tables.draw(found)
    assert (folder / "found.png").read_bytes().startswith(b"\x89PNG")
    names = {row.name for row in quality_tables.acceptance_rows(found)}
    assert names == {
        "quality.ppl.full",
        "quality.ppl.fp8",
        "quality.ppl.int4_rtn",
        "quality.ppl.int4_awq",
        "quality.ppl.int4_gptq",
        "quality.token_agreement.half_layers_fp8",
    }
