"""Emulates a smaller GPU on a larger one: flags that keep a server within the smaller one's memory.

Weights and KV cache get the same bytes in every arm: SGLang sizes the KV cache as
`mem_fraction_static x memory - weights`, so the fraction is scaled from the small card to the real
one. Sizes that SGLang derives from the card's memory (largest decode graph, prefill chunk) are set
to what it would choose on the small card. Speed and bandwidth stay those of the real card.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_morph.stock_choices import stock_choices

_MEMORY_FLAGS = ("--mem-fraction-static", "--max-total-tokens")


class CardError(ValueError):
    """A card that can't be emulated. The message has the remedy."""


@dataclass(frozen=True, slots=True)
class Card:
    """A card of `memory_gib` played by one of `real_gib`."""

    memory_gib: float
    real_gib: float
    static_fraction: float
    """Share of the small card for weights and KV cache; the rest is for activations and graphs."""

    def __post_init__(self) -> None:
        if not 0 < self.memory_gib <= self.real_gib:
            raise CardError(
                f"a card of {self.memory_gib:g} GiB can't be emulated on one of "
                f"{self.real_gib:.0f} GiB; give a smaller --gpu-memory-gib"
            )
        if not 0 < self.static_fraction < 1:
            raise CardError("gpu_static_fraction must lie between 0 and 1")

    @property
    def budget_gib(self) -> float:
        """For weights and KV cache together."""
        return self.memory_gib * self.static_fraction

    def flags(self, command: Sequence[str]) -> list[str]:
        """Flags to add to an arm's command. Raises `CardError` if it sets its memory itself."""
        given = {word.partition("=")[0] for word in command}
        if clash := sorted(given.intersection(_MEMORY_FLAGS)):
            raise CardError(
                f"an arm sets {clash[0]} while a smaller card is emulated; leave the flag out"
            )
        flags = ["--mem-fraction-static", f"{self.budget_gib / self.real_gib:.4f}"]
        chunk, graphs = stock_choices(self.memory_gib)
        if "--chunked-prefill-size" not in given:
            flags += ["--chunked-prefill-size", str(chunk)]
        if not given & {"--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"}:
            flags += ["--cuda-graph-max-bs-decode", str(graphs)]
        return flags

    def describe(self) -> str:
        return (
            f"Emulated: a {self.memory_gib:g} GiB card on one of {self.real_gib:.0f} GiB. Every "
            f"arm may use {self.budget_gib:.2f} GiB for weights and KV cache together "
            f"({self.static_fraction:.0%} of the small card). Compute and bandwidth are the real "
            "card's."
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.describe()}


def real_gpu_gib() -> float:
    """Memory of the first GPU. Raises `CardError` where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(query, check=True, capture_output=True, text=True)
        return float(done.stdout.split()[0]) / 1024
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise CardError(
            "no GPU found by nvidia-smi, so no card can be emulated; leave out gpu_memory_gib and "
            "give equal --max-total-tokens or base tokens in the arms' commands"
        ) from error
