"""The check of the simulation against a run of the demo, on a run the simulation itself made."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.simulation_error import POLICIES, compare, requests_of, simulate
from sglang_morph.bench.traces import TraceRequest
from sglang_morph.policy_cli.profile import load_profile
from sglang_morph.policy_cli.tables import Slo, summarize

BURST = [TraceRequest(0.2 * i, 60 + 5 * i, 40 + i) for i in range(30)]


def results(slower: float) -> dict[str, Any]:
    """As the demo writes them; times to first token `slower` times as long as simulated."""
    profile, arms = load_profile("smollm2-cpu"), []
    for backend, policy in POLICIES.items():
        found = summarize(policy, simulate(profile, policy, BURST), Slo(2.0))
        summary = {
            **asdict(found),
            "backend": backend,
            "ttft_p50": found.ttft_p50_s * slower,
            "ttft_p95": found.ttft_p95_s * slower,
        }
        rows = [
            {
                "sent_s": r.at_s,
                "prompt_tokens": r.input_tokens,
                "output_tokens": r.output_tokens,
                "ok": True,
            }
            for r in reversed(BURST)
        ]
        arms.append({"summary": summary, "requests": rows})
    return {"arms": arms}


@pytest.mark.parametrize(("slower", "error"), [(1.0, 0.0), (1.25, 20.0)])
def test_the_error_is_relative_to_what_was_measured(slower: float, error: float) -> None:
    _, found = compare(results(slower), load_profile("smollm2-cpu"))
    assert found == pytest.approx(error, abs=0.01)


def test_a_run_with_failures_is_refused() -> None:
    arm = results(1.0)["arms"][0]
    arm["requests"][3]["ok"] = False
    with pytest.raises(ValueError, match="failed"):
        requests_of(arm)
