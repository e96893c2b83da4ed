"""`semi_unified` on a GPU: full precision from two halves, and memory that changes hands.

    python -m pytest -q tests/gpu/test_semi_unified.py

Prints times: of lending and restoring, and of the plain GEMM after merging by size of block.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from torch.nn.functional import linear

from benchmarks.kernels import LLAMA_8B, milliseconds
from memory_backends.semi_unified import SemiUnifiedBackend
from memory_backends.vmm import MIB
from sglang_morph.precision.layers import SglangLayer, _Linear
from sglang_morph.precision.names import MORPHABLE_LINEARS
from sglang_morph.precision.nested import full_linear
from sglang_morph.precision.nested.encoding import Nesting
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants.base import Halves, NestedVariant
from sglang_morph.precision.variants.registry import create_variant

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (SM90)"),
]

SMALL = {
    "self_attn.qkv_proj": (1536, 1024),
    "self_attn.o_proj": (1024, 1024),
    "mlp.gate_up_proj": (5632, 1024),
    "mlp.down_proj": (1024, 2816),
}
LARGE = dict(zip(MORPHABLE_LINEARS, LLAMA_8B.values(), strict=True))
LAYERS = 4
PAGE = 48 << 10
BASE_PAGES = 100


class Plain(LinearMethodBase):
    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x, layer.weight, bias)


class Linear(torch.nn.Module):
    """What `SglangLayer` sees of one of SGLang's linears."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method: LinearMethodBase = Plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x)


def random_weight(
    shape: tuple[int, int], dtype: torch.dtype, nesting: Nesting, seed: int
) -> torch.Tensor:
    """Gaussian; in bf16 with more exceptions than usual."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    weight = torch.randn(*shape, generator=generator, device=DEVICE).mul_(0.02).to(dtype)
    weight[5, : shape[1] // 2] = 3.3e-7
    if nesting is Nesting.E5M2:
        weight[0, 0] = -5.0
    return weight


def nested_for(weight: torch.Tensor) -> NestedVariant:
    variant = create_variant("nested_fp8", "cuda", create_quantizer("rtn")).for_weight(weight)
    assert isinstance(variant, NestedVariant)
    return variant


class World:
    """A few layers of linears on the backend; one of a layer's four nests as E5M2."""

    def __init__(self, shapes: dict[str, tuple[int, int]], unit_bytes: int) -> None:
        device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
        self.modules: list[dict[str, Linear]] = []
        layers = []
        for index in range(LAYERS):
            modules = {
                path: Linear(
                    random_weight(
                        shape,
                        torch.bfloat16,
                        Nesting.E5M2 if "down" in path else Nesting.E4M3,
                        seed=100 * index + number,
                    )
                )
                for number, (path, shape) in enumerate(shapes.items())
            }
            self.modules.append(modules)
            linears = {p: _Linear(m, m.weight, m.quant_method) for p, m in modules.items()}
            variants = {p: nested_for(m.weight.data) for p, m in modules.items()}
            layers.append(SglangLayer(index, linears, {"nested_fp8": variants}))
        self.originals = [
            {path: module.weight.data.cpu() for path, module in modules.items()}
            for modules in self.modules
        ]
        self.weight_bytes = sum(w.nbytes for layer in self.originals for w in layer.values())
        steps = [SimpleNamespace(layer=i, variant="nested_fp8") for i in range(LAYERS)]
        self.backend = SemiUnifiedBackend(unit_bytes)
        self.backend.adopt_weights(layers, steps, device)
        self.backend.allocate(BASE_PAGES, PAGE)

    def weights_are_the_originals(self) -> bool:
        return all(
            torch.equal(
                module.quant_method.rebuild().cpu().view(torch.int16),  # type: ignore[attr-defined]
                self.originals[index][path].view(torch.int16),
            )
            for index, modules in enumerate(self.modules)
            for path, module in modules.items()
        )

    def forward(self, tokens: int = 64) -> list[torch.Tensor]:
        """Every linear's output for inputs that are always the same; enqueued."""
        outputs = []
        for modules in self.modules:
            for module in modules.values():
                generator = torch.Generator(DEVICE).manual_seed(7)
                columns = module.weight.shape[1]
                x = torch.randn(tokens, columns, generator=generator, device=DEVICE)
                outputs.append(module(x.to(module.weight.dtype)))
        return outputs

    def fill_lent_pages(self) -> None:
        """As KV would, with what is a NaN in every format."""
        pages = self.backend.kv_storage.view(-1, PAGE)
        for r in self.backend.lendable(self.backend.depth):
            pages[r.start : r.stop].fill_(0xFF)

    def restore(self, depth: int = 0) -> None:
        self.backend.prepare(depth)
        while not self.backend.ready(depth):
            time.sleep(1e-4)
        self.backend.restore(depth)


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.float() - expected.float()).norm() / expected.float().norm())


