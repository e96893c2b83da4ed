from __future__ import annotations

import torch

from sglang_morph.quality.generation import continue_greedily, switch_in_the_middle
from sglang_morph.quality.lowered import LoweredModel

LOW = ("int4",) * 4


def by_transformers(lowered: LoweredModel, prompt: list[int], count: int) -> list[int]:
    """One prompt, no padding, no cache."""
    ids = torch.tensor([prompt])
    for _ in range(count):
        token = lowered.model.hf(ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, token], dim=1)
    return ids[0, len(prompt) :].tolist()


def test_prompts_of_several_lengths_are_continued_as_one_by_one(
    lowered: LoweredModel, tokens: list[list[int]]
) -> None:
    prompts = [tokens[0], tokens[1][:7], tokens[2][:1]]
    for variants in (lowered.full, LOW):
        found = continue_greedily(lowered, prompts, [9, 5, 7], variants, variants)
        assert [len(one) for one in found] == [9, 5, 7]
        assert found == [
            by_transformers(lowered, prompt, len(one))
            for prompt, one in zip(prompts, found, strict=True)
        ]


def test_it_stops_before_an_end_token(lowered: LoweredModel, tokens: list[list[int]]) -> None:
    free = continue_greedily(lowered, tokens, [8] * 3, lowered.full, lowered.full)
    end = frozenset({free[0][3]})
    found = continue_greedily(lowered, tokens, [8] * 3, lowered.full, lowered.full, end)
    for stopped, whole in zip(found, free, strict=True):
        cut = next((i for i, token in enumerate(whole) if token in end), len(whole))
        assert stopped == whole[:cut]


def test_a_switch_to_the_same_level_changes_nothing(
    lowered: LoweredModel, tokens: list[list[int]]
) -> None:
    for variants in (lowered.full, LOW):
        whole = continue_greedily(lowered, tokens, [8] * 3, variants, variants)
        assert switch_in_the_middle(lowered, tokens, whole, 8, variants, variants) == whole


def test_a_switch_computes_the_kv_before_it_at_the_level_before(
    lowered: LoweredModel, tokens: list[list[int]]
) -> None:
    prompts = [block[:6] for block in tokens]
    full = continue_greedily(lowered, prompts, [8] * 3, lowered.full, lowered.full)
    found = switch_in_the_middle(lowered, prompts, full, 8, lowered.full, LOW)
    for prompt, response, whole in zip(prompts, found, full, strict=True):
        assert response[:4] == whole[:4]
        known = [*prompt, *whole[:4]]
        lowered.lower(lowered.full)
        cache = lowered.model.hf(torch.tensor([known[:-1]]), use_cache=True).past_key_values
        lowered.lower(LOW)
        token, expected = known[-1], []
        for _ in range(4):
            output = lowered.model.hf(torch.tensor([[token]]), past_key_values=cache)
            token = int(output.logits[0, -1].argmax())
            expected.append(token)
        assert response[4:] == expected


def test_a_response_that_has_ended_is_not_continued_past_its_limit(
    lowered: LoweredModel, tokens: list[list[int]]
) -> None:
    found = switch_in_the_middle(lowered, tokens, [[5, 6, 7], [], [4]], 3, lowered.full, LOW)
    assert found[0][:2] == [5, 6]
    assert [len(one) for one in found] == [3, 3, 3]
