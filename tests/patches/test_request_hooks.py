"""The hooks that follow single requests, on what SGLang passes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, ClassVar

import orjson
import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from patches import admission, demand, exposure, launch, prefixes
from sglang_morph.options import MorphOptions
from sglang_morph.server_runtime import MorphServerRuntime

SERVER = MorphServerRuntime(MorphOptions())


class Recorder:
    exposure_field: ClassVar[str] = "morph"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def method(*args: Any) -> None:
            self.calls.append((name, *args))

        return method


def test_a_launch_is_told_and_changes_nothing() -> None:
    runtime = Recorder()
    hook = launch.PATCH.make_hook(runtime)
    assert hook("scheduler", "batch") is None
    assert hook("scheduler", "batch", pp_proxy_tensors=None) is None
    assert runtime.calls == [("launched", "batch")] * 2


def test_admission_is_the_runtimes_to_allow() -> None:
    def add(adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: Any) -> Any:
        return (adder, req, has_chunked_req, truncation_align_size)

    runtime = SimpleNamespace(admit=lambda add, adder, req: (add(), adder, req))
    hook = admission.PATCH.make_hook(runtime)
    answer = hook(add, "adder", "req", has_chunked_req=True, truncation_align_size=None)
    assert answer == (("adder", "req", True, None), "adder", "req")


@pytest.mark.parametrize(("chunked", "skip", "told"), [(1, 1, 1), (1, 0, 0), (0, 1, 0)])
def test_only_a_chunk_that_was_left_out_is_told(chunked: int, skip: int, told: int) -> None:
    runtime = Recorder()
    req = SimpleNamespace(skip_radix_cache_insert=bool(skip))
    keywords = {"chunked": True} if chunked else {}
    assert prefixes.PATCH.make_hook(runtime)(None, req, "tree", **keywords) is None
    assert runtime.calls == [("chunk_left_out", req, "tree")] * told


def test_a_demand_is_checked_before_sglangs_own_checks() -> None:
    hook = demand.PATCH.make_hook(SERVER)
    assert hook(SamplingParams(), 100) is None
    assert hook(SamplingParams(custom_params={"other": 1}), 100) is None
    good = SamplingParams(custom_params={"morph": {"min_precision": "int8"}})
    assert hook(good, 100) is None
    with pytest.raises(ValueError, match="morph.min_precision is 'int9'"):
        hook(SamplingParams(custom_params={"morph": {"min_precision": "int9"}}), 100)


def stream(values: dict[str, list[Any]], *answers: dict[str, Any]) -> list[dict[str, Any]]:
    """What `_wait_one_response` yields, with `values` gathered for the request by then."""
    state = SimpleNamespace(customized_info_accumulated=values)
    manager = SimpleNamespace(rid_to_state={"r": state})

    async def original(manager: Any, obj: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        manager.rid_to_state.pop(obj.rid)  # as at the end of a request
        for meta_info in answers:
            yield {"meta_info": meta_info}

    async def gather() -> list[dict[str, Any]]:
        hook = exposure.META_INFO.make_hook(SERVER)
        found = hook(original, manager, SimpleNamespace(rid="r"))
        return [answer["meta_info"] async for answer in found]

    return asyncio.run(gather())


def test_meta_info_shows_the_exposure_as_one_object() -> None:
    told = {"generated_tokens": {"0": 3}}
    assert stream({"morph": [None, None, told]}, {"id": 1, "morph": [None, None, told]}) == [
        {"id": 1, "morph": told}
    ]
    # Incremental streaming cuts the list by the tokens sent before.
    assert stream({"morph": [None, told]}, {"id": 1, "morph": []}) == [{"id": 1, "morph": told}]


def test_what_only_fills_the_list_is_not_shown() -> None:
    """Requests that are processed together with one that ends get a value a token, too."""
    assert stream({"morph": [None]}, {"id": 1, "morph": [None]}, {"id": 1}) == [{"id": 1}] * 2
    assert stream({"other": [5]}, {"other": [5]}) == [{"other": [5]}]


@pytest.mark.parametrize("patch", [exposure.CHAT, exposure.COMPLETION])
def test_openai_metadata_adds_up_the_choices(patch: Any) -> None:
    told = {"generated_tokens": {"0": 2}, "prefilled_tokens": {}, "reused_lowered_tokens": 1}
    response = SimpleNamespace(metadata={"weight_version": "default"})
    items = [{"meta_info": {"morph": told}}, {"meta_info": {"morph": told}}, {"meta_info": {}}]
    hook = patch.make_hook(SERVER)
    assert hook(response, "serving", "request", items, 17) is None
    assert response.metadata == {
        "weight_version": "default",
        "morph": {
            "generated_tokens": {"0": 4},
            "prefilled_tokens": {},
            "reused_lowered_tokens": 2,
        },
    }
    hook(SimpleNamespace(), "serving", "request", items, 17)  # an error response


CHUNK = 'data: {"id":"r","choices":[{"text":"a"}],"usage":{"total_tokens":3}}\n\n'
USAGE = 'data: {"id":"r","choices":[],"usage":{"total_tokens":3}}\n\n'
DONE = "data: [DONE]\n\n"


def test_openai_streams_tell_it_beside_the_usage() -> None:
    told = {"generated_tokens": {"2": 1}, "prefilled_tokens": {}, "reused_lowered_tokens": 0}
    values: dict[str, list[Any]] = {}
    manager = SimpleNamespace(
        rid_to_state={"r": SimpleNamespace(customized_info_accumulated=values)}
    )

    async def answers(manager: Any, obj: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        values.clear()
        yield {"meta_info": {}}
        values["morph"] = [told]
        yield {"meta_info": {}}

    wait = exposure.META_INFO.make_hook(SERVER)

    async def chunks(serving: Any, include_usage: bool) -> AsyncIterator[str]:
        async for _ in wait(answers, manager, SimpleNamespace(rid="r")):
            yield CHUNK
        if include_usage:
            yield USAGE
        yield DONE

    async def gather(include_usage: bool) -> list[str]:
        hook = exposure.CHAT_STREAM.make_hook(SERVER)
        stream = hook(chunks, "serving", include_usage)
        first = await anext(stream)

        async def rest() -> list[str]:
            return [chunk async for chunk in stream]

        # As SGLang does: the first chunk in the handler's task, the others in the response's.
        return [first, *await asyncio.create_task(rest())]

    assert asyncio.run(gather(include_usage=False)) == [CHUNK, CHUNK, DONE]
    *before, usage, done = asyncio.run(gather(include_usage=True))
    assert (before, done) == ([CHUNK, CHUNK], DONE)
    assert usage.endswith("}\n\n")
    assert orjson.loads(usage.removeprefix("data: ")) == {
        "id": "r",
        "choices": [],
        "usage": {"total_tokens": 3},
        "metadata": {"morph": told},
    }
