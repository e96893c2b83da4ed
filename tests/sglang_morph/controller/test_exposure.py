"""Exposure is exact: every output token counts at the level its forward was launched at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_morph.controller.exposure import Exposure, StepLevels, add_exposures


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_any_range_of_steps_is_counted_by_level(levels: list[int], data: st.DataObject) -> None:
    steps = StepLevels()
    for level in levels:
        steps.launch(level)
    oldest = data.draw(st.integers(0, len(levels)))
    steps.forget_before(oldest)
    first = data.draw(st.integers(oldest, len(levels)))
    number = data.draw(st.integers(0, len(levels) - first))
    counts: Counter[int] = Counter()
    steps.add_to(counts, first, number)
    assert counts == Counter(levels[first : first + number])


def test_only_runs_of_equal_level_are_kept() -> None:
    steps = StepLevels()
    changes = [steps.launch(level) for level in [0] * 500 + [2] * 500 + [0] * 500]
    assert sum(changes) == 2
    assert len(steps._starts) == 3
    steps.forget_before(1200)
    assert len(steps._starts) == 1


@dataclass
class Request:
    """`truth`: the level of each output token, in order."""

    exposure: Exposure = field(default_factory=Exposure)
    truth: list[int] = field(default_factory=list)
    prefilled: Counter[int] = field(default_factory=Counter)
    chunks_left: int = 0
    ended: bool = False


class Loop:
    """SGLang's event loop as far as tokens go; with overlap, results come one launch late."""

    def __init__(self, overlap: bool) -> None:
        self.steps = StepLevels()
        self.running: list[Request] = []
        self.prefilling: Request | None = None
        self.lag = 1 if overlap else 0
        self.results: list[tuple[list[Request], int, bool]] = []

    def prefill(self, req: Request, level: int, tokens: int, decode_too: bool) -> None:
        decoding = list(self.running) if decode_too else []
        if decoding:  # a mixed batch
            self.decode_launch(decoding, level)
        req.exposure.prefill(level, tokens, self.steps.steps, len(req.truth))
        req.prefilled[level] += tokens
        last = req.chunks_left == 0
        req.chunks_left -= 1
        self.results.append(([*([req] if last else []), *decoding], level, True))
        self.settle()
        if last:
            self.running.append(req)
            self.prefilling = None

    def decode(self, level: int) -> None:
        if self.running:
            batch = list(self.running)
            self.decode_launch(batch, level)
            self.results.append((batch, level, False))
            self.settle()

    def decode_launch(self, batch: list[Request], level: int) -> None:
        if self.steps.launch(level):
            self.steps.forget_before(min(r.exposure.first_step for r in batch))

    def settle(self) -> None:
        while len(self.results) > self.lag:
            batch, level, _ = self.results.pop(0)
            for req in batch:
                if not req.ended and req in [*self.running, self.prefilling]:
                    req.truth.append(level)

    def leave(self, req: Request) -> None:
        """It ends or is retracted: results still on their way are thrown away."""
        self.running.remove(req)
        self.results = [
            ([r for r in batch if r is not req], level, mixed)
            for batch, level, mixed in self.results
        ]
        req.exposure.leave(self.steps, len(req.truth))
        req.exposure.leave(self.steps, len(req.truth))


ACTIONS = st.tuples(
    st.sampled_from(["prefill", "prefill", "decode", "decode", "decode", "retract", "end"]),
    st.integers(0, 2),
    st.integers(0, 7),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.lists(ACTIONS, max_size=60))
def test_exposure_equals_what_every_token_was_computed_at(
    overlap: bool, actions: list[tuple[str, int, int, bool]]
) -> None:
    loop, waiting, everyone = Loop(overlap), list[Request](), list[Request]()
    for action, level, number, mixed in actions:
        if action == "prefill":
            if loop.prefilling is None:
                if not waiting:
                    waiting.append(Request())
                    everyone.append(waiting[-1])
                loop.prefilling = waiting.pop(0)
                loop.prefilling.chunks_left = number % 3
            loop.prefill(loop.prefilling, level, number + 1, mixed)
        elif action == "decode":
            loop.decode(level)
        elif loop.running:
            req = loop.running[number % len(loop.running)]
            loop.leave(req)
            if action == "retract":
                waiting.append(req)
            else:
                req.ended = True
    for req in list(loop.running):
        loop.leave(req)
    for req in everyone:
        assert req.exposure.generated == Counter(req.truth)
        assert req.exposure.prefilled == req.prefilled
        met = [level for level, tokens in (+req.exposure.generated).items() if tokens]
        assert req.exposure.lowest_level() == max([*met, *req.prefilled], default=0)


def test_output_thrown_away_in_a_retraction_does_not_count() -> None:
    steps, exposure = StepLevels(), Exposure()
    exposure.prefill(2, 10, steps.steps, 0)
    steps.launch(2)
    exposure.leave(steps, 2)
    exposure.prefill(0, 10, steps.steps, 0)
    exposure.leave(steps, 1)
    assert exposure.values() == {
        "generated_tokens": {"0": 1},
        "prefilled_tokens": {"0": 10, "2": 10},
        "reused_lowered_tokens": 0,
    }


def test_the_choices_of_a_response_add_up() -> None:
    one = Exposure()
    one.prefill(1, 4, 0, 0)
    one.leave(StepLevels(), 1)
    two = Exposure()
    two.prefill(0, 3, 0, 0)
    two.reused_lowered = 5
    assert add_exposures([one.values(), two.values()]) == {
        "generated_tokens": {"1": 1},
        "prefilled_tokens": {"0": 3, "1": 4},
        "reused_lowered_tokens": 5,
    }


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_request_that_never_ran_has_no_exposure(tokens: int) -> None:
    exposure = Exposure()
    exposure.leave(StepLevels(), tokens)
    assert not exposure.generated
