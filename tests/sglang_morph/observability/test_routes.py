"""The /morph routes over HTTP, in front of a tokenizer manager that answers by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.managers import io_struct
from sglang.srt.utils.auth import AuthLevel, app_has_admin_force_endpoints

from sglang_morph.observability import routes
from sglang_morph.observability.control import MorphControlReq, MorphControlReqOutput


class Manager(SimpleNamespace):
    """Notes requests and gives `reply` to each."""

    def __init__(self, reply: MorphControlReqOutput | None) -> None:
        super().__init__(requests=[])
        if reply is not None:

            async def communicate(request: MorphControlReq) -> list[MorphControlReqOutput]:
                self.requests.append((request.action, request.argument))
                return [reply]

            self.morph_communicator = communicate

    def auto_create_handle_loop(self) -> None:
        pass


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`http(reply)`: a client and the manager behind it."""

    def make(reply: MorphControlReqOutput | None) -> tuple[TestClient, Manager]:
        manager = Manager(reply)
        monkeypatch.setattr(routes, "_tokenizer_manager", lambda: manager)
        app = FastAPI()
        app.include_router(routes.router)
        return TestClient(app), manager

    return make


DONE = MorphControlReqOutput(success=True, payload={"level": 2})


@pytest.mark.parametrize(
    ("method", "path", "body", "request_sent"),
    [
        ("GET", "/morph/status", None, ("status", {})),
        ("GET", "/morph/events", None, ("events", {})),
        ("GET", "/morph/events?limit=5&after=7", None, ("events", {"limit": 5, "after": 7})),
        ("POST", "/morph/level", {"level": 2}, ("set_level", {"level": 2})),
        (
            "POST",
            "/morph/level",
            {"level": 2, "revision": 0},
            ("set_level", {"level": 2, "revision": 0}),
        ),
        (
            "POST",
            "/morph/policy",
            {"policy": "slo", "parameters": {"ttft_target_s": 1, "max_level": None}},
            (
                "set_policy",
                {"policy": "slo", "parameters": {"ttft_target_s": 1, "max_level": None}},
            ),
        ),
        (
            "POST",
            "/morph/limits",
            {"highest_level": None, "hold": True},
            ("set_limits", {"highest_level": None, "hold": True}),
        ),
        ("POST", "/morph/verify", None, ("verify", {})),
    ],
)
def test_action_is_sent_and_answered(
    http: Any, method: str, path: str, body: Any, request_sent: Any
) -> None:
    client, manager = http(DONE)
    response = client.request(method, path, json=body)
    assert response.status_code == 200
    assert response.json() == {"level": 2}
    assert manager.requests == [request_sent]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("level", "", ""),
        ("level", "{", ""),
        ("level", "[1]", ""),
        ("level", "{}", "level"),
        ("level", '{"level": "1"}', "level"),
        ("level", '{"level": true}', "level"),
        ("level", '{"level": 1.5}', "level"),
        ("level", '{"level": -1}', "level"),
        ("level", '{"level": 1, "lvl": 2}', "lvl"),
        ("level", '{"level": 1, "revision": "now"}', "revision"),
        ("policy", '{"mode": "accuracy"}', "policy"),
        ("policy", '{"policy": "slo", "parameters": {"pace": 1}}', "parameters.pace"),
        (
            "policy",
            '{"policy": "slo", "parameters": {"ttft_target_s": "1"}}',
            "parameters.ttft_target_s",
        ),
        ("policy", '{"policy": "two_mode", "two_mode_solution": "x"}', "two_mode_solution"),
        ("limits", '{"hold": 1}', "hold"),
        ("limits", '{"highest_level": 1.0}', "highest_level"),
    ],
)
def test_bad_body_is_answered_with_422_and_sent_nowhere(
    http: Any, path: str, body: str, field: str
) -> None:
    client, manager = http(DONE)
    response = client.post(f"/morph/{path}", content=body)
    assert response.status_code == 422
    assert response.json()["field"] == field
    assert field.rpartition(".")[2] in response.json()["error"]
    assert not manager.requests


@pytest.mark.parametrize("query", ["limit=0", "limit=257", "limit=few", "limit=5&since=1"])
def test_bad_query_is_answered_with_422(http: Any, query: str) -> None:
    client, manager = http(DONE)
    response = client.get(f"/morph/events?{query}")
    assert response.status_code == 422
    assert response.json()["field"] in ("limit", "since")
    assert not manager.requests


@pytest.mark.parametrize(
    ("result", "status"), [("stale", 409), ("conflict", 409), ("invalid", 422)]
)
def test_the_result_of_a_refused_change_sets_the_status(
    http: Any, result: str, status: int
) -> None:
    reply = MorphControlReqOutput(
        success=False, message="not now", payload={"result": result, "revision": 3}
    )
    client, _ = http(reply)
    response = client.post("/morph/limits", json={"hold": True})
    assert response.status_code == status
    assert response.json() == {"result": result, "revision": 3, "error": "not now"}


def test_failed_action_is_answered_with_409(http: Any) -> None:
    client, _ = http(MorphControlReqOutput(success=False, message="the policy is not manual"))
    response = client.post("/morph/level", json={"level": 1})
    assert response.status_code == 409
    assert response.json() == {"error": "the policy is not manual"}


def test_static_server_says_so(http: Any) -> None:
    client, _ = http(None)
    assert client.get("/morph/status").json() == {"memory_backend": "static"}
    response = client.post("/morph/level", json={"level": 1})
    assert response.status_code == 409
    assert "--memory-backend" in response.json()["error"]


def test_changing_asks_for_the_admin_key_and_reading_does_not() -> None:
    for change in (routes.set_level, routes.set_policy, routes.set_limits, routes.verify):
        assert change._auth_level is AuthLevel.ADMIN_OPTIONAL
    for reading in (routes.get_status, routes.get_events):
        assert not hasattr(reading, "_auth_level")
    assert not app_has_admin_force_endpoints(routes.router)


@pytest.mark.parametrize(
    "message",
    [
        MorphControlReq(action="set_level", argument={"level": 3}),
        MorphControlReqOutput(success=True, message="m", payload={"a": [1, {"b": None}]}),
    ],
)
def test_messages_pass_sglangs_msgpack_transport(message: Any) -> None:
    assert io_struct.msgpack_decode(io_struct.msgpack_encode(message)) == message
