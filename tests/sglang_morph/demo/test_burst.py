from itertools import pairwise

import pytest

from sglang_morph.demo.burst import PHASES, make_burst

TOKENS_PER_WORD = 1.2  # SmolLM2's tokenizer on such text, a little rounded down


def test_same_seed_gives_the_same_burst_and_another_seed_another():
    assert make_burst() == make_burst()
    assert make_burst(seed=1) != make_burst(seed=2)


@pytest.mark.parametrize("seed", range(20))
def test_lengths_are_mixed_and_within_bounds(seed):
    burst = make_burst(seed)
    prompts = [TOKENS_PER_WORD * len(request.prompt.split()) for request in burst]
    outputs = [request.output_tokens for request in burst]
    assert len(burst) >= 40
    assert 15 < min(prompts) < 60 and 150 < max(prompts) < 280
    assert 32 <= min(outputs) < 50 and 110 < max(outputs) <= 160


def test_arrivals_ascend_and_the_burst_is_far_denser_than_the_rest():
    burst = make_burst()
    assert all(a.at_s <= b.at_s for a, b in pairwise(burst))
    for phase in PHASES:
        arrivals = [request.at_s for request in burst if request.phase == phase.name]
        assert len(arrivals) == phase.requests
        assert phase.start_s <= min(arrivals) and max(arrivals) < phase.stop_s
    before, sharp, after = (p.requests / (p.stop_s - p.start_s) for p in PHASES)
    assert sharp > 10 * max(before, after)


def test_burst_needs_far_more_kv_than_the_default_base_tokens():
    sharp = [request for request in make_burst() if request.phase == "burst"]
    need = sum(TOKENS_PER_WORD * len(r.prompt.split()) + r.output_tokens for r in sharp)
    assert need > 4 * 1280


def test_prompts_differ_from_their_first_words_on():
    openings = {" ".join(request.prompt.split()[:6]) for request in make_burst()}
    assert len(openings) > 0.8 * len(make_burst())
