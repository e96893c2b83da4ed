"""Requests followed through batches as SGLang builds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_morph.controller.exposure import Exposure
from sglang_morph.controller.request_exposure import SETTLE_STEPS, RequestExposure
from tests.sglang_morph.controller.small_system import SmallSystem


class Followed:
    """Requests of a small system whose level is only said."""

    def __init__(self) -> None:
        self.system = SmallSystem(base=60)
        self.level = 0
        self.ended: list[Any] = []
        self.following = RequestExposure(
            lambda: self.level, self.system.pool.page_levels, self.system.allocator, self._ended
        )

    def _ended(self, req: Any, exposure: Exposure) -> None:
        self.ended.append((req, exposure))

    def prefill(self, req: Any, start: int, stop: int, decoding: list[Any] | None = None) -> None:
        self.following.launched(
            SimpleNamespace(
                forward_mode=ForwardMode.MIXED if decoding else ForwardMode.EXTEND,
                reqs=[req, *(decoding or [])],
                decoding_reqs=decoding,
                prefix_lens=[start, *[9 for _ in decoding or []]],
                extend_lens=[stop - start, *[1 for _ in decoding or []]],
                out_cache_loc=torch.arange(start + 1, stop + 1),
            )
        )

    def decode(self, *reqs: Any) -> None:
        self.following.launched(
            SimpleNamespace(
                forward_mode=ForwardMode.DECODE,
                reqs=list(reqs),
                decoding_reqs=None,
                out_cache_loc=torch.arange(40, 40 + len(reqs)),
            )
        )


class Req(SimpleNamespace):
    def __init__(self, cached: int = 0) -> None:
        super().__init__(
            prefix_indices=torch.arange(1, cached + 1),
            output_ids=[],
            finished_len=None,
            customized_info=None,
            done=False,
        )

    def finished(self) -> bool:
        return self.done


def test_an_answer_carries_its_exposure_at_its_last_token() -> None:
    followed, req = Followed(), Req()
    followed.prefill(req, 0, 6)
    followed.decode(req)
    followed.level = 2
    followed.decode(req)
    followed.decode(req)  # launched before the end was known
    req.output_ids, req.finished_len, req.done = [5, 6, 7], 3, True
    followed.following.released(req)
    told = {
        "generated_tokens": {"0": 2, "2": 1},
        "prefilled_tokens": {"0": 6},
        "reused_lowered_tokens": 0,
    }
    assert req.customized_info == {"morph": [None, None, told]}
    assert [item[0] for item in followed.ended] == [req]
    assert followed.following.totals() == {**told, "lowered_pages_tracked": True}


def test_other_values_of_a_request_stay() -> None:
    followed, req = Followed(), Req()
    followed.prefill(req, 0, 6)
    req.output_ids, req.done, req.customized_info = [5], True, {"entropy": [0.5]}
    followed.following.released(req)
    assert req.customized_info["entropy"] == [0.5]
    assert len(req.customized_info["morph"]) == 1


def test_a_retracted_request_is_not_answered_yet() -> None:
    followed, req = Followed(), Req()
    followed.prefill(req, 0, 6)
    followed.decode(req)
    req.output_ids = [5]  # the decode step's token is thrown away
    followed.following.released(req)
    assert req.customized_info is None and not followed.ended
    followed.level = 1
    followed.prefill(req, 0, 7)
    req.output_ids, req.done = [5, 6], True
    followed.following.released(req)
    assert req.customized_info["morph"][-1]["generated_tokens"] == {"0": 1, "1": 1}
    assert req.customized_info["morph"][-1]["prefilled_tokens"] == {"0": 6, "1": 7}


def test_a_request_that_was_never_launched_has_nothing_to_tell() -> None:
    followed, req = Followed(), Req()
    req.done = True
    followed.following.released(req)
    assert req.customized_info is None and not followed.ended


def test_reused_tokens_of_lower_precision_are_counted_once() -> None:
    followed, first = Followed(), Req()
    followed.prefill(first, 0, 3)
    followed.level = 1
    followed.prefill(first, 3, 8)
    followed.level = 0
    second = Req(cached=8)  # pages 1 to 8
    followed.prefill(second, 8, 12)
    second.prefix_indices = torch.arange(1, 13)
    followed.prefill(second, 12, 20)  # its second chunk reuses its own first
    second.output_ids, second.done = [5], True
    followed.following.released(second)
    assert second.customized_info["morph"][-1]["reused_lowered_tokens"] == 5
    assert followed.following.totals()["reused_lowered_tokens"] == 5


def test_a_mixed_batch_is_a_decode_step_for_those_that_decode() -> None:
    followed, old, new = Followed(), Req(), Req()
    followed.prefill(old, 0, 6)
    followed.level = 3
    followed.prefill(new, 0, 4, decoding=[old])
    followed.level = 0
    followed.decode(old, new)
    for req, tokens in ((old, [1, 2, 3]), (new, [1, 2])):
        req.output_ids, req.done = tokens, True
        followed.following.released(req)
    assert old.customized_info["morph"][-1]["generated_tokens"] == {"0": 2, "3": 1}
    assert new.customized_info["morph"][-1]["generated_tokens"] == {"0": 1, "3": 1}
    assert old.customized_info["morph"][-1]["prefilled_tokens"] == {"0": 6}
    assert new.customized_info["morph"][-1]["prefilled_tokens"] == {"3": 4}


def test_pages_are_watched_until_none_in_use_is_lowered() -> None:
    followed, req = Followed(), Req()
    levels = followed.system.pool.page_levels
    taken = followed.system.allocator.alloc(20)
    followed.prefill(req, 0, 6)
    assert not levels.any
    followed.level = 2
    followed.decode(req)
    followed.level = 0
    assert levels.any
    for _ in range(3 * SETTLE_STEPS):
        followed.decode(req)
    assert not levels.any  # the page was written anew at level 0
    followed.level = 1
    followed.prefill(req, 0, 6)
    followed.level = 0
    for _ in range(3 * SETTLE_STEPS):
        followed.decode(req)
    assert levels.any  # pages 1 to 6 are in use and lowered
    followed.system.allocator.free(taken)
    for _ in range(3 * SETTLE_STEPS):
        followed.decode(req)
    assert not levels.any


@pytest.mark.parametrize("mode", [ForwardMode.IDLE, ForwardMode.PREBUILT])
def test_batches_that_compute_nothing_do_not_count(mode: ForwardMode) -> None:
    followed = Followed()
    followed.level = 1
    followed.following.launched(SimpleNamespace(forward_mode=mode, out_cache_loc=None))
    assert not followed.system.pool.page_levels.any
