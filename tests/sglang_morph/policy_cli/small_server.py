"""A small server to simulate, and specs for it."""

from __future__ import annotations

from sglang_morph.policy_cli.profile import SCHEMA_VERSION, Curve, LevelProfile, ServerProfile


def small_profile(
    base_pages: int = 1000,
    max_running: int = 64,
    chunk_tokens: int = 512,
    results_late: bool = False,
) -> ServerProfile:
    """1 ms a prefill token, 10 ms a decode step; every level lends half the base more."""
    return ServerProfile(
        schema_version=SCHEMA_VERSION,
        name="small",
        source="made up for tests",
        hardware="none",
        model="none",
        base_pages=base_pages,
        max_running=max_running,
        chunk_tokens=chunk_tokens,
        request_overhead_s=0.0,
        levels=[
            LevelProfile(
                name=f"level {level}",
                lent_pages=level * base_pages // 2,
                prefill=Curve([1, 1000], [0.001, 1.0]),
                decode=Curve([1, 64], [0.01, 0.01]),
                lower_s=0.1 * level,
                restore_s=0.2 * level,
            )
            for level in range(3)
        ],
        results_late=results_late,
    )
