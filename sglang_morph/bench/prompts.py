"""Prompts of exactly given token counts, cut out of a text at seeded places."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer  # type: ignore[import-untyped]

from sglang_morph.bench.traces import TraceRequest

BLOCK_TOKENS = 512
"""Tokens a block id of a Mooncake trace stands for."""

Sharing = Literal["none", "prefix", "sessions", "blocks"]


class PromptError(ValueError):
    """Prompts that can't be made. The message has the remedy."""


def default_text() -> str:
    """English prose that comes with every Python: the help topics of `pydoc`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def text_tokens(model: Path, text: str) -> list[int]:
    """Token ids of `text` by the tokenizer in a model's folder, without special tokens."""
    ids: list[int] = _tokenizer(model).encode(text, add_special_tokens=False).ids
    if len(ids) < 2:
        raise PromptError("the text has fewer than 2 tokens; give a longer one")
    return ids


def count_tokens(model: Path, texts: Sequence[str]) -> int:
    """Tokens of all `texts` together, without special tokens."""
    encodings = _tokenizer(model).encode_batch(list(texts), add_special_tokens=False)
    return sum(len(encoding.ids) for encoding in encodings)


def _tokenizer(model: Path) -> Tokenizer:
    file = model / "tokenizer.json"
    if not file.is_file():
        raise PromptError(f"{model} has no tokenizer.json; give a model folder that has one")
    return Tokenizer.from_file(str(file))


class PromptMaker:
    """Makes prompts out of `tokens`, read as a ring. Equal arguments make equal prompts.

    `sharing` says which prompts begin alike:
    - `none`: none do, as far as the text has enough places to start at
    - `prefix`: the first `prefix_tokens` of each are those of one of `prefix_groups` groups
    - `sessions`: a session's prompts all begin where its first one did
    - `blocks`: equal block ids are equal text, as in the trace
    """

    def __init__(
        self,
        tokens: Sequence[int],
        seed: int,
        sharing: Sharing = "none",
        prefix_tokens: int = 0,
        prefix_groups: int = 1,
    ) -> None:
        if sharing == "prefix" and (prefix_tokens < 1 or prefix_groups < 1):
            raise PromptError("sharing a prefix needs prefix_tokens and prefix_groups above 0")
        self._tokens = list(tokens)
        self._rng = random.Random(f"prompts {seed}")
        self._seed = seed
        self._sharing = sharing
        self._prefix_tokens = prefix_tokens
        self._prefix_groups = prefix_groups

    def make(self, requests: Sequence[TraceRequest]) -> list[list[int]]:
        """One list of token ids per request, `input_tokens` long.

        Raises `PromptError` for sharing that the trace says nothing about.
        """
        starts = self._starts(len(requests))
        return [
            self._prompt(request, start) for request, start in zip(requests, starts, strict=True)
        ]

    def _starts(self, count: int) -> list[int]:
        """Places in the text, all different while there are enough."""
        places = len(self._tokens)
        if count <= places:
            return self._rng.sample(range(places), count)
        return [self._rng.randrange(places) for _ in range(count)]

    def _prompt(self, request: TraceRequest, start: int) -> list[int]:
        length = request.input_tokens
        if self._sharing == "none":
            return self._piece(start, length)
        head = self._shared(request)[:length]
        return head + self._piece(start, length - len(head))

    def _shared(self, request: TraceRequest) -> list[int]:
        if self._sharing == "prefix":
            group = self._rng.randrange(self._prefix_groups)
            return self._piece(self._place("group", group), self._prefix_tokens)
        if self._sharing == "sessions":
            if request.session is None:
                raise PromptError("the trace has no sessions; use another kind of sharing")
            return self._piece(self._place("session", request.session), request.input_tokens)
        if not request.blocks:
            raise PromptError("the trace has no block ids; use another kind of sharing")
        pieces = (self._piece(self._place("block", b), BLOCK_TOKENS) for b in request.blocks)
        return [token for piece in pieces for token in piece]

    def _place(self, kind: str, name: object) -> int:
        """Where the text named so starts; the same for every request."""
        return random.Random(f"{self._seed} {kind} {name}").randrange(len(self._tokens))

    def _piece(self, start: int, length: int) -> list[int]:
        ring = self._tokens
        piece = ring[start : start + length]
        while len(piece) < length:
            piece += ring[: length - len(piece)]
        return piece
