"""Evict cached prefixes, or lower precision and keep them: the cheaper one.

SGLang evicts as soon as a prefill or a decode step lacks pages. An evicted prefix that is wanted
again is computed anew; pages lent in its place make every token computed meanwhile less precise.
Both are counted in *tokens computed*, so the only price is that of precision.

Estimates, all in constant time and none by walking the cache:

- **Reuse.** Every finished request tells how many of its tokens came from the cache (R) and how
  many it stored there (S). If a cached token is used again with probability p each time, it is
  used p / (1 - p) = R / S times, so p = R / (R + S). The least recently used tokens, which go
  first, fare worse than the average: `victim_reuse` says by how much.
- **What the dwell computes.** The rate at which requests store tokens, over the expected dwell,
  and at least what the coming step computes. That is also what would be evicted in that time, as
  far as the pages gained cover it: in a full cache every new token takes an old one's place.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from sglang_morph.controller.policy_options import flag
from sglang_morph.controller.rates import RateWindow
from sglang_morph.controller.signals import Signals

MEMORY_REQUESTS = 200
"""Finished requests after which an observation counts 1/e."""
FEWEST_REQUESTS = 20
"""Finished requests below which nothing is known of reuse, so none is assumed."""
RATE_WINDOW_S = 30.0
"""Requests store their tokens when they finish, in lumps."""


@dataclass(frozen=True, slots=True)
class EvictionParameters:
    """With the defaults eviction wins unless more than 80% of all tokens come from the cache."""

    eviction_quality_price: float = 0.4
    """Computed tokens that one token at a lower level is worth. From `victim_reuse` on eviction
    always wins."""
    eviction_victim_reuse: float = 0.5
    """Reuse of the prefixes evicted next, over that of the average one, 0 to 1."""
    eviction_dwell_s: float = 10.0
    """Seconds for which precision is expected to stay low."""
    eviction_min_pressure: float = 0.75
    """Pages in use over base pages below which prefixes are evicted without asking: a policy would
    soon restore precision, and the restore evict them all the same."""

    @classmethod
    def of(cls, options: object) -> EvictionParameters:
        """The fields that `options` has. Raises ValueError for one out of range."""
        given = {n: getattr(options, n) for n in cls.__slots__ if hasattr(options, n)}
        parameters = cls(**given)
        parameters.check()
        return parameters

    def check(self) -> None:
        """Raises ValueError, naming the flag, for a value out of range."""
        for name in ("eviction_quality_price", "eviction_min_pressure"):
            value = getattr(self, name)
            if not 0 <= value < inf:
                raise ValueError(f"{flag(name)} is {value}: give a number, 0 or more")
        if not 0 <= self.eviction_victim_reuse <= 1:
            raise ValueError(
                f"{flag('eviction_victim_reuse')} is {self.eviction_victim_reuse}: "
                "give a fraction, 0 to 1"
            )
        if not 0 < self.eviction_dwell_s < inf:
            raise ValueError(
                f"{flag('eviction_dwell_s')} is {self.eviction_dwell_s}: give seconds above 0"
            )


class PrefixReuse:
    """How often cached tokens are used again, from the requests that finished lately."""

    def __init__(self) -> None:
        self.stored_tokens = 0
        """By all requests since the start."""
        self._requests = 0
        self._reused = 0.0
        self._stored = 0.0

    @property
    def probability(self) -> float:
        """That a cached token is used once more; 0 while too little is known."""
        used = self._reused + self._stored
        return self._reused / used if self._requests >= FEWEST_REQUESTS and used else 0.0

    def finished(self, reused: int, stored: int) -> None:
        """A request took `reused` tokens from the cache and computed `stored` others."""
        keep = 1 - 1 / MEMORY_REQUESTS
        self._reused = self._reused * keep + reused
        self._stored = self._stored * keep + stored
        self._requests += 1
        self.stored_tokens += stored


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the coming step would evict, and what either way out costs, in computed tokens."""

    pages: int
    level: int
    """The one that precision would fall to."""
    recompute_cost: float
    precision_cost: float
    reuse: float
    """Probability that one of the pages would have been used again."""

    @property
    def morph(self) -> bool:
        return self.recompute_cost > self.precision_cost

    @property
    def reason(self) -> str:
        costs = (
            f"recomputing evicted prefixes costs {self.recompute_cost:.0f} tokens "
            f"(reuse {self.reuse:.2f}), level {self.level} costs {self.precision_cost:.0f}"
        )
        choice = "lend rather than evict" if self.morph else "evict rather than lend"
        return f"{choice} {self.pages} pages: {costs}"


class EvictionCost:
    """Weighs both, once per tick."""

    def __init__(self, parameters: EvictionParameters, prefill_tokens: int) -> None:
        """`prefill_tokens`: the most that one step prefills."""
        self.parameters = parameters
        self.reuse = PrefixReuse()
        self._prefill_tokens = prefill_tokens
        self._stored = RateWindow(RATE_WINDOW_S)

    def weigh(self, signals: Signals, highest_level: int) -> Verdict | None:
        """The verdict on what the coming step would evict; None where there is no question.

        Call at every tick. `highest_level` is the highest that precision may fall to.
        """
        self._stored.add(signals.now, self.reuse.stored_tokens)
        step = self._step_tokens(signals)
        pages = min(step - signals.free_pages, signals.evictable_pages)
        if (
            pages <= 0
            or signals.pressure < self.parameters.eviction_min_pressure
            or signals.level >= min(highest_level, len(signals.level_pages) - 1)
        ):
            return None
        return self._compare(signals, step, pages, highest_level)

    def describe(self) -> dict[str, Any]:
        """Parameters and estimates, for `/morph/status`."""
        return {
            **asdict(self.parameters),
            "reuse": self.reuse.probability,
            "stored_tokens_per_s": self._stored.per_s,
        }

    def _step_tokens(self, signals: Signals) -> int:
        """Pages that the next decode step and the next prefill take at most."""
        admitted = 0 if signals.admission_blocked else signals.waiting_tokens
        return signals.running + min(admitted, self._prefill_tokens)

    def _compare(self, signals: Signals, step: int, pages: int, highest: int) -> Verdict:
        parameters = self.parameters
        computed = max(self._stored.per_s * parameters.eviction_dwell_s, step)
        levels = range(signals.level + 1, min(highest, len(signals.level_pages) - 1) + 1)
        gains = {k: signals.level_pages[k] - signals.capacity_pages for k in levels}
        level = next((k for k, gain in gains.items() if gain >= computed), levels[-1])
        reuse = self.reuse.probability * parameters.eviction_victim_reuse
        return Verdict(
            pages=pages,
            level=level,
            recompute_cost=reuse * min(computed, gains[level]),
            precision_cost=computed * parameters.eviction_quality_price,
            reuse=reuse,
        )
