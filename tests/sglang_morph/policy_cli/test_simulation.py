"""The simulation: exact small cases, and what it conserves under random load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_morph.bench.traces import TraceRequest
from sglang_morph.policy_cli.simulation import Outcome, Simulation
from sglang_morph.policy_cli.spec import parse_spec
from tests.sglang_morph.policy_cli.small_server import small_profile

Load = list[tuple[float, int, int]]
"""(seconds since the one before, prompt tokens, output tokens)."""


def requests_of(load: Load) -> list[TraceRequest]:
    now, made = 0.0, []
    for gap, prompt, output in load:
        now += gap
        made.append(TraceRequest(now, prompt, output))
    return made


def make(policy: str, load: Load, **profile: int) -> Simulation:
    spec, server = parse_spec(policy), small_profile(**profile)
    level = spec.first_level(server.top_level)
    policy_made = spec.create(server.top_level)
    return Simulation(server, policy_made, requests_of(load), level=level, record_s=0.0)


def run(policy: str, load: Load, **profile: int) -> Outcome:
    return make(policy, load, **profile).run()


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    (served,) = run("full", [(2.0, 100, 11)]).served
    assert served.ttft_s == pytest.approx(0.1)
    assert served.tpot_s == pytest.approx(0.01)


def test_where_results_are_late_the_first_token_waits_for_the_next_step() -> None:
    (served,) = run("full", [(2.0, 100, 11)], results_late=True).served
    assert served.ttft_s == pytest.approx(0.1 + 0.01)
    assert served.tpot_s == pytest.approx(0.01)
    first, second = run("full", [(0.0, 100, 2), (0.05, 300, 2)], results_late=True).served
    assert first.ttft_s == pytest.approx(0.1 + 0.3), "the other's prefill is the next step"
    assert second.ttft_s == pytest.approx(0.05 + 0.3 + 0.01)


def test_a_single_output_token_needs_no_decode_step() -> None:
    outcome = run("full", [(0.0, 100, 1), (0.0, 100, 1)])
    assert [served.tpot_s for served in outcome.served] == [None, None]
    assert outcome.duration_s == pytest.approx(0.2)


def test_a_long_prompt_is_cut_in_chunks_which_others_wait_for() -> None:
    long, short = run(
        "full", [(0.0, 800, 2), (0.0, 100, 2)], chunk_tokens=300, base_pages=2000
    ).served
    assert long.ttft_s == pytest.approx(0.9)
    assert short.ttft_s == pytest.approx(0.9)


def test_admission_keeps_pages_free_for_what_runs() -> None:
    """The second one's 300 tokens exist, but the first will need some of them."""
    load: Load = [(0.0, 400, 400), (0.0, 300, 10)]
    first, second = sorted(run("full", load).served, key=lambda served: served.output_tokens)
    assert first.ttft_s > 1.0
    assert second.ttft_s == pytest.approx(0.4)


def test_too_long_a_prompt_is_rejected_and_too_long_an_answer_cut() -> None:
    outcome = run("full", [(0.0, 998, 5), (0.0, 500, 5000)])
    assert outcome.rejected == 1
    assert [served.output_tokens for served in outcome.served] == [498]


CROWD: Load = [(0.01, 30, 200)] * 30


def test_without_lending_a_crowd_is_retracted_and_still_answered() -> None:
    outcome = run("full", CROWD)
    assert outcome.retractions > 0
    assert len(outcome.served) == 30
    assert outcome.transitions == []


def test_lending_spares_retractions_and_shortens_the_wait() -> None:
    full, elastic = run("full", CROWD[:8]), run("threshold", CROWD[:8])
    assert (full.retractions > 0, elastic.retractions) == (True, 0)
    assert max(r.ttft_s for r in elastic.served) < max(r.ttft_s for r in full.served)
    assert elastic.transitions[-1].target == 0
    assert 0 < elastic.lowered_tokens < elastic.tokens
    assert elastic.seconds_at_level[0] > 0
    assert sum(elastic.seconds_at_level.values()) == pytest.approx(elastic.duration_s, abs=0.3)


def test_an_emergency_lowers_precision_in_place_of_a_retraction() -> None:
    """The policy itself would wait for long."""
    outcome = run("threshold:enter_hold_s=1000,min_dwell_s=1000", CROWD)
    assert outcome.retractions_avoided > 0
    assert outcome.transitions[0].emergency
    assert outcome.transitions[0].reason.startswith("the next decode step lacks")


def test_static_levels_stay() -> None:
    low = run("low", CROWD)
    assert low.lowered_tokens == low.tokens
    assert low.transitions == []
    assert max(point.capacity for point in low.timeline) == 2000


loads = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0.0, 0.01, 0.5]), st.floats(0, 5)),
        st.integers(1, 1100),
        st.integers(1, 400),
    ),
    min_size=1,
    max_size=50,
)
policies = st.sampled_from(
    [
        "full",
        "low",
        "threshold",
        "threshold:mode=performance",
        "threshold:min_dwell_s=0,enter_hold_s=0,leave_hold_s=0,max_transitions_per_minute=1000",
        "two_mode",
        "slo:quality_budget=0.1,quality_burst_s=1",
    ]
)


@given(policies, loads, st.sampled_from([1, 4, 64]), st.sampled_from([16, 512]))
@settings(max_examples=150, deadline=None)
def test_no_page_and_no_request_is_lost(
    policy: str, load: Load, max_running: int, chunk: int
) -> None:
    simulation = make(policy, load, max_running=max_running, chunk_tokens=chunk)
    outcome, before = simulation.outcome, -1.0
    pending = len(load)
    while simulation.advance():
        assert simulation.used == simulation.held
        assert 0 <= simulation.used <= simulation.capacity
        assert simulation.now >= before
        before = simulation.now
        done = len(outcome.served) + outcome.rejected + outcome.aborted
        assert done + simulation.in_flight <= pending
    assert (simulation.used, simulation.in_flight) == (0, 0)
    assert len(outcome.served) + outcome.rejected + outcome.aborted == pending
    assert outcome.aborted == 0
    assert all(served.ttft_s > 0 for served in outcome.served)
    assert policy == "low" or simulation.level == 0


@given(policies, loads)
@settings(max_examples=30, deadline=None)
def test_it_is_deterministic(policy: str, load: Load) -> None:
    assert run(policy, load) == run(policy, load)


@given(st.lists(st.tuples(st.floats(2, 30), st.integers(1, 300), st.integers(1, 100)), max_size=60))
@settings(max_examples=50, deadline=None)
def test_low_load_never_morphs(load: Load) -> None:
    """One request at a time, none larger than half the base pages."""
    for policy in ("threshold:mode=accuracy", "threshold", "two_mode", "slo"):
        outcome = run(policy, load) if load else Outcome(0)
        assert outcome.transitions == []
        assert outcome.lowered_tokens == 0


def test_the_monitor_saw_what_happened() -> None:
    simulation = make("threshold", CROWD)
    outcome = simulation.run()
    summary = simulation.monitor.summary()
    assert summary["requests_finished"] == len(outcome.served)
    assert summary["ticks"] == outcome.ticks
    assert summary["latest"]["arrived_tokens_total"] == 30 * 30
