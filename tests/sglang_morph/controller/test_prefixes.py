"""Prefix policies on SGLang's radix cache: what is found, dropped, and left to who uses it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_morph.controller.prefixes import PrefixPolicy, create_prefix_policy, keep_chunk
from tests.sglang_morph.controller.small_system import SmallSystem

STORY = list(range(3, 13))


class System(SmallSystem):
    """A small system at a level that is only said, with a prefix policy."""

    def __init__(self, policy: str, base: int = 60) -> None:
        super().__init__(base=base)
        self.level = 0
        self.scheduler = SimpleNamespace(
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.req_to_token,
            running_batch=SimpleNamespace(reqs=self.requests),
            last_batch=None,
            chunked_req=None,
            waiting_queue=[],
        )
        self.prefixes: PrefixPolicy = create_prefix_policy(
            policy, self.scheduler, self, self.pool.page_levels
        )

    def go_to(self, level: int) -> None:
        self.level = level
        self.prefixes.follow()

    def run(self, tokens: list[int], decode: int = 0) -> Any:
        """A request from queue to decoding; its pages get the level."""
        req = self.admit(tokens)
        assert req is not None
        row = self.req_to_token.req_to_token[req.req_pool_idx, : len(tokens)]
        self.pool.page_levels.computed(row[self.shared(req) :], self.level)
        for token in range(decode):
            self.extend(req, token + 1)
        return req

    def shared(self, req: Any) -> int:
        return req.extend_range.start

    def extend(self, req: Any, token: int) -> None:
        assert self.decode(req, token)
        last = self.req_to_token.req_to_token[req.req_pool_idx, req.kv.kv_allocated_len - 1]
        self.pool.page_levels.computed(last.reshape(1), self.level)

    def end(self, req: Any) -> None:
        """As SGLang's `release_kv_cache` does."""
        self.finish(req, insert=not req.skip_radix_cache_insert)
        self.prefixes.follow()

    def cached(self, tokens: list[int], key: str | None = None) -> int:
        found = self.tree.match_prefix(
            MatchPrefixParams(key=RadixKey(array("q", tokens), extra_key=key))
        )
        return len(found.device_indices)

    def lowered(self, tokens: list[int]) -> int:
        found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        return int(self.pool.page_levels.lowered(found.device_indices).sum())


def test_shared_prefixes_survive_every_level() -> None:
    system = System("share")
    system.go_to(2)
    system.end(system.run(STORY))
    system.go_to(0)
    assert system.cached(STORY) == system.lowered(STORY) == len(STORY)
    assert system.prefixes.status() == {"policy": "share", "dropped_tokens": 0}


def test_refresh_drops_what_was_computed_lower_and_keeps_the_rest() -> None:
    system = System("refresh")
    system.end(system.run(STORY[:4]))
    system.end(system.run([20, 21, 22]))
    system.go_to(2)
    system.end(system.run(STORY))
    system.end(system.run([*STORY[:6], 30, 31]))
    system.go_to(1)
    assert system.cached(STORY) == len(STORY)
    system.go_to(0)
    assert system.cached(STORY) == 4
    assert system.cached([20, 21, 22]) == 3
    assert system.prefixes.dropped_tokens == len(STORY) - 4 + 2
    system.check()


def test_refresh_splits_a_node_that_is_lowered_at_its_end() -> None:
    system = System("refresh")
    req = system.run(STORY[:4])
    system.go_to(2)
    for token in (7, 8, 9):
        system.extend(req, token)
    system.end(req)
    system.go_to(0)
    assert system.cached([*STORY[:4], 7, 8, 9]) == 4
    system.check()


def test_refresh_hides_what_is_in_use_and_drops_it_after() -> None:
    system = System("refresh")
    system.go_to(2)
    req = system.run(STORY, decode=2)
    system.go_to(0)
    assert system.cached(STORY) == 0
    assert system.prefixes.status()["nodes_in_use"] == 1
    assert system.allocator.available_size() + len(STORY) + 2 == system.allocator.size
    system.check()  # the KV it runs on is untouched

    other = system.run(STORY)  # computes its own, at full precision
    assert system.cached(STORY) == len(STORY)
    assert system.lowered(STORY) == 0
    system.extend(req, 9)
    system.end(req)
    assert system.prefixes.status()["nodes_in_use"] == 0
    assert system.cached(STORY) == len(STORY)
    assert system.lowered(STORY) == 0
    system.end(other)
    system.check()


