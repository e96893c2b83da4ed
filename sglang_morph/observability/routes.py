"""HTTP routes: `GET /morph/status` and `/morph/events`, `POST /morph/level`, `/morph/policy`,
`/morph/limits` and `/morph/verify`.

They live in SGLang's application, under its authentication: changing or verifying asks for the
admin key where one is set.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
import orjson
from fastapi import APIRouter, Request, Response
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_morph.controller.changes import (
    BadField,
    EventsQuery,
    LevelChange,
    LimitsChange,
    PolicyChange,
    convert,
    decode,
)
from sglang_morph.observability.control import send_control

REFUSED = {
    "invalid": HTTPStatus.UNPROCESSABLE_ENTITY,
    "stale": HTTPStatus.CONFLICT,
    "conflict": HTTPStatus.CONFLICT,
}

router = APIRouter(prefix="/morph", tags=["morph"])


@router.get("/status")
async def get_status() -> Response:
    """Level, capacity, bytes by owner; only the backend's name when it is `static`."""
    manager = _tokenizer_manager()
    if not hasattr(manager, "morph_communicator"):
        return _json({"memory_backend": "static"})
    return await _act(manager, "status")


@router.get("/events")
async def get_events(request: Request) -> Response:
    """Query `limit` and `after`; newest last."""
    try:
        query = convert(dict(request.query_params), EventsQuery, strict=False)
    except BadField as error:
        return _bad(error)
    return await _act(_tokenizer_manager(), "events", msgspec.to_builtins(query))


@router.post("/level")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def set_level(request: Request) -> Response:
    """Body: `LevelChange`. Only under the policy `manual`."""
    return await _change(request, "set_level", LevelChange)


@router.post("/policy")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def set_policy(request: Request) -> Response:
    """Body: `PolicyChange`. Replaces the running policy."""
    return await _change(request, "set_policy", PolicyChange)


@router.post("/limits")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def set_limits(request: Request) -> Response:
    """Body: `LimitsChange`."""
    return await _change(request, "set_limits", LimitsChange)


@router.post("/verify")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def verify() -> Response:
    """SHA-256 over all parameters, and the level it was taken at: comparable at level 0 only."""
    return await _act(_tokenizer_manager(), "verify")


async def _change(request: Request, action: str, schema: type[msgspec.Struct]) -> Response:
    # Parsed here: SGLang answers every validation error of FastAPI's with 400 and a dump.
    try:
        change = decode(await request.body(), schema)
    except BadField as error:
        return _bad(error)
    return await _act(_tokenizer_manager(), action, msgspec.to_builtins(change))


def _tokenizer_manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


async def _act(manager: Any, action: str, argument: dict[str, Any] | None = None) -> Response:
    if not hasattr(manager, "morph_communicator"):
        return _error(
            HTTPStatus.CONFLICT,
            "the memory backend is static; start the server with --memory-backend layer_swap",
        )
    reply = await send_control(manager, action, argument)
    if reply.success:
        return _json(reply.payload)
    status = REFUSED.get(reply.payload.get("result", ""), HTTPStatus.CONFLICT)
    return _json({**reply.payload, "error": reply.message}, status)


def _bad(error: BadField) -> Response:
    content = {"result": "invalid", "error": str(error), "field": error.field}
    return _json(content, HTTPStatus.UNPROCESSABLE_ENTITY)


def _error(status: HTTPStatus, message: str) -> Response:
    return _json({"error": message}, status)


def _json(content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