@pytest.fixture(scope="module")
def world() -> World:
    return World(SMALL, 2 * MIB)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nesting", [Nesting.E4M3, Nesting.E5M2])
def test_full_precision_from_halves(nesting: Nesting, dtype: torch.dtype) -> None:
    weight = random_weight((2816, 1024), dtype, nesting, seed=0)
    variant = nested_for(weight)
    variant.prepare_merged(weight)
    rows, columns = weight.shape
    parts = variant.empty_parts(rows, columns, DEVICE)
    variant.derive(weight, parts)
    scratch = weight.new_empty(1024, columns)  # less than half of it: blocks, the last one smaller
    halves = Halves(parts, variant.residual(weight), scratch)
    bias = torch.randn(rows, device=DEVICE).to(dtype)

    def loaded(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("the weight was to be merged in a kernel or in blocks")

    for tokens in (0, 1, 16, 64, 256, 1024, 1025, 4096):
        x = torch.randn(tokens, columns, device=DEVICE).to(dtype)
        for b in (None, bias):
            y = variant.merged_linear(halves, x, b, loaded)
            assert y.shape == (tokens, rows) and y.dtype == dtype and y.is_contiguous()
            if tokens:
                assert relative_error(y, linear(x, weight, b)) < 0.006, (tokens, b is None)
    three_d = torch.randn(2, 3, columns, device=DEVICE).to(dtype)
    assert variant.merged_linear(halves, three_d, None, loaded).shape == (2, 3, rows)


@pytest.mark.parametrize("tokens", [1, 64, 1024, 2048])
def test_a_graph_computes_what_eager_does(world: World, tokens: int) -> None:
    module = world.modules[0]["mlp.gate_up_proj"]
    x = torch.randn(tokens, module.weight.shape[1], device=DEVICE).bfloat16()
    expected = module(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    for _ in range(3):
        y.fill_(torch.nan)
        graph.replay()
        assert relative_error(y, expected) < 0.005
    x.mul_(2)
    graph.replay()
    assert relative_error(y, expected * 2) < 0.005


def test_weights_come_back_byte_for_byte(world: World) -> None:
    assert world.weights_are_the_originals()
    expected = world.forward()
    for depth in (LAYERS, 1, LAYERS - 1):
        world.backend.lower(depth)
        world.fill_lent_pages()
        for number, y in enumerate(world.forward()):
            lowered = number < depth * len(SMALL)
            error = relative_error(y, expected[number])
            assert (0.01 < error < 0.1) if lowered else error < 0.005, (depth, number, error)
        world.restore()
        assert world.weights_are_the_originals()
    for y, before in zip(world.forward(), expected, strict=True):
        assert relative_error(y, before) < 0.005


def test_forwards_in_flight_are_not_disturbed(world: World) -> None:
    """Two streams, ordered as the executor and SGLang order them; the host never waits."""
    expected = [y.clone() for y in world.forward(256)]
    generator = torch.Generator().manual_seed(0)
    forwards, scheduler = torch.cuda.Stream(), torch.cuda.current_stream()
    at_full: list[list[torch.Tensor]] = []
    for _ in range(30):
        forwards.wait_stream(scheduler)
        with torch.cuda.stream(forwards):
            for _ in range(3):
                outputs = world.forward(256)
            if world.backend.depth == 0:
                at_full.append(outputs)
        scheduler.wait_stream(forwards)
        target = int(torch.randint(0, LAYERS + 1, (), generator=generator))
        if target > world.backend.depth:
            world.backend.lower(target)
            world.fill_lent_pages()
        elif target < world.backend.depth:
            world.backend.prepare(target)
            world.backend.restore(target)
    torch.cuda.synchronize()
    assert at_full
    for outputs in at_full:
        for y, before in zip(outputs, expected, strict=True):
            assert relative_error(y, before) < 0.005
    if world.backend.depth:
        world.restore()
    assert world.weights_are_the_originals()


def test_a_model_of_8b_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    began = time.perf_counter()
    world = World(LARGE, 64 * MIB)
    elapsed = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - allocated
    taken = before - torch.cuda.mem_get_info()[0]
    layer = world.weight_bytes / LAYERS
    # Making the variants and trying the kernels takes a few times the largest weight beside them.
    assert peak < world.weight_bytes + 4 * layer
    report = world.backend.report()
    known = sum(report.detail[key] for key in ("scratch", "units")) + report.kv_base
    uppers = report.full_weights - report.host_backup
    assert taken < known + uppers + 512 * MIB, "memory is held that nobody accounts for"

    lowered, restored = [], []
    residual_bytes = report.host_backup
    forwards = torch.cuda.Stream()
    for _ in range(3):
        forwards.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(forwards):
            world.forward(4096)
        torch.cuda.current_stream().wait_stream(forwards)
        start = time.perf_counter()
        world.backend.lower(LAYERS)
        lowered.append((time.perf_counter() - start) * 1e3)
        world.fill_lent_pages()
        torch.cuda.synchronize()
        start = time.perf_counter()
        world.restore()
        torch.cuda.synchronize()
        restored.append(residual_bytes / (time.perf_counter() - start) / 1e9)
    assert world.weights_are_the_originals()
    lent = sum(len(r) for r in world.backend.lendable(LAYERS)) * PAGE
    assert lent >= 0.97 * residual_bytes
    assert max(lowered[1:]) < 5
    with capsys.disabled():
        print(f"\nstart of {LAYERS} layers: {elapsed:.2f} s, peak {peak / world.weight_bytes:.2f}x")
        print(f"to fast, ms: {[round(ms, 2) for ms in lowered]}; lent {lent / residual_bytes:.3f}")
        print(f"restore, GB/s: {[round(rate, 1) for rate in restored]}")


@pytest.mark.parametrize("shape", [LARGE["mlp.gate_up_proj"], LARGE["mlp.down_proj"]], ids=str)
def test_time_of_many_tokens_by_block(
    shape: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    weight = random_weight(shape, torch.bfloat16, Nesting.E4M3, seed=0)
    variant = nested_for(weight)
    parts = variant.empty_parts(*shape, DEVICE)
    variant.derive(weight, parts)
    residual = variant.residual(weight)
    upper = parts["codes"].view(torch.uint8)
    for tokens in (1025, 2048, 4096, 8192):
        x = torch.randn(tokens, shape[1], device=DEVICE).bfloat16()
        arms = {"cuBLAS": [lambda x=x: linear(x, weight)] * 2}
        for mib in (8, 16, 24, 32, 48, 256):
            block = max(128, (mib << 20) // (2 * shape[1]) // 128 * 128)
            scratch = weight.new_empty(min(block, shape[0]), shape[1])
            call = lambda x=x, s=scratch: full_linear.full_linear(  # noqa: E731
                upper, residual, x, None, Nesting.E4M3, s
            )
            arms[f"{mib} MiB"] = [call] * 2
        times = milliseconds(arms)
        ratios = {name: round(ms / times["cuBLAS"], 3) for name, ms in times.items()}
        with capsys.disabled():
            print(f"\n{list(shape)}, M={tokens}: {ratios}, cuBLAS {times['cuBLAS']:.3f} ms")
        assert min(ratios.values()) <= 2
