"""The demo's workload: a seeded burst of chat-like requests between two quiet stretches."""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED = 20

_PEOPLE = (
    "a beekeeper", "a retired pilot", "a school librarian", "a night nurse", "a young baker",
    "a museum guide", "a harbour master", "a piano tuner", "a geology student", "a bus driver",
)  # fmt: skip
_PLACES = (
    "Lisbon", "Nairobi", "Kyoto", "Montreal", "Tbilisi",
    "Lima", "Gdansk", "Hobart", "Oslo", "Tunis",
)  # fmt: skip
_SENTENCES = (
    "The winter was long, and the snow stayed on the roofs until the middle of April.",
    "Every morning the market opens at six, and the fishermen sell whatever the night has brought.",
    "My grandmother kept a notebook in which she wrote down the price of bread for forty years.",
    "The old bridge was closed last month because two of its stones had moved by a finger's width.",
    "We measured the water level three times a day and drew a line on the kitchen wall.",
    "There are only two trains, and the second one leaves before the first one has arrived.",
    "The engineer explained that the wind, not the rain, does most of the damage to the towers.",
    "Our neighbour grows tomatoes on the balcony and gives half of them to the school.",
    "In the evening the children read aloud, and the dog listens as if it understood every word.",
    "The choir practises in the station hall, since it is the only warm room with an echo.",
    "Nobody remembers who planted the pear tree, but everyone knows when its fruit is ripe.",
    "The new ferry is faster, yet most people still take the old one because of its coffee.",
)
_TASKS = (
    "Explain what is going on here, and why it matters.",
    "Write a short letter that answers this one.",
    "Tell the story again from another person's point of view.",
    "List the three most important points and give a reason for each.",
    "What would you advise, step by step?",
)


@dataclass(frozen=True, slots=True)
class Phase:
    """`requests` arrivals, spread at random over `[start_s, stop_s)` seconds."""

    name: str
    start_s: float
    stop_s: float
    requests: int


PHASES = (
    Phase("quiet before", 0.0, 6.0, 4),
    Phase("burst", 6.0, 9.0, 33),
    Phase("quiet after", 35.0, 55.0, 5),
)


@dataclass(frozen=True, slots=True)
class BurstRequest:
    """One request to send `at_s` seconds after the start, asking for `output_tokens` tokens."""

    at_s: float
    phase: str
    prompt: str
    output_tokens: int


def make_burst(seed: int = SEED, phases: tuple[Phase, ...] = PHASES) -> list[BurstRequest]:
    """The same requests for the same arguments, in order of arrival."""
    rng = random.Random(seed)
    return [
        BurstRequest(at_s, phase.name, _prompt(rng), _output_tokens(rng))
        for phase in phases
        for at_s in sorted(rng.uniform(phase.start_s, phase.stop_s) for _ in range(phase.requests))
    ]


def _output_tokens(rng: random.Random) -> int:
    """32 to 160, more often short than long."""
    return round(rng.triangular(32, 160, 40))


def _prompt(rng: random.Random) -> str:
    """A letter of 20 to 250 tokens. Its first words are rarely shared, so KV is rarely reused."""
    body = rng.sample(_SENTENCES, k=rng.randint(0, len(_SENTENCES) - 1))
    opening = (
        f"{rng.randint(2, 28)} days ago {rng.choice(_PEOPLE)} in {rng.choice(_PLACES)} wrote to us."
    )
    return " ".join([opening, *body, rng.choice(_TASKS)])
