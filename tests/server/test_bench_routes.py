"""The replayer's three routes against a real server: prompts and answers of exactly the lengths."""

from __future__ import annotations

import pytest

from sglang_morph.bench.replay import replay, run_loop
from sglang_morph.bench.routes import RouteName, make_route
from sglang_morph.bench.workload import PlannedRequest, Workload
from tests.server.client import Client

pytestmark = pytest.mark.server


@pytest.mark.parametrize("name", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_prompts_and_answers_have_exactly_the_lengths(manual: Client, name: RouteName) -> None:
    lengths = [(20, 6), (45, 9)]
    asked = [
        PlannedRequest(0.1 * i, list(range(100 + i, 100 + i + prompt)), output)
        for i, (prompt, output) in enumerate(lengths)
    ]
    workload = Workload("w", asked, 1.0, {})
    outcomes = run_loop(replay(manual.url, make_route(name, "default"), workload, 60.0)).outcomes
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [(o.prompt_tokens, o.output_tokens) for o in outcomes] == lengths
    assert all(outcome.text for outcome in outcomes)
    assert all((outcome.queue_s is not None) == (name == "sglang") for outcome in outcomes)
