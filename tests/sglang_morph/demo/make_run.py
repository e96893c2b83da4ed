"""Builds `ArmRun`s for the tests of report and timeline."""

from pathlib import Path

from sglang_morph.demo.arm import ArmRun, ArmSetup, WeightsCheck
from sglang_morph.demo.client import RequestResult
from sglang_morph.demo.samples import Sample

STARTED = 1_700_000_000.0
BASE = 1000


def result(index, ttft_s=1.0, tokens=5, error=None):
    """A request sent at second `index` that got a token every 0.1 s."""
    return RequestResult(
        index=index,
        phase="burst",
        sent_s=float(index),
        wanted_tokens=5,
        prompt_tokens=20,
        output_tokens=tokens,
        first_token_s=index + ttft_s,
        end_s=index + ttft_s + 0.1 * (tokens - 1),
        gaps_s=[0.1] * (tokens - 1),
        error=error,
    )


def sample(second, level=0, lent=0, used=100, waiting=0):
    return Sample(
        time=STARTED + second,
        used=used,
        cached=50,
        free=BASE + lent - used - 50,
        running=3,
        waiting=waiting,
        level=level,
        full_bytes=4_000_000 - 1_000_000 * level,
        lowered_bytes=250_000 * level,
    )


def make_run(backend, samples, results=None, retractions=0, weights=None, transitions=()):
    return ArmRun(
        setup=ArmSetup(backend, Path("model"), BASE, Path("out")),
        started=STARTED,
        wall_s=9.0,
        results=[result(i, ttft_s=1.0 + i) for i in range(3)] if results is None else results,
        samples=samples,
        retractions=retractions,
        transitions=list(transitions),
        weights=weights,
    )


def static_run(**changes):
    return make_run("static", [sample(0), sample(1, used=900, waiting=4), sample(2)], **changes)


def morph_run(**changes):
    samples = [
        sample(0),
        sample(1, level=2, lent=500, used=1200),
        sample(2, level=1, lent=200),
        sample(3),
    ]
    changes = {
        "samples": samples,
        "weights": WeightsCheck("abc", "abc", 0),
        "transitions": [{"from": 0, "to": 2}, {"from": 2, "to": 0}],
    } | changes
    return make_run("layer_swap", **changes)
