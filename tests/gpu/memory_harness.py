"""Convert, store, attend, migrate and restore at toy size, for `compute-sanitizer`.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
        python -m tests.gpu.memory_harness

Real kernels over a real arena: layers are lowered in place, tokens stored and attended to in the
bytes that came free, their pages migrated, and the weights rebuilt. Fails where a result is wrong.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from memory_backends import residual_room
from memory_backends.kv_pool import ElasticMHATokenToKVPool, page_bytes
from memory_backends.layer_swap import LayerSwapBackend
from memory_backends.token_pool import ElasticTokenToKVPoolAllocator
from sglang_morph.precision.layers import SglangLayer, _Linear
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants.registry import create_variant

DEVICE = os.environ.get("MORPH_HARNESS_DEVICE", "cuda")
DTYPE = torch.bfloat16
SHAPES = {
    "self_attn.qkv_proj": (240, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_up_proj": (416, 128),
    "mlp.down_proj": (128, 208),
}
SCALES = (0.02, 1.0, 2e-7)
"""Of the layers' weights: nested as E4M3; as E5M2; with values that cannot be nested."""
KV_LAYERS, KV_HEADS, HEADS, DIM = 2, 8, 16, 128
"""A row of 2048 bytes, for which SGLang's store kernel is usually compiled already."""
BASE_PAGES = 24
SPARE_BYTES = 4096
"""So that weights as small as these are rebuilt in several blocks of rows."""


def main() -> int:
    torch.manual_seed(0)
    residual_room.SPARE_BYTES = SPARE_BYTES
    layers = [_layer(index, scale) for index, scale in enumerate(SCALES)]
    loaded = [{k: t.clone() for k, t in layer.full_tensors().items()} for layer in layers]
    system = _System(layers)
    system.check_weights(loaded)

    system.lower()
    _done("convert")
    system.check_linears()
    ids = system.store()
    _done("store")
    seen = system.attend(ids)
    _done("attend")
    ids = system.migrate(ids)
    assert torch.equal(system.attend(ids), seen), "attention differs after the migration"
    _done("migrate")
    system.restore()
    system.check_weights(loaded)
    assert torch.equal(system.attend(ids), seen), "attention differs after the restore"
    _done("restore")
    return 0


