"""A server as the tests see it."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

GREEDY_TOKENS = 16
"""Of each of the prompts below; they are sent one after the other, on two cores."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a land far away, there lived a",
    "Water boils at a temperature of",
    "The three primary colors are",
    "def fibonacci(n):",
    "In the year 1969, humans first",
    "My favourite recipe for bread begins with",
    "The largest planet in the solar system is",
    "To be, or not to be, that is",
    "A list of prime numbers: 2, 3, 5, 7,",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam, I am writing to",
    "The quick brown fox",
    "Shakespeare wrote many plays, among them",
    "The Pacific Ocean is",
    "import numpy as np\n",
    "If it rains tomorrow, we will",
    "The human heart has",
    "Gravity is a force that",
    "She opened the old wooden door and",
    "In economics, inflation means",
    "The moon orbits the",
]


class Client:
    """Talks to one server and can look into its log."""

    def __init__(self, http: httpx.Client, url: str, log: Path) -> None:
        self.http = http
        self.url = url
        self.log = log

    def generate(self, prompt: str, tokens: int = 32, **fields: Any) -> dict[str, Any]:
        """One greedy completion of exactly `tokens` tokens; SGLang's answer."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling, **fields}
        answer = self.http.post("/generate", json=body)
        answer.raise_for_status()
        return answer.json()

    def start(
        self, pool: ThreadPoolExecutor, number: int, tokens: int, first: int = 0
    ) -> list[Future[Any]]:
        """`number` completions at once, with different prompts; ids are `r<first>` and on."""
        return [
            pool.submit(self.generate, f"{PROMPTS[i % len(PROMPTS)]} ({i})", tokens, rid=f"r{i}")
            for i in range(first, first + number)
        ]

    def greedy(self, tokens: int = GREEDY_TOKENS, prompts: int = len(PROMPTS)) -> list[list[int]]:
        """Output token ids of the first `prompts` prompts, one request at a time."""
        return [self.generate(prompt, tokens)["output_ids"] for prompt in PROMPTS[:prompts]]

    def status(self) -> dict[str, Any]:
        answer = self.http.get("/morph/status")
        answer.raise_for_status()
        return answer.json()

    @property
    def top_level(self) -> int:
        return len(self.status()["levels"]) - 1

    def set_level(self, level: int) -> None:
        answer = self.http.post("/morph/level", json={"level": level})
        assert answer.status_code == httpx.codes.OK, answer.text

    def wait_level(self, level: int, timeout_s: float = 60) -> dict[str, Any]:
        """The status once the server rests at `level`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.status()
            if status["level"] == level and not status["restoring"]:
                return status
            time.sleep(0.05)
        raise AssertionError(f"not at level {level} after {timeout_s} s: {status}")

    def go_to(self, level: int) -> dict[str, Any]:
        self.set_level(level)
        return self.wait_level(level)

    def verify(self) -> str:
        """SHA-256 over all parameters, at full precision."""
        answer = self.http.post("/morph/verify")
        answer.raise_for_status()
        assert answer.json()["level"] == 0
        return answer.json()["digest"]

    def check_alive(self) -> None:
        """The server answers, and SGLang's own checks found nothing."""
        assert self.generate("Hello", 2)["meta_info"]["completion_tokens"] == 2
        log = self.log.read_text(errors="replace")
        for complaint in ("leak detected", "Mem Leak", "Traceback", "rolled back"):
            assert complaint not in log, log[max(0, log.index(complaint) - 2000) :][:4000]
