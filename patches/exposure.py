"""Exposure: answers tell at which precision levels their tokens were computed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import orjson

from patches.ledger import Patch
from patches.runtime import ServerRuntime

OPENAI = "sglang.srt.entrypoints.openai"

_ended: ContextVar[list[dict[str, Any]] | None] = ContextVar("_ended", default=None)
"""`meta_info` of the answers that ended for the stream which this task serves."""


def make_meta_info_hook(runtime: ServerRuntime) -> Callable[..., Any]:
    async def wait_one_response(
        original: Callable[..., Any], manager: Any, obj: Any, request: Any = None
    ) -> AsyncIterator[dict[str, Any]]:
        # SGLang collects one value a token, and hands the list out with every part of an answer.
        values = manager.rid_to_state[obj.rid].customized_info_accumulated
        field = runtime.exposure_field
        async with aclosing(original(manager, obj, request)) as answers:
            async for answer in answers:
                if field in values:
                    meta_info = answer["meta_info"]
                    meta_info.pop(field, None)
                    if values[field] and values[field][-1] is not None:
                        meta_info[field] = values[field][-1]
                        if (ended := _ended.get()) is not None:
                            ended.append(meta_info)
                yield answer

    return wait_one_response


def make_metadata_hook(runtime: ServerRuntime) -> Callable[..., Any]:
    def after_build(response: Any, serving: Any, request: Any, ret: Any, *_: Any) -> None:
        if metadata := getattr(response, "metadata", None):
            metadata.update(runtime.metadata_of([item["meta_info"] for item in ret]))

    return after_build


def make_stream_hook(runtime: ServerRuntime) -> Callable[..., Any]:
    async def stream(
        original: Callable[..., Any], serving: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        ended: list[dict[str, Any]] = []
        _ended.set(ended)
        async with aclosing(original(serving, *args, **kwargs)) as chunks:
            async for chunk in chunks:
                # Only the usage chunk at the end has no choices; clients get it if they ask.
                if ended and '"choices":[]' in chunk and '"usage":{' in chunk:
                    document = orjson.loads(chunk.removeprefix("data: "))
                    document["metadata"] = runtime.metadata_of(ended)
                    chunk = f"data: {orjson.dumps(document).decode()}\n\n"
                yield chunk

    return stream


META_INFO = Patch(
    name="exposure_meta_info",
    target="sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response",
    kind="around",
    process="server",
    why="meta_info shows a request's exposure as one object.",
    why_not_milder=(
        "What a scheduler adds to an answer (customized_info) is a list with one value a token, "
        "and is cut at the wrong place when answers are streamed incrementally."
    ),
    upstream="none found",
    remove_when="The scheduler can add a value per request to meta_info.",
    source_sha256="ddde0e6b71c3e1cd33e34c6030bf42e1a8f13b7170eb8f111b7eecc6215670e2",
    make_hook=make_meta_info_hook,
)

CHAT = Patch(
    name="exposure_chat",
    target=f"{OPENAI}.serving_chat.OpenAIServingChat._build_chat_response",
    kind="after",
    process="server",
    why="OpenAI clients read a request's exposure from the response's metadata.",
    why_not_milder="The metadata is built inside the method from one fixed field.",
    upstream="none found",
    remove_when="meta_info can be passed on in the metadata of OpenAI responses.",
    source_sha256="bca0854ea937fee784df17fd027590eb3771066c506505e370d86c85a9cd5478",
    make_hook=make_metadata_hook,
)

COMPLETION = replace(
    CHAT,
    name="exposure_completion",
    target=f"{OPENAI}.serving_completions.OpenAIServingCompletion._build_completion_response",
    source_sha256="38f25f6e84409f9b52007e4c7d5d8e3017f8b6bff2f72fd5c5d4220b09ab6eab",
)

CHAT_STREAM = Patch(
    name="exposure_chat_stream",
    target=f"{OPENAI}.serving_chat.OpenAIServingChat._generate_chat_stream",
    kind="around",
    process="server",
    why="OpenAI clients that stream read a request's exposure beside its usage.",
    why_not_milder="The last chunk is built inside the method, from a type without metadata.",
    upstream=CHAT.upstream,
    remove_when=CHAT.remove_when,
    source_sha256="1da97cdfa4bed188e23efac817eef2bef3193da98cd4112d0af56fc45b7592c8",
    make_hook=make_stream_hook,
)

COMPLETION_STREAM = replace(
    CHAT_STREAM,
    name="exposure_completion_stream",
    target=f"{OPENAI}.serving_completions.OpenAIServingCompletion._generate_completion_stream",
    source_sha256="e84f6b0d1c88fae9c9a714862d6a2bf3f5b3d2026b2795b2b7b5d641c69349a9",
)

PATCHES = (META_INFO, CHAT, COMPLETION, CHAT_STREAM, COMPLETION_STREAM)
