"""The order that follows from kernel times, and when stored times are used. No GPU is needed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_morph.bundle.cache import CACHE_VARIABLE
from sglang_morph.options import MorphOptions
from sglang_morph.precision.names import FULL, NOMINAL_BITS
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants import kernel_times
from sglang_morph.precision.variants.base import Variant
from sglang_morph.precision.variants.kernel_times import (
    BATCHES,
    Cost,
    KernelTimes,
    available_variants,
    measured_times,
    order_of,
    stored_times,
)
from sglang_morph.precision.variants.registry import create_variant
from sglang_morph.preflight import follows_kernel_times

SHAPES = [(512, 256), (256, 512)]
FP8, NESTED = Cost(0.63, 0.5), Cost(0.65, 0.5)


@pytest.mark.parametrize(
    ("costs", "order"),
    [
        # Hopper: int4 would slow the server down.
        ({"fp8": FP8, "nested_fp8": NESTED, "int4": Cost(1.2, 0.26)}, ("nested_fp8",)),
        # An fp8 kernel that is really faster is taken first, lossy as it is.
        ({"fp8": Cost(0.5, 0.5), "nested_fp8": Cost(0.7, 0.5)}, ("fp8",)),
        # int4 for the last bytes where it is not slower than full precision.
        ({"nested_fp8": NESTED, "int4": Cost(0.9, 0.26)}, ("nested_fp8", "int4")),
        # No fp8, and an int8 that is rebuilt at every call.
        ({"int8": Cost(4.0, 0.5), "int4": Cost(1.1, 0.26)}, ("int4",)),
        ({"int8": Cost(4.0, 0.5)}, ("int8",)),
        # What frees nothing is no variant.
        ({"int8": Cost(0.5, 1.0), "int4": Cost(0.8, 0.3)}, ("int4",)),
        ({}, ()),
    ],
)
def test_order(costs: dict[str, Cost], order: tuple[str, ...]) -> None:
    assert order_of(costs) == order
    assert order_of(dict(reversed(costs.items()))) == order


@given(
    st.dictionaries(
        st.sampled_from(sorted(NOMINAL_BITS.keys() - {FULL})),
        st.builds(Cost, st.floats(0.1, 5), st.floats(0.1, 0.9)),
        min_size=1,
    )
)
def test_every_order_is_one_of_a_plan(costs: dict[str, Cost]) -> None:
    order = order_of(costs)
    bits = [NOMINAL_BITS[name] for name in (FULL, *order)]
    assert len(order) >= 1 and bits == sorted(set(bits), reverse=True)
    sizes = [1.0, *(costs[name].size for name in order)]
    assert sizes == sorted(set(sizes), reverse=True)
    assert all(costs[name].time <= 1 for name in order[1:])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A GPU as far as names go. Returned: one entry for every measurement."""
    measured: list[int] = []

    def available(
        shapes: list[tuple[int, int]], dtype: torch.dtype
    ) -> dict[str, Variant]:  # CPU variants: their names and kernels are what matters
        return {
            name: create_variant(name, "cpu", create_quantizer("rtn"))
            for name in ("nested_fp8", "int4")
        }

    def measure(shapes, dtype, variants, identity):  # type: ignore[no-untyped-def]
        measured.append(len(measured))
        times = {name: [1.0] * len(BATCHES) for name in (FULL, *variants)}
        return KernelTimes(identity, times, {"nested_fp8": NESTED, "int4": Cost(1.3, 0.26)})

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200 (test)")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(kernel_times, "available_variants", available)
    monkeypatch.setattr(kernel_times, "measure", measure)
    return measured


def test_times_are_measured_once_per_gpu_and_model(
    gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stored_times(SHAPES, torch.bfloat16) is None
    first = measured_times(SHAPES, torch.bfloat16)
    assert first is not None and first.order == ("nested_fp8",)
    assert measured_times(SHAPES, torch.bfloat16) == stored_times(SHAPES, torch.bfloat16) == first
    assert len(gpu) == 1
    measured_times(SHAPES[:1], torch.bfloat16)
    measured_times(SHAPES, torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    measured_times(SHAPES, torch.bfloat16)
    monkeypatch.setattr(kernel_times, "installed_version", lambda: "0.6.0")
    measured_times(SHAPES, torch.bfloat16)
    assert len(gpu) == 5


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"costs": {}}'])
def test_a_damaged_file_is_measured_again(
    gpu: list[int], content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = measured_times(SHAPES, torch.bfloat16)
    (file,) = (tmp_path / "kernel_times").iterdir()
    file.write_bytes(content)
    assert stored_times(SHAPES, torch.bfloat16) is None
    assert "kernels are timed again" in caplog.text
    assert measured_times(SHAPES, torch.bfloat16) == first
    assert len(gpu) == 2
    assert stored_times(SHAPES, torch.bfloat16) == first


def test_a_file_of_something_else_is_not_used(gpu: list[int], tmp_path: Path) -> None:
    first = measured_times(SHAPES, torch.bfloat16)
    assert first is not None
    (file,) = (tmp_path / "kernel_times").iterdir()
    other = msgspec.structs.replace(first, measured_for={**first.measured_for, "torch": "3.0"})
    file.write_bytes(msgspec.json.encode(other))
    assert stored_times(SHAPES, torch.bfloat16) is None


def test_failures_leave_the_default_order(
    gpu: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> KernelTimes:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(kernel_times, "measure", fail)
    assert measured_times(SHAPES, torch.bfloat16) is None
    assert "cannot be measured (CUDA out of memory.); the default order is used" in caplog.text


def test_a_cache_that_cannot_be_written_costs_only_time(
    gpu: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    assert measured_times(SHAPES, torch.bfloat16) is not None
    assert measured_times(SHAPES, torch.bfloat16) is not None
    assert len(gpu) == 2


def test_the_status_is_plain_json(gpu: list[int]) -> None:
    found = measured_times(SHAPES, torch.bfloat16)
    assert found is not None
    status = msgspec.json.decode(msgspec.json.encode(found.status()))
    assert status["order"] == ["nested_fp8"]
    assert status["costs"]["int4"] == {"time": 1.3, "size": 0.26}
    assert len(status["milliseconds"][FULL]) == len(status["batches"])


def test_a_kernel_that_would_have_to_be_compiled_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path))
    assert available_variants(SHAPES, torch.bfloat16).keys() == {"int8"}
    from sglang_morph.precision.variants.marlin_build import libraries

    for library in libraries(torch.bfloat16):
        library.parent.mkdir(parents=True)
        library.touch()
    assert available_variants(SHAPES, torch.bfloat16).keys() == {"int8", "int4"}
    assert available_variants([(96, 256)], torch.bfloat16).keys() == {"int8"}
    assert available_variants(SHAPES, torch.float16).keys() == {"int8"}


def test_flags_override() -> None:
    plain = MorphOptions(memory_backend="layer_swap")
    assert follows_kernel_times(plain, "cuda")
    assert not follows_kernel_times(plain, "cpu")
    for given_by in ({"variants": ("fp8",)}, {"plan": "plan.json"}, {"bundle": "folder"}):
        options = MorphOptions(memory_backend="layer_swap", **given_by)  # type: ignore[arg-type]
        assert not follows_kernel_times(options, "cuda")
    assert follows_kernel_times(MorphOptions(memory_backend="layer_swap", bundle="auto"), "cuda")
    assert not follows_kernel_times(MorphOptions(memory_backend="semi_unified"), "cuda")
