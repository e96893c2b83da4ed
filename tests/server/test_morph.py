"""Levels change while requests run: nothing is lost, every check of SGLang's stays silent."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.client import Client
from tests.server.conftest import BASE_TOKENS, both_backends


@both_backends
def test_capacity_follows_the_level_everywhere(elastic: Client) -> None:
    base = elastic.status()
    assert base["capacity_tokens"] == base["base_tokens"] == BASE_TOKENS
    top = elastic.top_level
    capacities = [elastic.go_to(level)["capacity_tokens"] for level in range(top + 1)]
    assert capacities == sorted(set(capacities))
    state = elastic.http.get("/server_info").json()["internal_states"][0]
    assert state["morph"]["capacity_tokens"] == capacities[-1]
    metrics = elastic.http.get("/metrics").text
    assert _gauge(metrics, "sglang_morph:kv_capacity_tokens") == capacities[-1]
    assert _gauge(metrics, "sglang_morph:precision_level") == top
    assert _gauge(metrics, "sglang:max_total_num_tokens") == capacities[-1]


@both_backends
def test_bytes_by_owner_add_up_at_every_level(elastic: Client) -> None:
    totals = {sum(_device_bytes(elastic.go_to(level))) for level in range(elastic.top_level + 1)}
    assert len(totals) == 1


@both_backends
def test_lent_capacity_admits_waiting_requests_at_once(elastic: Client) -> None:
    """No running request has to finish first, although SGLang had marked the batch as full."""
    with ThreadPoolExecutor(12) as pool:
        futures = elastic.start(pool, 12, tokens=160)
        _wait(lambda: _all_there(elastic, 12) and _latest(elastic)["admission_blocked"])
        elastic.set_level(2)
        _wait(lambda: elastic.status()["monitor"]["latest"]["waiting"] == 0)
        assert _latest(elastic)["running"] == 12
        assert not any(future.done() for future in futures)
        assert [len(f.result()["output_ids"]) for f in futures] == [160] * 12


@both_backends
def test_requests_keep_running_through_50_level_changes(
    elastic: Client, record: Callable[..., None]
) -> None:
    rng, started, done = random.Random(7), 8, 0
    before, top = _completed(elastic), elastic.top_level
    with ThreadPoolExecutor(8) as pool:
        futures = elastic.start(pool, started, tokens=48)
        while _completed(elastic) - before < 50:
            level = rng.choice([k for k in range(top + 1) if k != elastic.status()["target_level"]])
            elastic.set_level(level)
            _wait(lambda level=level: elastic.status()["target_level"] == level)
            finished = [f for f in futures if f.done()]
            done += len([f.result() for f in finished])
            futures = [f for f in futures if not f.done()]
            futures += elastic.start(pool, len(finished), tokens=48, first=started)
            started += len(finished)
        done += len([f.result() for f in futures])
    status = elastic.go_to(0)
    assert status["capacity_tokens"] == BASE_TOKENS
    elastic.check_alive()
    changes = _completed(elastic) - before
    backend = status["memory_backend"]
    record(
        "morph/level_changes_under_load" + ("" if backend == "layer_swap" else f"/{backend}"),
        changes,
        f"changes, {done} requests, none failed, no leak complaint",
        ">= 50",
        changes >= 50 and done > 0,
    )


@pytest.mark.parametrize("lowers", [True, False], ids=["downshift", "shrink"])
def test_an_abort_during_a_transition(elastic: Client, lowers: bool) -> None:
    """The level and the abort reach the scheduler between the same two steps."""
    start, target = (0, elastic.top_level) if lowers else (elastic.top_level, 0)
    elastic.go_to(start)
    number, tokens = (6, 64) if target else (10, 100)  # a shrink finds lent pages in use
    migrated = _migrated(elastic)
    for _ in range(4):
        with ThreadPoolExecutor(14) as pool:
            futures = elastic.start(pool, number, tokens)
            _wait(lambda: _latest(elastic)["running"] == number)
            moved = pool.submit(elastic.set_level, target)
            aborted = pool.submit(elastic.http.post, "/abort_request", json={"rid": "r1"})
            moved.result()
            assert aborted.result().status_code == httpx.codes.OK
            reasons = [f.result()["meta_info"]["finish_reason"]["type"] for f in futures]
        assert reasons == ["length", "abort", *["length"] * (number - 2)]
        elastic.wait_level(target)
        elastic.go_to(start)
    if target == 0:
        assert _migrated(elastic) > migrated


def test_a_client_that_disconnects_during_a_transition(elastic: Client) -> None:
    body = {
        "text": "Once upon a time",
        "stream": True,
        "sampling_params": {"max_new_tokens": 900, "ignore_eos": True},
    }
    with elastic.http.stream("POST", "/generate", json=body) as answer:
        next(answer.iter_lines())
        elastic.set_level(3)
    # Far sooner than 900 tokens take.
    _wait(lambda: elastic.status()["monitor"]["latest"]["running"] == 0, timeout_s=8)
    elastic.go_to(0)


def test_a_flush_while_pages_are_lent_hands_out_no_weights(elastic: Client) -> None:
    elastic.generate("Once upon a time", 16)
    status = elastic.go_to(2)
    assert elastic.http.post("/flush_cache").status_code == httpx.codes.OK
    with ThreadPoolExecutor(12) as pool:
        for future in elastic.start(pool, 12, tokens=120):
            future.result()
    latest = elastic.status()["monitor"]["latest"]
    assert latest["free_pages"] + latest["evictable_pages"] == status["capacity_tokens"]


def test_a_prompt_may_be_as_long_as_the_operators_level_has_room(elastic: Client) -> None:
    """And one with room for it stays until it is done."""
    prompt = [10 + number % 900 for number in range(BASE_TOKENS + 100)]
    sampling = {"max_new_tokens": 24, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    answer = elastic.http.post("/generate", json=body)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "exceeds the maximum allowed length" in answer.text

    assert elastic.go_to(elastic.top_level)["capacity_tokens"] > len(prompt)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(elastic.http.post, "/generate", json=body)
        _wait(lambda: elastic.status()["needs"]["running"] == 1)
        assert elastic.http.post("/morph/level", json={"level": 0}).json()["result"] == "deferred"
        told = answer.result().raise_for_status().json()["meta_info"]
    assert told["completion_tokens"] == 24
    met = {*told["morph"]["prefilled_tokens"], *told["morph"]["generated_tokens"]}
    assert "0" not in met
    elastic.wait_level(0)


def test_a_level_that_does_not_exist_is_refused(elastic: Client) -> None:
    answer = elastic.http.post("/morph/level", json={"level": 9})
    assert answer.status_code == httpx.codes.CONFLICT
    assert "0 to 4" in answer.text


def test_weights_cannot_be_replaced_behind_the_backups(elastic: Client) -> None:
    answer = elastic.http.post("/update_weights_from_disk", json={"model_path": "elsewhere"})
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "layer_swap" in answer.text or "memory backend" in answer.text


def _latest(client: Client) -> dict[str, Any]:
    return client.status()["monitor"]["latest"]


def _all_there(client: Client, number: int) -> bool:
    latest = _latest(client)
    return latest["running"] + latest["waiting"] == number


def _migrated(client: Client) -> float:
    return _gauge(client.http.get("/metrics").text, "sglang_morph:pages_migrated_total")


def _completed(client: Client) -> int:
    return client.status()["monitor"]["transitions"]["completed"]


def _device_bytes(status: dict[str, Any]) -> list[int]:
    names = ("full_weights", "variant_weights", "kv_base", "kv_lent", "unused")
    return [status["bytes"][name] for name in names]


def _gauge(metrics: str, name: str) -> float:
    line = next(line for line in metrics.splitlines() if line.startswith(name + "{"))
    return float(line.rsplit(" ", 1)[1])


def _wait(condition: Any, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
