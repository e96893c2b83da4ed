"""With morphing off, output equals stock SGLang's token by token; so it does back at level 0."""

from __future__ import annotations

import os

import pytest

from tests.server.client import PROMPTS, Client
from tests.server.conftest import Serve


@pytest.fixture(scope="module")
def stock(serve: Serve) -> list[list[int]]:
    """Stock SGLang. The environment for the CPU is inherited; nothing of ours is imported."""
    assert "SGLANG_MORPH" not in os.environ
    flags = ("--device", "cpu", "--attention-backend", "torch_native")
    flags += ("--sampling-backend", "pytorch", "--dtype", "float32")
    with serve("sglang.launch_server", *flags) as client:
        return client.greedy()


def test_there_are_at_least_20_prompts() -> None:
    assert len(set(PROMPTS)) >= 20


def test_static(serve: Serve, stock: list[list[int]]) -> None:
    with serve("sglang_morph.launch_server", "--memory-backend", "static") as client:
        assert client.http.get("/morph/status").json() == {"memory_backend": "static"}
        assert client.greedy() == stock


def test_layer_swap_at_level_0(elastic: Client, stock: list[list[int]]) -> None:
    assert elastic.greedy() == stock


def test_layer_swap_after_a_round_trip(elastic: Client, stock: list[list[int]]) -> None:
    elastic.go_to(4)
    assert elastic.greedy() != stock  # int4 must show somewhere in 22 prompts, or it wasn't used
    elastic.go_to(0)
    elastic.http.post("/flush_cache")  # prefixes computed at level 4 would be reused
    assert elastic.greedy() == stock


def test_layer_swap_in_the_normal_loop(serve: Serve, stock: list[list[int]]) -> None:
    flags = ("--memory-backend", "layer_swap", "--morph-policy", "manual")
    with serve("sglang_morph.launch_server", *flags, "--disable-overlap-schedule") as client:
        before = client.verify()
        assert client.greedy() == stock
        client.go_to(3)
        client.greedy(4)
        client.go_to(0)
        assert client.verify() == before
        client.check_alive()
