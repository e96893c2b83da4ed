"""Clients of SGLang work unchanged, at full and at lowered precision; the operator's routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import sglang as sgl
from openai.types.chat import ChatCompletionUserMessageParam

from tests.server.client import Client

QUESTION = ChatCompletionUserMessageParam(role="user", content="What is the capital of France?")


@pytest.fixture(params=[0, 3], ids=["full", "int8"])
def client(request: pytest.FixtureRequest, elastic: Client) -> Client:
    elastic.go_to(request.param)
    return elastic


@pytest.fixture
def oai(client: Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{client.url}/v1", api_key="none")


def test_chat(oai: openai.OpenAI) -> None:
    answer = oai.chat.completions.create(model="m", messages=[QUESTION], temperature=0)
    assert "Paris" in str(answer.choices[0].message.content)


def test_chat_streamed(oai: openai.OpenAI) -> None:
    stream = oai.chat.completions.create(model="m", messages=[QUESTION], temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "Paris" in text


def test_completions(oai: openai.OpenAI) -> None:
    answer = oai.completions.create(
        model="m", prompt="The capital of France is", temperature=0, max_tokens=8
    )
    assert "Paris" in answer.choices[0].text


def test_completions_streamed(oai: openai.OpenAI) -> None:
    stream = oai.completions.create(
        model="m", prompt="The capital of France is", temperature=0, max_tokens=8, stream=True
    )
    assert "Paris" in "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_sglang_frontend(client: Client) -> None:
    @sgl.function
    def capital(s: sgl.ProgramState, country: str) -> None:
        s += sgl.user(f"What is the capital of {country}?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0))

    sgl.set_default_backend(sgl.RuntimeEndpoint(client.url))
    states = capital.run_batch([{"country": "France"}, {"country": "Italy"}])
    assert "Paris" in states[0]["answer"]
    assert "Rome" in states[1]["answer"]


def change(client: Client, what: str, status: int = 200, **body: Any) -> dict[str, Any]:
    """The answer to `POST /morph/<what>`."""
    answer = client.http.post(f"/morph/{what}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.fixture
def operated(elastic: Client) -> Iterator[Client]:
    """Under `manual` and without limits before and after."""
    yield elastic
    change(elastic, "limits", hold=False, lowest_level=None, highest_level=None)
    change(elastic, "limits", max_transitions_per_minute=None)
    change(elastic, "policy", policy="manual")


def test_limits_bind_the_operator_too(operated: Client) -> None:
    applied = change(operated, "limits", highest_level=1, hold=False)
    assert (applied["result"], applied["limits"]["highest_level"]) == ("applied", 1)
    assert change(operated, "level", 409, level=2)["result"] == "conflict"
    assert change(operated, "level", level=1)["level"] == 1
    assert operated.status()["limits"] == applied["limits"]
    change(operated, "limits", hold=True)
    assert "hold" in change(operated, "level", 409, level=0)["error"]
    assert operated.wait_level(1)


def test_a_change_decided_on_an_old_revision_is_stale(operated: Client) -> None:
    revision = operated.status()["revision"]
    first = change(operated, "level", level=1, revision=revision)
    assert first["result"] == "applied"
    again = change(operated, "level", 409, level=2, revision=revision)
    assert (again["result"], again["revision"]) == ("stale", first["revision"])
    assert operated.status()["level"] == 1


def test_a_policy_takes_over_and_leaves_again(operated: Client) -> None:
    operated.go_to(2)
    answer = change(
        operated,
        "policy",
        policy="threshold",
        mode="accuracy",
        parameters={"leave_hold_s": 0.2, "min_dwell_s": 0.1},
    )
    assert (answer["result"], answer["policy"]["leave_hold_s"]) == ("applied", 0.2)
    assert change(operated, "level", 409, level=3)["result"] == "conflict"
    for number in range(4):  # the policy reads the scheduler only while there are steps
        operated.generate(f"Number {number} is", 16)
    operated.wait_level(0)
    answer = change(operated, "policy", policy="manual")
    assert answer["policy"] == {"name": "manual", "max_level": 4, "wanted": 0}


@pytest.mark.parametrize(
    ("what", "body", "field"),
    [
        ("level", {"level": "1"}, "level"),
        ("policy", {"policy": "best"}, "policy"),
        ("policy", {"policy": "threshold", "parameters": {"enter_pressure": 2}}, "enter_pressure"),
        ("policy", {"policy": "slo", "parameters": {"pace": 2}}, "pace"),
        ("limits", {"highest_level": 9}, "highest_level"),
        ("limits", {"hold": "yes"}, "hold"),
    ],
)
def test_bad_bodies_name_the_field(
    manual: Client, what: str, body: dict[str, Any], field: str
) -> None:
    revision = manual.status()["revision"]
    answer = change(manual, what, 422, **body)
    assert answer["result"] == "invalid"
    assert answer["field"].rpartition(".")[2] == field
    assert manual.status()["revision"] == revision


def test_events_tell_what_was_asked_and_what_was_done(operated: Client) -> None:
    seen = operated.http.get("/morph/events", params={"limit": 1}).json()["last_id"]
    change(operated, "level", level=2)
    page = operated.http.get("/morph/events", params={"after": seen, "limit": 50}).json()
    assert [row["kind"] for row in page["events"]] == ["decision", "transition", "operator"]
    assert [row["id"] for row in page["events"]] == [seen + 1, seen + 2, seen + 3]
    assert page["events"][-1]["change"] == {"level": 2}
    assert page["events"][-1]["revision"] == page["revision"] == operated.status()["revision"]
    assert operated.http.get("/morph/events", params={"limit": 0}).status_code == 422


def test_status_holds_all_that_the_monitor_watches(operated: Client) -> None:
    operated.generate("Once upon a time", 8)
    status = operated.status()
    monitor, latest = status["monitor"], status["monitor"]["latest"]
    for name in ("pressure", "used_pages", "free_pages", "waiting", "waiting_tokens"):
        assert latest[name] >= 0
    assert latest["oldest_wait_s"] == 0
    for name in ("arrived_tokens_per_s", "served_tokens_per_s", "retractions"):
        assert monitor[name] >= 0
    assert monitor["retractions_avoided"] == 0
    assert monitor["ttft_s"]["p95"] > 0 and monitor["tpot_s"]["p50"] > 0
    assert monitor["seconds_at_level"]["0"] > 0
    assert 0 <= status["eviction"]["reuse"] <= 1
