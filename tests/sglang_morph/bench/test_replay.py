import pytest

from sglang_morph.bench.replay import replay, run_loop
from sglang_morph.bench.routes import make_route
from sglang_morph.bench.workload import PlannedRequest, Workload
from tests.sglang_morph.bench.stub_server import REFUSED, SILENT


def workload(*requests):
    return Workload("w", list(requests), 1.0, {})


def ask(at_s=0.0, first=5, tokens=4):
    return PlannedRequest(at_s, [first, 6, 7], tokens)


@pytest.mark.parametrize("route", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_answers_are_timed_token_by_token(stub_server, route):
    url = stub_server("--tbt", "0.05")
    replayed = run_loop(replay(url, make_route(route, "m"), workload(ask(), ask(0.1)), 10.0))
    for outcome in replayed.outcomes:
        assert outcome.ok, outcome.error
        assert outcome.prompt_tokens == 3
        assert len(outcome.arrivals_s) == 4
        assert 0.04 < outcome.ttft_s < 0.5
        assert outcome.text.split() == [outcome.text.split()[0]] * 4
    assert 0.3 <= replayed.duration_s < 2.0


def test_arrivals_do_not_wait_for_answers(stub_server):
    url = stub_server("--tbt", "0.1", "--slots", "1")
    requests = [ask(0.05 * i) for i in range(4)]
    outcomes = run_loop(replay(url, make_route("sglang", ""), workload(*requests), 10.0)).outcomes
    assert all(outcome.lateness_s < 0.1 for outcome in outcomes)
    assert outcomes[-1].sent_s < outcomes[0].arrivals_s[-1]
    # The last waits for three answers of 0.4 s, and its queue time says so.
    assert outcomes[-1].queue_s > 0.8
    assert outcomes[-1].ttft_s > 0.9


def test_failures_are_outcomes_with_their_reason(stub_server):
    url = stub_server()
    asked = workload(ask(first=REFUSED), ask(first=SILENT), ask())
    refused, silent, good = run_loop(replay(url, make_route("sglang", ""), asked, 1.0)).outcomes
    assert "HTTP 503" in refused.error and not refused.ok
    assert "given up" in silent.error and silent.ttft_s is None
    assert good.ok


def test_a_server_that_is_not_there_fails_every_request():
    route = make_route("sglang", "")
    outcomes = run_loop(replay("http://127.0.0.1:9", route, workload(ask(), ask()), 5.0)).outcomes
    assert all(not outcome.ok and "Connect" in outcome.error for outcome in outcomes)