def test_refresh_forgets_hidden_prefixes_that_a_flush_has_freed() -> None:
    system = System("refresh")
    system.go_to(2)
    req = system.run(STORY)
    system.go_to(0)
    system.finish(req, insert=False)
    system.flush()  # before the next step
    system.go_to(0)
    assert system.prefixes.status()["nodes_in_use"] == 0
    system.check()


def test_refresh_leaves_hidden_prefixes_to_sglangs_eviction() -> None:
    system = System("refresh", base=24)
    system.go_to(2)
    req = system.run(STORY)
    system.go_to(0)
    system.finish(req, insert=False)
    assert system.admit(list(range(40, 60)))  # needs nearly all pages, in the same step
    system.go_to(0)
    system.check()


def test_a_chunk_left_out_is_where_the_next_one_goes_on() -> None:
    system = System("namespace")
    req = system.run(STORY)
    system.scheduler.chunked_req = req
    system.go_to(2)
    assert req.skip_radix_cache_insert
    req.prefix_indices = req.prefix_indices[:3]
    keep_chunk(req, system.tree)
    row = system.req_to_token.req_to_token[req.req_pool_idx, : len(STORY)]
    assert req.prefix_indices.tolist() == row.tolist()
    assert req.prefix_indices.dtype == torch.int64


def test_namespaces_keep_levels_apart() -> None:
    system = System("namespace")
    waiting = SimpleNamespace(extra_key="salt", skip_radix_cache_insert=False)
    plain = SimpleNamespace(extra_key=None, skip_radix_cache_insert=True)
    for req in (waiting, plain):
        system.scheduler.waiting_queue.append(req)
        system.prefixes.queued(req)
    assert (waiting.extra_key, plain.extra_key) == ("salt", None)
    assert not plain.skip_radix_cache_insert  # retracted: it starts anew

    seen = {None, "salt"}
    for level in (1, 2):
        system.go_to(level)
        assert seen.isdisjoint({waiting.extra_key, plain.extra_key})
        assert waiting.extra_key.startswith("salt|")
        seen |= {waiting.extra_key, plain.extra_key}
    system.prefixes.queued(waiting)  # once more, after a retraction
    assert waiting.extra_key in seen
    system.go_to(0)
    assert (waiting.extra_key, plain.extra_key) == ("salt", None)


def test_a_request_under_which_the_level_changes_caches_nothing_more() -> None:
    system = System("namespace")
    req = system.run(STORY)
    system.go_to(2)
    system.extend(req, 7)
    system.end(req)
    assert system.cached([*STORY, 7]) == len(STORY)  # what it had put there before
    assert system.lowered([*STORY, 7]) == 0
    system.check()


def test_a_chunked_request_and_a_prefill_not_merged_yet_are_running_too() -> None:
    system = System("namespace")
    running, prefilled, chunked = (system.run([t] * 5) for t in (20, 21, 22))
    system.scheduler.running_batch.reqs = [running]
    system.scheduler.last_batch = SimpleNamespace(reqs=[prefilled])
    system.scheduler.chunked_req = chunked
    system.go_to(1)
    assert all(r.skip_radix_cache_insert for r in (running, prefilled, chunked))


tokens = st.lists(st.integers(1, 2), min_size=2, max_size=10)
ACTIONS = st.one_of(
    st.tuples(st.just("run"), tokens, st.integers(0, 3)),
    st.tuples(st.just("end"), st.just([1, 1]), st.integers(0, 7)),
    st.tuples(st.just("go_to"), st.just([1, 1]), st.sampled_from([0, 0, 1, 2])),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=30))
def test_after_a_refresh_nothing_lowered_can_be_found(
    actions: list[tuple[str, list[int], int]],
) -> None:
    system = System("refresh", base=200)
    for action, words, number in actions:
        if action == "go_to":
            system.go_to(number)
        elif action == "end" and system.requests:
            system.end(system.requests[number % len(system.requests)])
        elif action == "run" and len(system.requests) < 8:
            system.run(words, decode=number)
        system.check()
        if system.level == 0:
            for req in system.requests:
                assert system.lowered([*req.origin_input_ids, *req.output_ids]) == 0
            assert system.lowered([1] * 10) == system.lowered([2] * 10) == 0
    for req in list(system.requests):
        system.end(req)
    system.check()
