"""The threshold policy on a real server: a burst lowers precision in time, calm restores it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sglang_morph.observability.event_log import read_events
from tests.server.conftest import BASE_TOKENS, Serve


def test_a_burst_is_served_without_retraction_and_weights_come_back(
    serve: Serve, tmp_path: Path
) -> None:
    log = tmp_path / "events.jsonl"
    flags = ("--memory-backend", "layer_swap", "--enable-metrics", "--morph-event-log", str(log))
    flags += ("--morph-prefix-policy", "namespace")
    with serve("sglang_morph.launch_server", *flags) as client:
        before = client.verify()
        with ThreadPoolExecutor(24) as pool:
            answers = [future.result() for future in client.start(pool, 24, tokens=100)]
        assert [len(answer["output_ids"]) for answer in answers] == [100] * 24
        told = [answer["meta_info"]["morph"] for answer in answers]
        assert all(sum(exposure["generated_tokens"].values()) == 100 for exposure in told)
        assert any(int(level) for exposure in told for level in exposure["generated_tokens"])
        status = client.wait_level(0)
        assert client.verify() == before
        client.check_alive()

    assert status["capacity_tokens"] == BASE_TOKENS
    assert status["monitor"]["peak_capacity_pages"] > BASE_TOKENS
    assert status["monitor"]["latest"]["retractions_total"] == 0
    rows = read_events(log)
    moves = [(row["from"], row["to"]) for row in rows if row["kind"] == "decision"]
    assert moves[0][0] == 0 and moves[-1][1] == 0
    assert all(row["reason"] for row in rows if row["kind"] == "transition")
    seen = {row["level"] for row in rows if row["kind"] == "signals"}
    assert max(seen) >= 1
    assert rows[0]["kind"] == "start"
