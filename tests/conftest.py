"""Prepares the test process for SGLang on a CPU before anything imports it, and finds the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.acceptance import ACCEPTANCE, Row, upsert
from sglang_morph.cpu import prepare_process
from sglang_morph.demo.provenance import provenance

os.environ.setdefault("HF_HUB_OFFLINE", "1")
prepare_process()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", action="store_true", help="write what is measured to acceptance.json"
    )


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`record(name, value, unit, bar, holds)`: a row of acceptance.json, written with --record."""

    def add(name: str, value: float | int | str, unit: str, bar: str, holds: bool) -> None:
        assert holds, f"{name}: {value} {unit}, wanted {bar}"
        if request.config.getoption("--record"):
            command = f"make test TEST_ARGS='--record -k {request.node.name}'"
            origin = asdict(provenance(command))
            upsert([Row(name, value, unit, bar, holds, **origin)], ACCEPTANCE)

    return add


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct; fetched and converted where it isn't there yet."""
    from sglang_morph.demo.model import ensure_model

    return ensure_model(Console())
