from __future__ import annotations

import pytest
import torch

from sglang_morph.precision.names import FULL
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.quality.lowered import LoweredModel
from sglang_morph.quality.on_text import TextMeter


def test_full_precision_has_the_loss_of_transformers_and_no_divergence(
    lowered: LoweredModel, tokens: list[list[int]]
) -> None:
    ids = torch.tensor(tokens)
    expected = float(lowered.model.hf(ids, labels=ids).loss)
    found = TextMeter(lowered, tokens).measure(lowered.full)
    assert found.losses.shape == found.kl.shape == found.same_top.shape == (3, 23)
    assert found.losses.mean() == pytest.approx(expected, rel=1e-5)
    assert found.kl.max() == 0
    assert found.same_top.all()


def test_divergence_is_that_of_the_distributions(
    lowered: LoweredModel, model: LayeredModel, tokens: list[list[int]]
) -> None:
    ids, variants = torch.tensor(tokens), ("int4", FULL, "int8", "int4")
    full = model.hf(ids).logits[:, :-1].log_softmax(-1).double()
    found = TextMeter(lowered, tokens).measure(variants)
    low = model.hf(ids).logits[:, :-1].log_softmax(-1).double()  # the model is still lowered
    expected = (full.exp() * (full - low)).sum(-1)
    assert torch.allclose(torch.tensor(found.kl), expected, rtol=1e-3, atol=1e-6)
    assert found.kl.min() > 0
    same = full.argmax(-1) == low.argmax(-1)
    assert torch.equal(torch.tensor(found.same_top), same)


def test_what_was_measured_before_does_not_matter(
    lowered: LoweredModel, tokens: list[list[int]]
) -> None:
    meter = TextMeter(lowered, tokens)
    sequence = [
        (FULL, FULL, FULL, "int4"),
        (FULL, FULL, "int8", "int4"),
        ("fp8", FULL, "int8", "int4"),
        (FULL, FULL, "int8", "int4"),
    ]
    in_sequence = [meter.measure(variants) for variants in sequence]
    for variants, found in zip(sequence, in_sequence, strict=True):
        alone = TextMeter(lowered, tokens).measure(variants)
        assert (alone.losses == found.losses).all()
        assert (alone.kl == found.kl).all()
