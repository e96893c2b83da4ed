"""The threshold policy on a real server: load lowers precision in time, calm restores it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_morph.observability.event_log import read_events
from tests.server.client import Client
from tests.server.conftest import BASE_TOKENS, Serve

LONG = [100 + (7 * number) % 20_000 for number in range(BASE_TOKENS + 400)]
"""Token ids of a prompt that the KV cache has no room for at full precision."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("threshold") / "events.jsonl"


@pytest.fixture(scope="module")
def client(serve: Serve, log: Path) -> Iterator[Client]:
    flags = ("--memory-backend", "layer_swap", "--enable-metrics", "--morph-event-log", str(log))
    flags += ("--morph-prefix-policy", "namespace")
    with serve("sglang_morph.launch_server", *flags) as client:
        yield client


def send(client: Client, prompt: list[int], **fields: Any) -> httpx.Response:
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, **fields}
    return client.http.post("/generate", json=body)


def test_a_burst_is_served_without_retraction_and_weights_come_back(
    client: Client, log: Path
) -> None:
    before = client.verify()
    with ThreadPoolExecutor(24) as pool:
        answers = [future.result() for future in client.start(pool, 24, tokens=100)]
    assert [len(answer["output_ids"]) for answer in answers] == [100] * 24
    told = [answer["meta_info"]["morph"] for answer in answers]
    assert all(sum(exposure["generated_tokens"].values()) == 100 for exposure in told)
    assert any(int(level) for exposure in told for level in exposure["generated_tokens"])
    status = client.wait_level(0)
    assert client.verify() == before
    client.check_alive()

    assert status["capacity_tokens"] == BASE_TOKENS
    assert status["monitor"]["peak_capacity_pages"] > BASE_TOKENS
    assert status["monitor"]["latest"]["retractions_total"] == 0
    rows = read_events(log)
    moves = [(row["from"], row["to"]) for row in rows if row["kind"] == "decision"]
    assert moves[0][0] == 0 and moves[-1][1] == 0
    assert all(row["reason"] for row in rows if row["kind"] == "transition")
    seen = {row["level"] for row in rows if row["kind"] == "signals"}
    assert max(seen) >= 1
    assert rows[0]["kind"] == "start"


def test_a_prompt_that_needs_lent_pages_is_served_beside_short_ones(
    client: Client, log: Path
) -> None:
    client.wait_level(0)
    before, behind = client.verify(), len(read_events(log))
    with ThreadPoolExecutor(5) as pool:
        long = pool.submit(send, client, LONG)
        short = client.start(pool, 4, tokens=8)
        answer = long.result().raise_for_status().json()
        assert all(len(future.result()["output_ids"]) == 8 for future in short)
    assert len(answer["output_ids"]) == 8
    told = answer["meta_info"]["morph"]
    computed = {int(level): tokens for level, tokens in told["prefilled_tokens"].items()}
    assert sum(computed.values()) == len(LONG) and min(computed) >= 1
    status = client.wait_level(0)
    assert status["needs"] == {"running": 0, "lowest": 0}
    assert client.verify() == before
    client.check_alive()
    reasons = [r["reason"] for r in read_events(log)[behind:] if r["kind"] == "decision"]
    assert "a request is too long for less than level 1" in reasons[0]


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (LONG, {"morph": {"min_precision": "full"}}),
        (LONG * 2, {}),
    ],
    ids=["no level it allows has room", "longer than the context"],
)
def test_a_prompt_that_can_never_fit_is_refused(
    client: Client, prompt: list[int], fields: dict[str, Any]
) -> None:
    answer = send(client, prompt, **fields)
    assert answer.status_code == 400
    assert "length" in answer.text and client.status()["level"] == 0
    client.check_alive()
