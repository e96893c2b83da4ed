"""With morphing off, output equals stock SGLang's token by token; so it does back at level 0."""

from __future__ import annotations

import os

import httpx
import pytest

from tests.server.client import GREEDY_TOKENS, PROMPTS, Client
from tests.server.conftest import Serve, both_backends

FULL = {"min_precision": "full"}


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


@both_backends
def test_level_0(elastic: Client, stock: list[list[int]]) -> None:
    _forget_prefixes(elastic)
    assert elastic.greedy() == stock


@both_backends
def test_after_a_round_trip(elastic: Client, stock: list[list[int]]) -> None:
    elastic.go_to(elastic.top_level)
    # Lower precision must show somewhere, or it wasn't used.
    assert elastic.greedy(prompts=12) != stock[:12]
    elastic.go_to(0)
    _forget_prefixes(elastic)
    assert elastic.greedy() == stock


def _forget_prefixes(client: Client) -> None:
    """Those computed at lower precision, here or by other tests, would be reused."""
    assert client.http.post("/flush_cache").status_code == httpx.codes.OK


def test_layer_swap_in_the_normal_loop(serve: Serve, stock: list[list[int]]) -> None:
    """With the policies for requests that the shared server doesn't have."""
    flags = ("--memory-backend", "layer_swap", "--morph-policy", "manual")
    flags += ("--morph-floor-policy", "reject", "--morph-prefix-policy", "refresh")
    with serve("sglang_morph.launch_server", *flags, "--disable-overlap-schedule") as client:
        before = client.verify()
        assert client.greedy() == stock
        client.go_to(3)
        client.http.post("/flush_cache")
        client.greedy(4)  # caches every prompt at level 3
        refused = client.http.post("/generate", json={"text": "a", "morph": FULL})
        assert refused.status_code == 503
        assert "'full' is not available now: the precision level is 3" in refused.text
        client.go_to(0)
        assert client.verify() == before
        assert client.status()["prefixes"]["dropped_tokens"] > 0
        answer = client.generate(PROMPTS[0], GREEDY_TOKENS, morph=FULL)
        assert answer["output_ids"] == stock[0]
        assert answer["meta_info"]["morph"]["reused_lowered_tokens"] == 0
        assert client.greedy(prompts=8) == stock[:8]
        status = client.status()
        assert status["floors"]["rejected"] == 1 and status["floors"]["running"] == 0
        client.check_alive()
