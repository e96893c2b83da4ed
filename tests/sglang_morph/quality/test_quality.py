"""The command, end to end, on a small model with made-up weights."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from sglang_morph.cli import app
from sglang_morph.precision.plan import ModelIdentity, plan_in_order
from sglang_morph.quality.report import read_report
from sglang_morph.quality.results import FULL_FIRST, FULL_LAST, THROUGHOUT

SMALL = ["--blocks", "3", "--block-tokens", "16", "--tokens", "6", "--prompt-tokens", "40"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "qa.jsonl"
    rows = [{"input": f"Question {n}?", "context": "", "answers": ["an answer"]} for n in range(2)]
    file.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    return file


def test_levels_of_two_orders_are_measured_and_reported(
    checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["quality", str(checkpoint), *SMALL, "--variants", "fp8,int4", "--order", "front"]
    arguments += ["--order", "random", "--prompts", str(prompts), "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    report = read_report(out / "quality.json")
    full, *others = report.results
    assert (full.level, full.freed_bytes, full.layers) == (0, 0, {})
    assert full.text is not None
    assert max(full.text.kl) == 0
    assert full.continuations.agreement == [1.0] * 3
    assert list(report.plans) == ["front", "random"]
    assert [(r.plan, r.level, r.served) for r in others] == [
        (plan, level, served)
        for plan in ("front", "random")
        for level in (1, 2, 3, 4)
        for served in (THROUGHOUT, FULL_FIRST, FULL_LAST)
    ]
    by_level = [r for r in others if r.plan == "front" and r.served == THROUGHOUT]
    assert [r.layers for r in by_level] == [{"fp8": 1}, {"fp8": 2}, {"fp8": 4}, {"int4": 4}]
    freed = [r.freed_bytes for r in by_level]
    assert freed == sorted(freed)
    assert by_level[0].text is not None
    assert by_level[-1].text is not None
    assert sum(by_level[0].text.kl) < sum(by_level[-1].text.kl)
    assert all(len(r.answers.f1) == 2 for r in others)
    assert all(r.text is None for r in others if r.served != THROUGHOUT)
    # A response that begins at full precision begins like that of full precision.
    begun = [r.continuations for r in others if r.served == FULL_FIRST]
    assert all(min(continuations.first_divergence) >= 3 for continuations in begun)
    table = (out / "quality.md").read_text(encoding="utf-8")
    assert table.count("\n| ") == len(report.results) + 2  # header and rule
    assert (out / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "quality.svg").read_text(encoding="utf-8")


def test_a_plan_from_a_file_is_measured(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    identity = ModelIdentity("LlamaForCausalLM", 4, 64, 128, 4, 2, 320)
    plan = plan_in_order(identity, {"int8": [3, 1, 0, 2]}, "by hand")
    plan.save(tmp_path / "mine.json")
    arguments = ["quality", str(checkpoint), *SMALL, "--plan", str(tmp_path / "mine.json")]
    arguments += ["--prompts", str(prompts), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    report = read_report(tmp_path / "out" / "quality.json")
    assert report.plans == {"mine": plan.digest}
    assert {r.level for r in report.results} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--order", "lis"], "needs a profile"),
        (["--variants", "int5"], "unknown variant"),
        (["--text", "missing.txt"], "can't be read"),
        (["--quantizer", "magic"], "unknown quantizer"),
        (["--plan", "missing.json"], "can't be read"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    checkpoint: Path, arguments: list[str], reason: str
) -> None:
    done = CliRunner().invoke(app, ["quality", str(checkpoint), *SMALL, *arguments])
    assert done.exit_code == 2
    assert reason in done.stderr
    assert "Traceback" not in done.output


def test_a_plan_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    identity = ModelIdentity("LlamaForCausalLM", 5, 64, 128, 4, 2, 320)
    plan_in_order(identity, {"int8": [0, 1, 2, 3, 4]}, "").save(tmp_path / "other.json")
    arguments = ["quality", str(checkpoint), *SMALL, "--plan", str(tmp_path / "other.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "num_layers" in done.stderr
