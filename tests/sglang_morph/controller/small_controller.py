"""A controller over a small system."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_morph.controller.controller import Controller
from sglang_morph.controller.eviction_cost import EvictionCost, EvictionParameters
from sglang_morph.controller.monitor import Monitor
from sglang_morph.controller.policy import Policy
from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.observability.event_log import EventLog
from tests.sglang_morph.controller.small_system import SmallSystem


class SchedulerFields:
    """The fields of SGLang's scheduler that the controller reads."""

    def __init__(self, system: SmallSystem) -> None:
        self.token_to_kv_pool_allocator = system.allocator
        self.tree_cache = system.tree
        self.req_to_token_pool = system.req_to_token
        self.running_batch = SimpleNamespace(reqs=system.requests, batch_is_full=False)
        self.last_batch = None
        self.chunked_req = None
        self.waiting_queue: list[Any] = []
        self.new_token_ratio_tracker = SimpleNamespace(current=0.5)


def controller(system: SmallSystem, policy: type[Policy]) -> Controller:
    return Controller(
        SchedulerFields(system),
        system.executor,
        policy(PolicyOptions(), system.top_level),
        system.backend,
        EventLog(None, 1.0),
        None,
        Monitor(),
        EvictionCost(EvictionParameters(), prefill_tokens=64),
    )
