"""The field `morph` of a body reaches SGLang's custom parameters; everything else is untouched."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.middleware import Middleware

from sglang_morph.observability.demand_field import DEAF, OPENAI, DemandField, moved

DEMAND = {"min_precision": "full"}


def through(path: str, **body: Any) -> Any:
    return orjson.loads(moved(orjson.dumps(body), path))


@pytest.mark.parametrize("path", OPENAI)
def test_openai_bodies(path: str) -> None:
    found = through(path, model="m", morph=DEMAND, custom_params={"a": 1})
    assert found == {"model": "m", "custom_params": {"a": 1, "morph": DEMAND}}


@pytest.mark.parametrize("given", [{}, {"sampling_params": None}, {"sampling_params": {}}])
def test_native_bodies(given: dict[str, Any]) -> None:
    found = through("/generate", text="a", morph=DEMAND, **given)
    assert found == {"text": "a", "sampling_params": {"custom_params": {"morph": DEMAND}}}


def test_native_batches() -> None:
    sampling = [{"temperature": 0}, {"custom_params": {"b": 2}}]
    found = through("/generate", text=["a", "b"], sampling_params=sampling, morph=DEMAND)
    assert found["sampling_params"] == [
        {"temperature": 0, "custom_params": {"morph": DEMAND}},
        {"custom_params": {"b": 2, "morph": DEMAND}},
    ]


@pytest.mark.parametrize(
    "body",
    [
        b'{"text": "say \\"morph\\"", "x": 1.0}',
        b'["morph"]',
        b'{"morph": ',
        b'{"morph": {}, "sampling_params": "no object"}',
        b'{"morph": {}, "sampling_params": {"custom_params": [1]}}',
    ],
)
def test_what_is_not_a_demand_is_left_to_sglang(body: bytes) -> None:
    assert moved(body, "/generate") == body


@pytest.fixture(scope="module")
def http() -> TestClient:
    """An application that answers with the body it got."""
    app = FastAPI()

    async def echo(request: Request) -> Any:
        return {"got": (await request.body()).decode()}

    for path in ("/generate", "/v1/completions", "/other", *DEAF):
        app.post(path)(echo)
    app.user_middleware.append(Middleware(DemandField))
    return TestClient(app)


def test_bodies_pass_through_byte_for_byte(http: TestClient) -> None:
    for path, body in (("/generate", '{"text":  "a"}'), ("/other", '{"morph": 1}')):
        assert http.post(path, content=body).json() == {"got": body}


def test_a_demand_is_moved(http: TestClient) -> None:
    answer = http.post("/v1/completions", json={"morph": DEMAND})
    assert orjson.loads(answer.json()["got"]) == {"custom_params": {"morph": DEMAND}}


def test_a_body_in_pieces_is_read_whole(http: TestClient) -> None:
    pieces = iter([b'{"mor', b'ph": {"min_precision"', b': "full"}}'])
    answer = http.post("/v1/completions", content=pieces)
    assert orjson.loads(answer.json()["got"]) == {"custom_params": {"morph": DEMAND}}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_bad_demand_goes_no_further(http: TestClient, path: str) -> None:
    answer = http.post(path, json={"morph": {"min_precision": "best"}})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    content = answer.json()
    message = content["error"]["message"] if path == "/generate" else content["message"]
    assert message.startswith("morph.min_precision is 'best'; give one of full")


@pytest.mark.parametrize("path", DEAF)
def test_a_demand_that_nobody_would_read_is_refused(http: TestClient, path: str) -> None:
    answer = http.post(path, json={"morph": DEMAND})
    assert answer.status_code == 400
    assert answer.json()["message"].startswith(f"morph has no effect at {path}; send it to ")
    body = '{"model":  "m"}'
    assert http.post(path, content=body).json() == {"got": body}
