"""A small Llama, its variants, and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_morph.precision.quantizers.layer import AsTheyAre
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.profiling.variants import make_variants
from sglang_morph.quality.lowered import LoweredModel
from sglang_morph.quality.variant_set import VariantSet
from tests.sglang_morph.quality.tiny_llama import save_tiny_llama

VARIANTS = ("int8", "fp8", "nested_fp8", "int4")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-llama"
    save_tiny_llama(folder)
    return folder


@pytest.fixture
def model(checkpoint: Path) -> LayeredModel:
    return LayeredModel.load(checkpoint)


@pytest.fixture
def variants(model: LayeredModel) -> VariantSet:
    tokens = torch.arange(16).unsqueeze(0)
    return VariantSet(model, make_variants(model, VARIANTS, AsTheyAre(), tokens))


@pytest.fixture
def lowered(model: LayeredModel, variants: VariantSet) -> LoweredModel:
    return LoweredModel(model, variants.weights)


@pytest.fixture
def tokens() -> list[list[int]]:
    """Blocks `[3, 24]`."""
    found = torch.randint(2, 320, (3, 24), generator=torch.Generator().manual_seed(1))
    return found.tolist()
