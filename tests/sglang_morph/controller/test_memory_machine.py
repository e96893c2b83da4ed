"""Random lives of requests, prefix cache and precision levels: no page is lost, doubled or handed
out while it belongs to weights, KV stays the same bytes, and weights come back bit for bit."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from memory_backends.base import FULL
from tests.sglang_morph.controller.small_system import (
    CONTEXT,
    NestedToyLayer,
    SmallSystem,
    ToyLayer,
)

# Few different tokens, so that prefixes are shared and radix nodes split.
tokens = st.lists(st.integers(1, 2), min_size=2, max_size=12)


class MemoryMachine(RuleBasedStateMachine):
    system: SmallSystem

    @initialize(layer_type=st.sampled_from([ToyLayer, NestedToyLayer]))
    def build(self, layer_type: type[ToyLayer]) -> None:
        self.system = SmallSystem(layer_type=layer_type)

    @rule(tokens=tokens)
    def admit(self, tokens: list[int]) -> None:
        if len(self.system.requests) < 8:
            self.system.admit(tokens)

    @precondition(lambda self: self.system.requests)
    @rule(data=st.data(), token=st.integers(1, 2))
    def decode(self, data: st.DataObject, token: int) -> None:
        req = data.draw(st.sampled_from(self.system.requests))
        if req.kv.kv_allocated_len < CONTEXT:
            self.system.decode(req, token)

    @precondition(lambda self: self.system.requests)
    @rule(data=st.data(), insert=st.booleans())
    def finish_or_abort(self, data: st.DataObject, insert: bool) -> None:
        self.system.finish(data.draw(st.sampled_from(self.system.requests)), insert)

    @rule(number=st.integers(1, 8))
    def evict(self, number: int) -> None:
        self.system.tree.evict(EvictParams(num_tokens=number))

    @precondition(lambda self: not self.system.requests)
    @rule()
    def flush(self) -> None:
        self.system.flush()

    @rule(level=st.integers(0, 4))
    def move(self, level: int) -> None:
        executor = self.system.executor
        level = min(level, self.system.top_level)
        if level == executor.target_level:
            return
        before = executor.target_level
        outcome = self.system.move(level)
        if level > before:
            assert outcome.result == "completed"
        elif outcome.result == "deferred":
            assert executor.target_level == before
        else:
            assert outcome.result == "started"

    @rule()
    def advance(self) -> None:
        self.system.advance()

    @invariant()
    def consistent(self) -> None:
        self.system.check()

    @invariant()
    def full_precision_at_level_0(self) -> None:
        if self.system.executor.level == 0:
            assert all(layer.variant == FULL for layer in self.system.layers)
            assert self.system.allocator.size == self.system.allocator.base_size

    def teardown(self) -> None:
        for req in list(self.system.requests):
            self.system.finish(req, insert=False)
        executor = self.system.executor
        if executor.target_level:
            assert self.system.move(0).result == "started"
        while executor.restoring:
            self.system.advance()
        self.system.check()
        assert executor.level == 0


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(
    max_examples=1000,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
