"""Real servers, shared by the tests of this folder: each takes about a minute to start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from sglang_morph.demo.server import ServerProcess
from tests.server.client import Client

BASE_TOKENS = 1024

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
"""SGLang's own checks. A failed one ends the scheduler, and with it the server."""

Serve = Callable[..., "contextmanager[Client]"]


@pytest.fixture(scope="session")
def serve(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """`with serve("sglang_morph.launch_server", "--memory-backend", ...) as client:`"""

    @contextmanager
    def start(module: str, *flags: str) -> Iterator[Client]:
        folder = tmp_path_factory.mktemp("server")
        command = [sys.executable, "-m", module, "--model-path", str(smollm2)]
        command += ["--max-total-tokens", str(BASE_TOKENS), "--context-length", "2048", *flags]
        command.append("--sleep-on-idle")  # else an idle server takes a core from the next one
        with ServerProcess(command, env=STRICT, log=folder / "log.txt") as server:
            server.wait_ready(300, lambda passed: None)
            with httpx.Client(base_url=server.url, timeout=120) as http:
                yield Client(http, server.url, server.log)

    return start


BACKENDS = ("layer_swap", "semi_unified")
both_backends = pytest.mark.parametrize("manual", BACKENDS, indirect=True)
"""For tests that use `manual` or `elastic`. Without it they get `layer_swap`."""


def _manual(serve: Serve, backend: str) -> Iterator[Client]:
    flags = ("--memory-backend", backend, "--morph-policy", "manual", "--enable-metrics")
    with serve("sglang_morph.launch_server", *flags) as client:
        yield client


@pytest.fixture(scope="package")
def layer_swap(serve: Serve) -> Iterator[Client]:
    yield from _manual(serve, "layer_swap")


@pytest.fixture(scope="package")
def semi_unified(serve: Serve) -> Iterator[Client]:
    yield from _manual(serve, "semi_unified")


@pytest.fixture
def manual(request: pytest.FixtureRequest) -> Client:
    """An elastic server in SGLang's overlap loop, whose level the tests set."""
    client: Client = request.getfixturevalue(getattr(request, "param", "layer_swap"))
    return client


@pytest.fixture
def elastic(manual: Client) -> Iterator[Client]:
    """`manual` at level 0 before and after a test, with the weights it had before."""
    manual.go_to(0)
    before = manual.verify()
    yield manual
    manual.go_to(0)
    assert manual.verify() == before
    manual.check_alive()
