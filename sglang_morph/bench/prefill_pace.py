"""How fast a server computed the prompts that met no other: what the machine itself gave a turn.

Of an arm at one precision that hardly depends on the trace (on one H200 it stayed within 8% over
six windows of two traces). Where it differs between turns, other work was on the machine; of a GPU
also on its host, which launches the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_morph.bench.outcome import Outcome
from sglang_morph.bench.statistics import percentile

FASTEST_PERCENT = 10.0
FEWEST = 10
"""Prompts; of fewer one says nothing."""
_REUSED = 0.05
"""Share of a prompt that may come from the cache: the first tokens of all texts are alike."""


def prefill_pace_s(outcomes: Sequence[Outcome], level: int) -> float | None:
    """Seconds a prompt token from the queue to the first output token, in the fastest tenth.

    Of prompts at least a quarter as long as the longest, computed whole and, where the server
    tells levels, at precision level `level`. None where there are too few, or no queue times.
    """
    longest = max((o.prompt_tokens for o in outcomes), default=0)
    paces = [
        (o.ttft_s - o.queue_s) / o.prompt_tokens
        for o in outcomes
        if o.ttft_s is not None
        and o.queue_s is not None
        and 4 * o.prompt_tokens >= longest > 0
        and _computed_once_at(o, level)
    ]
    return percentile(paces, FASTEST_PERCENT) if len(paces) >= FEWEST else None


def _computed_once_at(outcome: Outcome, level: int) -> bool:
    by_level = outcome.prefilled_by_level
    at_level = by_level is None or sum(by_level) == sum(by_level[level : level + 1])
    reused = outcome.cached_tokens > _REUSED * outcome.prompt_tokens
    return at_level and not reused and outcome.retractions == 0