class _System:
    """Three layers, their backend, and a KV pool with its allocator over one arena."""

    def __init__(self, layers: Sequence[SglangLayer]) -> None:
        self._layers = layers
        self._backend = LayerSwapBackend()
        steps = [SimpleNamespace(layer=layer.index, variant="nested_fp8") for layer in layers]
        self._backend.adopt_weights(layers, steps, torch.device(DEVICE))
        nbytes = page_bytes(KV_LAYERS, KV_HEADS, DIM, DIM, DTYPE)
        self._backend.kv_budget(1 << 30)
        self._backend.allocate(base_pages=BASE_PAGES + 1, page_bytes=nbytes)
        self._pool = ElasticMHATokenToKVPool(
            BASE_PAGES,
            storage=self._backend.kv_storage,
            page_bytes=nbytes,
            page_size=1,
            dtype=DTYPE,
            head_num=KV_HEADS,
            head_dim=DIM,
            layer_num=KV_LAYERS,
            device=DEVICE,
            enable_memory_saver=False,
        )
        self._allocator = ElasticTokenToKVPoolAllocator(
            BASE_PAGES, DTYPE, DEVICE, self._pool, False
        )

    def check_weights(self, expected: Sequence[dict[str, torch.Tensor]]) -> None:
        for layer, weights in zip(self._layers, expected, strict=True):
            for name, tensor in layer.full_tensors().items():
                same = torch.equal(tensor.view(torch.int16), weights[name].view(torch.int16))
                assert same, f"layer {layer.index}: {name} is not what was loaded"

    def lower(self) -> None:
        self._backend.lower(len(self._layers))
        self._lent = self._backend.lendable(self._backend.depth)
        assert self._lent, "nothing came free"
        self._pool.zero_pages(self._lent)
        self._allocator.lend(self._lent)

    def check_linears(self) -> None:
        """Every linear under its variant, near to its reference."""
        for layer, scale in zip(self._layers, SCALES, strict=True):
            for path, found in layer._linears.items():
                for tokens in (1, 17):
                    x = torch.randn(tokens, SHAPES[path][1], device=DEVICE).to(DTYPE)
                    y = found.module.quant_method.apply(found.module, x)
                    expected = linear(x.float(), _weight(layer.index, path, scale).float())
                    error = (y.float() - expected).norm() / expected.norm()
                    assert error < 0.1, f"layer {layer.index}, {path}: off by {error:.3f}"

    def store(self) -> torch.Tensor:
        """KV in every page there is, so in the lent ones too. Returns their ids."""
        ids = self._allocator.alloc(self._allocator.available_size())
        assert ids is not None and int(ids.max()) > BASE_PAGES
        for layer in range(KV_LAYERS):
            k, v = (torch.randn(len(ids), KV_HEADS, DIM, device=DEVICE).to(DTYPE) for _ in "kv")
            self._pool.set_kv_buffer(SimpleNamespace(layer_id=layer), ids, k, v)
        return ids

    def attend(self, ids: torch.Tensor) -> torch.Tensor:
        """One token's attention, in every layer, to the KV in the last `BASE_PAGES` of `ids`."""
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

        ids = ids[-BASE_PAGES:]
        splits = 4
        found = []
        for layer in range(KV_LAYERS):
            generator = torch.Generator(DEVICE).manual_seed(layer)
            q = torch.randn(1, HEADS, DIM, generator=generator, device=DEVICE).to(DTYPE)
            keys, values = self._pool.get_kv_buffer(layer)
            output = torch.empty_like(q)
            decode_attention_fwd(
                q,
                keys,
                values,
                output,
                torch.tensor([0, len(ids)], dtype=torch.int32, device=DEVICE),
                ids,
                torch.empty(1, HEADS, splits, DIM, device=DEVICE),
                torch.empty(1, HEADS, splits, device=DEVICE),
                torch.full((1,), splits, dtype=torch.int32, device=DEVICE),
                splits,
                DIM**-0.5,
                1.0,
                1.0,
            )
            expected = scaled_dot_product_attention(
                q.float().transpose(0, 1),
                keys[ids].float().transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0),
                values[ids].float().transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0),
            ).transpose(0, 1)
            torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)
            found.append(output)
        return torch.stack(found)

    def migrate(self, ids: torch.Tensor) -> torch.Tensor:
        """All but the last `BASE_PAGES` are freed; those move to base pages. Returns new ids."""
        freed, kept = ids[:-BASE_PAGES], ids[-BASE_PAGES:]
        self._allocator.free(freed)
        source = self._allocator.used_in(self._lent)
        target = self._allocator.free_outside(self._lent, len(source))
        assert len(source) == len(target) > 0
        self._pool.copy_pages(target, source)
        self._allocator.exchange(target, source)
        table = torch.arange(self._backend.maximum_pages, device=DEVICE)
        table[source] = target
        self._allocator.withdraw(self._lent)
        return table[kept]

    def restore(self) -> None:
        self._backend.prepare(0)
        until = time.monotonic() + 20
        while not self._backend.ready(0):
            assert time.monotonic() < until, "the uploads do not end"
            time.sleep(0.001)
        self._backend.restore(0)


def _layer(index: int, scale: float) -> SglangLayer:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    linears: dict[str, Any] = {}
    for path in SHAPES:
        weight = torch.nn.Parameter(_weight(index, path, scale), requires_grad=False)
        module = SimpleNamespace(quant_method=UnquantizedLinearMethod(), weight=weight)
        linears[path] = _Linear(module, weight, module.quant_method)
    encoder = create_variant("nested_fp8", DEVICE, create_quantizer("rtn"))
    chosen = {path: encoder.for_weight(found.weight.data) for path, found in linears.items()}
    return SglangLayer(index, linears, {"nested_fp8": chosen})


def _weight(index: int, path: str, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * index + sum(SHAPES[path]))
    return (torch.randn(SHAPES[path], generator=generator) * scale).to(DEVICE, DTYPE)


def _done(what: str) -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(what, flush=True)


if __name__ == "__main__":
    sys.exit(main())
