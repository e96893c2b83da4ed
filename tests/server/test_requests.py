"""What a request demands of precision is kept, and its answer tells what it met."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import orjson
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.server.client import Client

FULL = {"min_precision": "full"}
INT8, INT4 = 3, 4
"""Levels with all layers at that precision."""

PROMPT = "Once upon a time, in a land far away where the mountains touch the sky, there lived a"
QUESTION = ChatCompletionUserMessageParam(role="user", content="What is the capital of France?")


@pytest.fixture
def server(manual: Client) -> Iterator[Client]:
    """At level 0 before and after a test, with nothing cached. (`elastic` checks the weights.)"""
    manual.go_to(0)
    assert manual.http.post("/flush_cache").status_code == httpx.codes.OK
    yield manual
    manual.go_to(0)
    manual.check_alive()


def exposure(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["meta_info"]["morph"]


def test_an_answer_tells_where_its_tokens_come_from(server: Client) -> None:
    first = server.generate(PROMPT, 8)
    prompt_tokens = first["meta_info"]["prompt_tokens"]
    assert exposure(first) == {
        "generated_tokens": {"0": 8},
        "prefilled_tokens": {"0": prompt_tokens},
        "reused_lowered_tokens": 0,
    }
    server.go_to(INT8)
    other = server.generate(f"{PROMPT} 17 purple robots", 5)
    reused = other["meta_info"]["cached_tokens"]
    assert exposure(other) == {
        "generated_tokens": {"3": 5},
        "prefilled_tokens": {"3": other["meta_info"]["prompt_tokens"] - reused},
        "reused_lowered_tokens": 0,  # from level 0
    }
    server.go_to(0)
    again = server.generate(f"{PROMPT} 17 purple robots", 1)
    lowered = again["meta_info"]["cached_tokens"] - reused
    assert lowered > 0
    assert exposure(again)["reused_lowered_tokens"] == lowered
    assert exposure(again)["generated_tokens"] == {"0": 1}


def test_prefixes_keep_their_level_when_their_pages_move(server: Client) -> None:
    server.go_to(INT4)
    prompts = [f"{i} {PROMPT}" for i in range(50)]  # more than the base pages hold
    with ThreadPoolExecutor(16) as pool:
        lowered = list(pool.map(lambda prompt: server.generate(prompt, 1), prompts))
    assert all(exposure(answer)["generated_tokens"] == {"4": 1} for answer in lowered)
    server.go_to(0)
    again = [server.generate(prompt, 1) for prompt in prompts[-6:]]
    reused = [answer["meta_info"]["cached_tokens"] for answer in again]
    assert min(reused) > 10
    assert [exposure(answer)["reused_lowered_tokens"] for answer in again] == reused


def test_levels_that_change_under_a_request_share_its_tokens(server: Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.generate, PROMPT, 200)
        for level in (2, INT4, 1):
            before = _generated(server)
            _wait(lambda before=before: _generated(server) > before)
            server.go_to(level)
        answer = future.result()
    counts = exposure(answer)["generated_tokens"]
    assert sum(counts.values()) == 200
    assert {"0", "2", "4"} <= counts.keys()
    assert set(exposure(answer)["prefilled_tokens"]) <= {"0"}


def test_a_demand_brings_precision_back_and_then_the_level_returns(server: Client) -> None:
    server.go_to(INT8)
    held = server.status()["floors"]["held"]
    answer = server.generate(PROMPT, 24, morph=FULL)
    assert exposure(answer)["generated_tokens"] == {"0": 24}
    assert set(exposure(answer)["prefilled_tokens"]) <= {"0"}
    status = server.wait_level(INT8)
    assert status["floors"]["held"] == held + 1
    assert status["floors"]["running"] == 0
    metrics = server.http.get("/metrics").text
    assert "sglang_morph:floor_requests_total{" in metrics
    assert "sglang_morph:request_tokens_total{" in metrics


def test_the_level_stays_within_what_a_running_request_allows(server: Client) -> None:
    body = {"custom_params": {"morph": {"min_precision": "int8"}}}
    with ThreadPoolExecutor(1) as pool:
        sampling = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True, **body}
        future = pool.submit(server.generate, PROMPT, sampling_params=sampling, rid="long")
        _wait(lambda: server.status()["floors"]["running"] == 1)
        server.set_level(INT4)
        status = server.wait_level(INT8)
        assert not future.done()
        assert "a request allows level 3 at most" in server.status()["obstacle"]
        assert status["floors"]["ceiling"] == INT8
        before = _generated(server)
        _wait(lambda: _generated(server) > before + 2)
        server.http.post("/abort_request", json={"rid": "long"})
        answer = future.result()
    assert max(exposure(answer)["generated_tokens"]) == "3"
    server.wait_level(INT4)


def test_a_waiting_request_can_be_aborted(server: Client) -> None:
    """It waits because others use more pages than the base has; nothing of it is left behind."""
    server.go_to(INT4)
    with ThreadPoolExecutor(16) as pool:
        others = server.start(pool, 12, tokens=150)
        _wait(lambda: server.status()["monitor"]["latest"]["pressure"] > 1.02)
        waiting = pool.submit(server.generate, PROMPT, 8, morph=FULL, rid="demanding")
        _wait(lambda: server.status()["floors"]["ceiling"] == 0)
        server.http.post("/abort_request", json={"rid": "demanding"})
        assert waiting.result()["meta_info"]["finish_reason"]["type"] == "abort"
        _wait(lambda: server.status()["floors"]["ceiling"] == INT4)
        assert not any(future.done() for future in others)
        server.http.post("/abort_request", json={"abort_all": True})
    assert server.status()["floors"]["running"] == 0


@pytest.mark.parametrize("level", [0, INT8])
def test_openai_clients_ask_and_are_told(server: Client, level: int) -> None:
    server.go_to(level)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    chat = client.chat.completions.create(
        model="m", messages=[QUESTION], n=2, max_tokens=6, extra_body={"morph": FULL}
    )
    completion = client.completions.create(
        model="m", prompt="The capital of France is", max_tokens=4, temperature=0
    )
    told = chat.to_dict()["metadata"]["morph"]
    assert set(told["generated_tokens"]) == {"0"}
    assert sum(told["generated_tokens"].values()) == chat.usage.completion_tokens
    told = completion.to_dict()["metadata"]["morph"]
    assert sum(told["generated_tokens"].values()) == completion.usage.completion_tokens
    if level:  # it may have run before the level was back
        server.wait_level(level)


def test_a_stream_ends_with_its_exposure(server: Client) -> None:
    body = {
        "text": PROMPT,
        "stream": True,
        "morph": FULL,
        "sampling_params": {"max_new_tokens": 12, "ignore_eos": True},
    }
    with server.http.stream("POST", "/generate", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    events = [orjson.loads(line.removeprefix("data: ")) for line in lines]
    assert exposure(events[-1])["generated_tokens"] == {"0": 12}
    assert not any("morph" in event["meta_info"] for event in events[:-1])


def test_an_openai_stream_tells_it_beside_the_usage(server: Client) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    chat = client.chat.completions.create(
        model="m",
        messages=[QUESTION],
        max_tokens=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    *_, last = chat
    assert last.usage is not None
    told = last.to_dict()["metadata"]["morph"]
    assert told["generated_tokens"] == {"0": last.usage.completion_tokens}


Body = Callable[[Any], dict[str, Any]]
ROUTES: list[tuple[str, Body]] = [
    ("/generate", lambda morph: {"text": "a", "morph": morph}),
    ("/generate", lambda morph: {"text": "a", "morph": morph, "stream": True}),
    ("/generate", lambda m: {"text": "a", "sampling_params": {"custom_params": {"morph": m}}}),
    ("/v1/completions", lambda morph: {"model": "m", "prompt": "a", "morph": morph}),
    (
        "/v1/chat/completions",
        lambda morph: {"model": "m", "messages": [QUESTION], "stream": True, "morph": morph},
    ),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("morph", "message"),
    [
        ({"min_precision": "int7"}, "morph.min_precision is 'int7'; give one of full, "),
        ({"min_precision": 8}, "morph.min_precision is 8"),
        ({"precision": "full"}, "morph.precision is unknown"),
    ],
)
def test_a_bad_demand_is_answered_with_400(
    manual: Client, path: str, body: Body, morph: Any, message: str
) -> None:
    answer = manual.http.post(path, json=body(morph))
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert message in answer.text


def _generated(client: Client) -> int:
    """KV tokens in use: they grow with every step."""
    return client.status()["monitor"]["latest"]["used_pages"]


def _wait(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
