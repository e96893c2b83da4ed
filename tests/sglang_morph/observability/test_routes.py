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
        ("POST", "/morph/level", {"level": 2}, ("set_level", {"level": 2})),
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
    ("body", "message"),
    [
        ("", "the body is not JSON"),
        ("{", "the body is not JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", "field 'level' must be an integer"),
        ('{"level": "1"}', "field 'level' must be an integer"),
        ('{"level": true}', "field 'level' must be an integer"),
        ('{"level": 1.5}', "field 'level' must be an integer"),
        ('{"level": -1}', "field 'level' must be an integer, 0 or more"),
        ('{"level": 1, "lvl": 2}', "unknown field 'lvl'"),
    ],
)
def test_bad_body_is_answered_with_422_and_sent_nowhere(http: Any, body: str, message: str) -> None:
    client, manager = http(DONE)
    response = client.post("/morph/level", content=body)
    assert response.status_code == 422
    assert message in response.json()["error"]
    assert not manager.requests


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
    assert routes.set_level._auth_level is AuthLevel.ADMIN_OPTIONAL
    assert routes.verify._auth_level is AuthLevel.ADMIN_OPTIONAL
    assert not hasattr(routes.get_status, "_auth_level")
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
