"""A residual under the very bytes that are rebuilt from it, with SGLang's own linears."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from memory_backends import residual_room
from memory_backends.base import BackendError
from memory_backends.layer_swap import LayerSwapBackend
from sglang_morph.precision.layers import SglangLayer, find_morphable_layers
from sglang_morph.precision.nested.ops import merge_into
from sglang_morph.precision.variants.base import Parts
from sglang_morph.precision.variants.nested_fp8 import NestedFp8, index_obstacle
from tests.sglang_morph.precision.test_layers import llama

pytestmark = pytest.mark.usefixtures("sglang_distributed")

NESTED = "nested_fp8"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def with_exceptions(dtype: torch.dtype) -> list[SglangLayer]:
    """Layers in which every linear has some, at its beginning and its end."""
    model = llama().bfloat16().to(dtype)
    layers = find_morphable_layers(model, [NESTED])
    for layer in layers:
        for weight in layer.full_tensors().values():
            for row in (0, 1, -1):
                weight[row, :6] = 3.3e-7
            weight[-1, -1] = -1.1e-6
    return layers


def served(layers: list[SglangLayer]) -> LayerSwapBackend:
    backend = LayerSwapBackend()
    steps = [SimpleNamespace(layer=layer.index, variant=NESTED) for layer in layers]
    backend.adopt_weights(layers, steps, torch.device("cpu"))
    backend.allocate(base_pages=4, page_bytes=512)
    return backend


def lend_and_return(backend: LayerSwapBackend) -> None:
    """Every byte lent is used; then the residuals come back."""
    backend.lower(2)
    for pages in backend.lendable(2):
        backend.kv_storage[pages.start * 512 : pages.stop * 512] = 0xFF
    backend.prepare(0)


def weights(layers: list[SglangLayer]) -> list[torch.Tensor]:
    return [t.clone().view(torch.uint8) for layer in layers for t in layer.full_tensors().values()]


def in_any_order(variant: NestedFp8, parts: Parts, residual: Parts, out: torch.Tensor) -> None:
    """As a GPU might: a row is written while another has not been read."""
    out.fill_(torch.nan)
    merge_into(parts["codes"].view(torch.uint8), residual["lower"], out, variant.nesting)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spare", [192, 1000, residual_room.SPARE_BYTES])
def test_weights_come_back_bit_for_bit(
    dtype: torch.dtype, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residual_room, "SPARE_BYTES", spare)
    monkeypatch.setattr(NestedFp8, "rebuild", in_any_order)
    layers = with_exceptions(dtype)
    loaded = weights(layers)
    backend = served(layers)
    for _ in range(2):
        lend_and_return(backend)
        backend.restore(0)
        for found, expected in zip(weights(layers), loaded, strict=True):
            assert torch.equal(found, expected)


def test_a_rebuild_that_broke_off_halfway_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = with_exceptions(torch.bfloat16)
    loaded = weights(layers)
    backend = served(layers)
    lend_and_return(backend)
    before = backend.kv_storage.clone()
    patch, patched = NestedFp8.patch, []

    def fails_at_the_third_linear(variant: NestedFp8, residual: Parts, out: torch.Tensor) -> None:
        if "exception_index" in residual:
            patched.append(out)
            if len(patched) == 3:
                raise RuntimeError("no luck")
        patch(variant, residual, out)

    monkeypatch.setattr(NestedFp8, "patch", fails_at_the_third_linear)
    with pytest.raises(BackendError, match="rebuilding layer 1 failed: no luck"):
        backend.restore(0)
    assert backend.depth == 2
    assert not torch.equal(backend.kv_storage, before), "some of the residual is overwritten"
    backend.restore(0)
    for found, expected in zip(weights(layers), loaded, strict=True):
        assert torch.equal(found, expected)


def test_exceptions_of_larger_weights_could_not_be_listed() -> None:
    assert index_obstacle(1 << 16, (1 << 15) - 1) is None
    assert "less than 2**31 elements" in (index_obstacle(1 << 16, 1 << 15) or "")
