from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch

from memory_backends.arena import Arena
from memory_backends.base import BackendError, PageRange
from memory_backends.slab import ALIGNMENT, Image, Layout


def test_every_tensor_is_aligned_and_survives_packing() -> None:
    tensors = {
        "a": torch.arange(7, dtype=torch.uint8),
        "b": torch.randn(3, 5),
        "c": torch.randn(2, 2).to(torch.bfloat16),
    }
    image = Image.pack(tensors, pinned=False)
    for name, view in image.layout.views(image.data).items():
        assert torch.equal(view, tensors[name])
        assert image.layout.parts[name].offset % ALIGNMENT == 0
    assert image.layout.nbytes % ALIGNMENT == 0


def test_a_transposed_tensor_is_packed_by_value() -> None:
    matrix = torch.randn(4, 6).t()
    image = Image.pack({"m": matrix}, pinned=False)
    assert torch.equal(image.layout.views(image.data)["m"], matrix)


def test_slabs_lie_behind_the_base_pages_without_overlap() -> None:
    arena = Arena(base_pages=5, page_bytes=100, slab_bytes=[512, 256], device=torch.device("cpu"))
    start = arena.storage.data_ptr()
    offsets = [arena.slab(i).data_ptr() - start for i in range(2)]
    assert offsets == [512, 1024]
    assert arena.storage.numel() == arena.pages * 100 >= 1280


def test_tail_pages_touch_neither_the_head_nor_the_next_slab() -> None:
    arena = Arena(base_pages=5, page_bytes=100, slab_bytes=[512, 256], device=torch.device("cpu"))
    # Slab 0 is bytes [512, 1024): behind a head of 100 bytes whole pages are [700, 1000).
    assert arena.tail_pages(0, 100) == PageRange(7, 10)
    assert len(arena.tail_pages(0, 512)) == 0


def test_layout_keeps_the_order_of_the_tensors() -> None:
    layout = Layout.of({"z": torch.zeros(1), "a": torch.zeros(1)})
    assert list(layout.parts) == ["z", "a"]


class Cudart:
    """Page-locking where there is no GPU: locks by address, and what was there when they ended."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}
        self.unlocked: list[bytes] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if not self.error:
            self.locked[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        nbytes = self.locked.pop(address)
        self.unlocked.append(ctypes.string_at(address, nbytes))
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return cudart


def test_host_memory_is_unlocked_with_its_last_tensor_and_before_it_is_freed(
    cudart: Cudart,
) -> None:
    matrix = torch.arange(32 << 20, dtype=torch.uint8)  # so large that freeing it unmaps it
    image = Image.pack({"m": matrix}, pinned=True)
    assert cudart.locked == {image.data.data_ptr(): matrix.nbytes}
    view = image.layout.views(image.data)["m"][1:3]
    del image
    gc.collect()
    assert cudart.locked and view.tolist() == [1, 2]
    del view
    gc.collect()
    assert not cudart.locked
    assert cudart.unlocked == [matrix.numpy().tobytes()]


def test_memory_that_cannot_be_locked_is_one_clear_line(cudart: Cudart) -> None:
    cudart.error = 2
    with pytest.raises(BackendError, match="page-locked .* raise the memory limit") as caught:
        Image.pack({"m": torch.zeros(8)}, pinned=True)
    assert "\n" not in str(caught.value)
    gc.collect()
    assert not cudart.unlocked
