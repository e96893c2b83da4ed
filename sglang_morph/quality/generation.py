"""Greedy continuations, with a change of the level on the way where one is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_morph.quality.lowered import LayerVariants, LoweredModel

Tokens = list[int]

_BATCH = 16


def continue_greedily(
    lowered: LoweredModel,
    starts: Sequence[Sequence[int]],
    limits: Sequence[int],
    read_at: LayerVariants,
    write_at: LayerVariants,
    end_tokens: frozenset[int] = frozenset(),
) -> list[Tokens]:
    """Up to `limits[i]` tokens that follow `starts[i]`, without an end token.

    A start has at least one token. Its KV, but for the last token's, is made at `read_at`,
    everything after at `write_at`: as on a server whose level changes between two forward passes.
    """
    order = sorted(range(len(starts)), key=lambda i: len(starts[i]))  # for little padding
    found: dict[int, Tokens] = {}
    for at in range(0, len(order), _BATCH):
        chosen = order[at : at + _BATCH]
        batch = _Batch(
            lowered, [starts[i] for i in chosen], [limits[i] for i in chosen], end_tokens
        )
        found |= zip(chosen, batch.run(read_at, write_at), strict=True)
    return [found[i] for i in range(len(starts))]


def switch_in_the_middle(
    lowered: LoweredModel,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Tokens],
    limit: int,
    before: LayerVariants,
    after: LayerVariants,
    end_tokens: frozenset[int] = frozenset(),
) -> list[Tokens]:
    """Responses whose first half is that of `responses`, which were made at `before`, and whose
    rest, up to `limit` tokens in all, is made at `after`."""
    halves = [response[: (len(response) + 1) // 2] for response in responses]
    starts = [[*prompt, *half] for prompt, half in zip(prompts, halves, strict=True)]
    limits = [limit - len(half) for half in halves]
    rests = continue_greedily(lowered, starts, limits, before, after, end_tokens)
    return [half + rest for half, rest in zip(halves, rests, strict=True)]


class _Batch:
    """Sequences decoded together, padded on the left, with a KV cache."""

    def __init__(
        self,
        lowered: LoweredModel,
        starts: Sequence[Sequence[int]],
        limits: Sequence[int],
        end_tokens: frozenset[int],
    ) -> None:
        self._lowered = lowered
        self._limits = limits
        self._end_tokens = end_tokens
        longest = max(len(start) for start in starts)
        pads = [longest - len(start) for start in starts]
        rows = [[0] * pad + list(start) for pad, start in zip(pads, starts, strict=True)]
        device = lowered.model.device
        self._tokens = torch.tensor(rows, device=device)
        self._pads = torch.tensor(pads, device=device).unsqueeze(-1)
        self._cache: Any = None

    @torch.inference_mode()
    def run(self, read_at: LayerVariants, write_at: LayerVariants) -> list[Tokens]:
        added: list[Tokens] = [[] for _ in self._limits]
        going = {i for i, limit in enumerate(self._limits) if limit > 0}
        if going and self._tokens.shape[1] > 1:
            self._lowered.lower(read_at)
            self._forward(self._tokens[:, :-1])
        self._lowered.lower(write_at)
        last = self._tokens[:, -1:]
        while going:
            last = self._forward(last).argmax(dim=-1, keepdim=True)
            for i, token in enumerate(last.flatten().tolist()):
                if i in going and token not in self._end_tokens:
                    added[i].append(token)
                if token in self._end_tokens or len(added[i]) >= self._limits[i]:
                    going.discard(i)
        return added

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `[B, vocabulary]` after the last of `tokens` `[B, T]`, which follow the cache."""
        seen = 0 if self._cache is None else self._cache.get_seq_length()
        places = torch.arange(seen + tokens.shape[1], device=tokens.device)
        output = self._lowered.model.hf(
            input_ids=tokens,
            attention_mask=(places >= self._pads).long(),
            position_ids=(places[seen:] - self._pads).clamp_min(0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        return output.logits[:, -1]
