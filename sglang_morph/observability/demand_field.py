"""The field `morph` in the body of a generation request, over HTTP.

SGLang's request types drop fields they don't know. A middleware of its application moves this one
to where SGLang carries what it does not read itself, the custom parameters, and answers 400 to a
demand that makes no sense. Bodies without the field pass through byte for byte.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

import orjson

from sglang_morph.precision.demand import FIELD, DemandError, min_precision

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

NATIVE = "/generate"
OPENAI = ("/v1/chat/completions", "/v1/completions", "/invocations")
"""SageMaker's route takes chat completions."""
DEAF = ("/v1/responses", "/v1/messages", "/api/chat", "/api/generate", "/vertex_generate")
"""Routes whose bodies have no place for it: to serve a demand that nobody reads would break it."""
_NAME = f'"{FIELD}"'.encode()


class DemandField:
    """ASGI middleware; innermost, so that it sees what SGLang has let in and unpacked."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) not in (NATIVE, *OPENAI, *DEAF):
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            return  # the client is gone
        if _NAME in body:
            try:
                body = moved(body, _path(scope))
            except DemandError as error:
                await _answer(send, _path(scope), error)
                return
        await self._app(scope, _again(body, receive), send)


def moved(body: bytes, path: str) -> bytes:
    """`body` with the field among the custom parameters. Raises `DemandError`.

    What is wrong with it otherwise is for SGLang to say.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(document, dict) or FIELD not in document:
        return body
    if path in DEAF:
        raise DemandError(FIELD, f"has no effect at {path}; send it to {OPENAI[0]} or {NATIVE}")
    demand = document.pop(FIELD)
    min_precision(demand)
    holders: list[Any] = [document]
    if path == NATIVE:
        given = document.get("sampling_params")
        document["sampling_params"] = given = {} if given is None else given
        holders = given if isinstance(given, list) else [given]
    for holder in holders:
        if not isinstance(holder, dict):
            return body
        custom = holder.get("custom_params") or {}
        if not isinstance(custom, dict):
            return body
        holder["custom_params"] = {**custom, FIELD: demand}
    return orjson.dumps(document)


def _path(scope: Message) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or path


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None if the client has gone before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """Gives `body`, and then what `receive` has: whether the client is still there."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_again() -> Message:
        message = next(messages, None)
        return await receive() if message is None else message

    return receive_again


async def _answer(send: Send, path: str, error: DemandError) -> None:
    """400, in the form of the route's own errors."""
    status = HTTPStatus.BAD_REQUEST
    content: dict[str, Any] = {"error": {"message": str(error)}}
    if path != NATIVE:
        content = {
            "object": "error",
            "message": str(error),
            "type": "BadRequest",
            "param": error.field,
            "code": int(status),
        }
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(content)})
