"""Each hook calls what it should, with what SGLang passes, on SGLang's own types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from sglang.srt.managers import io_struct
from sglang.utils import TypeBasedDispatcher

from patches import (
    allocator,
    argument_defaults,
    attach,
    communicator,
    control,
    guards,
    kv_budget,
    kv_pool,
    retract,
    server_start,
    sleep,
    status,
    tick,
    weights,
)
from patches.ledger import Patch
from sglang_morph.observability.control import MorphControlReq, MorphControlReqOutput


class Recorder:
    """A runtime that notes its calls, and answers with `answers[method]`."""

    control_request_type: ClassVar[type] = MorphControlReq
    control_reply_type: ClassVar[type] = MorphControlReqOutput

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args, *kwargs.values()))
            return self._answers.get(name)

        return method


def hook(module: Any, runtime: Any) -> Any:
    return module.PATCH.make_hook(runtime)


@pytest.mark.parametrize(
    ("module", "arguments", "call"),
    [
        (weights, (None, "runner"), ("adopt_weights", "runner")),
        (attach, (None, "scheduler"), ("attach", "scheduler")),
        (argument_defaults, ("arguments",), ("fill_defaults", "arguments")),
        (server_start, (None, "arguments"), ("before_start", "arguments")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_hook_tells_the_runtime_and_changes_no_result(
    module: Any, arguments: tuple[Any, ...], call: tuple[Any, ...]
) -> None:
    runtime = Recorder()
    assert hook(module, runtime)(*arguments) is None
    assert runtime.calls == [call]


def test_tick_takes_the_keywords_of_the_event_loops() -> None:
    runtime = Recorder()
    result = hook(tick, runtime)("scheduler", running_batch="running", last_batch="last")
    assert result is None  # else the registry would replace the arguments
    assert runtime.calls == [("tick",)]


@pytest.mark.parametrize("may", [True, False])
def test_scheduler_sleeps_only_while_it_may(may: bool) -> None:
    slept: list[Any] = []
    hook(sleep, Recorder(may_sleep=may))(slept.append, "scheduler")
    assert slept == ["scheduler"] * may


def test_kv_budget_replaces_the_figure() -> None:
    runtime = Recorder(kv_budget=70)
    assert hook(kv_budget, runtime)(100, "configurator", pre_model_load_memory=5) == 70
    assert runtime.calls == [("kv_budget", 100)]


def test_kv_budget_may_be_zero() -> None:
    assert hook(kv_budget, Recorder(kv_budget=0))(100) == 0


def test_kv_pool_gets_the_runtimes_class() -> None:
    passed: dict[str, Any] = {}
    runtime = Recorder(kv_pool_class="elastic")

    def original(configurator: Any, **kwargs: Any) -> str:
        passed.update(kwargs)
        return "pool"

    built = hook(kv_pool, runtime)(
        original, "configurator", max_total_num_tokens=8, mha_pool_class=object, quant_method=None
    )
    assert built == "pool"
    assert passed == {
        "max_total_num_tokens": 8,
        "mha_pool_class": "elastic",
        "quant_method": None,
    }
    assert runtime.calls == [("kv_pool_class", "configurator", 8)]


def build_allocator(runtime: Recorder, given: Any) -> Any:
    configurator = SimpleNamespace(kv_cache_dtype="dtype", device="cpu")
    return hook(allocator, runtime)(
        lambda configurator, **kwargs: kwargs["token_to_kv_pool_allocator"],
        configurator,
        sizes=SimpleNamespace(max_total_num_tokens=8),
        token_to_kv_pool="pool",
        is_dsv4_model=False,
        req_to_token_pool="requests",
        token_to_kv_pool_allocator=given,
    )


def test_allocator_is_the_runtimes() -> None:
    runtime = Recorder(build_allocator="elastic")
    assert build_allocator(runtime, None) == "elastic"
    assert runtime.calls == [("build_allocator", 8, "dtype", "cpu", "pool", False)]


def test_allocator_that_exists_is_left_to_sglang() -> None:
    runtime = Recorder()
    assert build_allocator(runtime, "given") == "given"
    assert not runtime.calls


@pytest.mark.parametrize(
    ("fits", "indices", "relieved", "answer", "asked"),
    [
        ([True], None, True, True, 0),
        ([False, True], None, True, True, 1),
        ([False, False], None, True, False, 1),
        ([False], None, False, False, 1),
        ([False], [0, 1], True, False, 0),
    ],
    ids=["fits", "relieved", "still too little", "no relief", "inside a retraction"],
)
def test_retraction_asks_for_relief_once(
    fits: list[bool], indices: list[int] | None, relieved: bool, answer: bool, asked: int
) -> None:
    runtime = Recorder(relieve=relieved)
    original_answers = iter(fits)
    check = hook(retract, runtime)
    assert check(lambda *_: next(original_answers), "batch", selected_indices=indices) is answer
    assert runtime.calls == [("relieve", "batch")] * asked
    assert next(original_answers, None) is None


def test_control_requests_reach_the_runtime() -> None:
    runtime = Recorder(handle_control="reply")
    scheduler = SimpleNamespace(_request_dispatcher=TypeBasedDispatcher([]))
    hook(control, runtime)(None, scheduler)
    request = MorphControlReq(action="status")
    assert scheduler._request_dispatcher(request) == "reply"
    assert runtime.calls == [("handle_control", request)]


def test_control_replies_reach_the_communicator() -> None:
    sent: list[Any] = []
    manager = SimpleNamespace(
        _dispatch_to_scheduler=sent.append, _result_dispatcher=TypeBasedDispatcher([])
    )
    hook(communicator, Recorder())(None, manager, SimpleNamespace(dp_size=1))
    # Nobody waits for this reply: SGLang's communicator drops it instead of failing.
    manager._result_dispatcher(MorphControlReqOutput(success=True))
    assert manager.morph_communicator._fan_out == 1


def test_status_appears_in_the_internal_state() -> None:
    reply = io_struct.GetInternalStateReqOutput(internal_state={"a": 1})
    assert hook(status, Recorder(status={"level": 2}))(reply, "scheduler", "request") is None
    assert reply.internal_state == {"a": 1, "morph": {"level": 2}}


@pytest.mark.parametrize("patch", guards.PATCHES, ids=lambda patch: patch.name)
def test_guard_refuses_in_the_form_its_caller_expects(patch: Patch) -> None:
    guard = patch.make_hook(None)
    operation = patch.name.removeprefix("guard_")
    if patch.kind == "before":
        with pytest.raises(ValueError, match=f"{operation} is refused.*--memory-backend static"):
            guard("owner", "request")
        return
    reply = guard(lambda *_: pytest.fail("the operation ran"), "owner", "request")
    assert type(reply).__module__ == io_struct.__name__
    if operation == "get_weights_by_name":
        assert reply.parameter is None
    else:
        assert not reply.success
        assert reply.message.startswith(f"{operation} is refused")
