import signal

import httpx
import pytest
from typer.testing import CliRunner

from sglang_morph.demo import run
from sglang_morph.demo.cli import app
from sglang_morph.demo.model import ModelUnavailable
from sglang_morph.demo.report import Measure
from sglang_morph.demo.server import ServerFailed

GOOD = Measure("demo/static/completed", 3, "requests", "= 3", True)
BAD = Measure("demo/layer_swap/weights_identical", False, "", "is true", False)


@pytest.fixture(autouse=True)
def keep_signal_handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def invoke(monkeypatch, outcome, *arguments):
    def run_demo(output, backend, base_tokens, origin, console):
        assert backend == ("semi_unified" if "semi_unified" in arguments else "layer_swap")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(run, "run_demo", run_demo)
    return CliRunner().invoke(app, arguments)


def test_success_only_if_everything_held(monkeypatch, tmp_path):
    output = f"--output={tmp_path}"
    assert invoke(monkeypatch, [GOOD], output).exit_code == 0
    assert invoke(monkeypatch, [GOOD, BAD], output).exit_code == 1
    other = ("--memory-backend", "semi_unified")
    assert invoke(monkeypatch, [GOOD], output, *other).exit_code == 0


@pytest.mark.parametrize(
    "error",
    [
        ModelUnavailable("no network"),
        ServerFailed("ended with status 1: [no] such model"),
        httpx.ConnectError("refused"),
    ],
)
def test_a_demo_that_cannot_run_says_why(monkeypatch, tmp_path, error):
    result = invoke(monkeypatch, error, f"--output={tmp_path}")
    assert result.exit_code == 2
    assert str(error) in result.output
