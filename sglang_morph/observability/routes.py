"""HTTP routes: `GET /morph/status`, `POST /morph/level`, `POST /morph/verify`.

They live in SGLang's application, under its authentication: changing or verifying asks for the
admin key where one is set.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_morph.observability.control import send_control

router = APIRouter(prefix="/morph", tags=["morph"])


@router.get("/status")
async def get_status() -> Response:
    """Level, capacity, bytes by owner; only the backend's name when it is `static`."""
    manager = _tokenizer_manager()
    if not hasattr(manager, "morph_communicator"):
        return _json({"memory_backend": "static"})
    return await _act(manager, "status")


@router.post("/level")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def set_level(request: Request) -> Response:
    """Body `{"level": int}`: go to that precision level."""
    # Parsed here: SGLang answers every validation error of FastAPI's with 400 and a dump.
    try:
        level = _level_of(await request.body())
    except ValueError as error:
        return _error(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
    return await _act(_tokenizer_manager(), "set_level", {"level": level})


@router.post("/verify")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def verify() -> Response:
    """SHA-256 over all parameters, and the level it was taken at: comparable at level 0 only."""
    return await _act(_tokenizer_manager(), "verify")


def _level_of(raw: bytes) -> int:
    """Raises ValueError naming the field."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError('the body must be a JSON object such as {"level": 0}')
    if unknown := sorted(body.keys() - {"level"}):
        raise ValueError(f"unknown field {unknown[0]!r}; the only field is 'level'")
    level = body.get("level")
    if type(level) is not int or level < 0:
        raise ValueError("field 'level' must be an integer, 0 or more")
    return level


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
    if not reply.success:
        return _error(HTTPStatus.CONFLICT, reply.message)
    return _json(reply.payload)


def _error(status: HTTPStatus, message: str) -> Response:
    return _json({"error": message}, status)


def _json(content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
