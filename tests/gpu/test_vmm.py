"""CUDA's virtual memory: the shared region on a GPU, with forwards in flight elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memory_backends.shared_region import SharedRegion
from memory_backends.slab import Image
from memory_backends.vmm import MIB, VmmDriver, VmmError, check_support, create_driver
from memory_backends.vmm.cuda import CudaDriver
from memory_backends.vmm.transaction import Transaction

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

driver_api = pytest.importorskip("cuda.bindings.driver")

UNIT = 64 * MIB
UNITS = 4
SIZES_MIB = (1, 2, 3, 8, 20, 21, 64, 65, 100, 200, 256, 400, 500, 1000)


@pytest.fixture(scope="module")
def driver() -> VmmDriver:
    return CudaDriver(torch.device("cuda"), aliases=False)


def test_this_gpu_has_virtual_memory() -> None:
    check_support(torch.device("cuda"))
    assert create_driver(torch.device("cuda")).aliases


@pytest.fixture
def region(driver: VmmDriver) -> Iterator[SharedRegion]:
    region = SharedRegion(driver, base_bytes=3 * MIB, units=UNITS, unit_bytes=UNIT)
    for unit in range(UNITS):
        region.residual_tensor[unit * UNIT : (unit + 1) * UNIT] = unit + 1
    region.uploaded(range(UNITS))
    yield region
    torch.cuda.synchronize()
    region.close()


def test_memory_moves_with_its_content(region: SharedRegion) -> None:
    torch.cuda.synchronize()
    for slots, units in ((0, [2, 0]), (2, [3])):
        for gained in region.lend(units):
            content = region.kv_tensor[gained.start : gained.stop].view(len(units), UNIT)
            assert gained.start == region.slot(slots).start
            assert torch.equal(content[:, 0].cpu(), torch.tensor(units, dtype=torch.uint8) + 1)
            assert torch.equal(content.amin(1), content.amax(1))
    region.kv_tensor[region.slot(1).start : region.slot(1).stop] = 77
    torch.cuda.synchronize()
    region.take_back([3, 0, 2])
    assert bool((region.residual_tensor[:UNIT] == 77).all())
    assert bool((region.residual_tensor[UNIT : 2 * UNIT] == 2).all())


def test_lending_leaves_device_memory_in_use_unchanged(region: SharedRegion) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    region.lend([0, 1, 2, 3])
    assert torch.cuda.mem_get_info()[0] == before


def test_memory_is_given_back(driver: VmmDriver) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    region = SharedRegion(driver, base_bytes=3 * MIB, units=UNITS, unit_bytes=UNIT)
    assert before - torch.cuda.mem_get_info()[0] >= UNITS * UNIT
    region.close()
    assert torch.cuda.mem_get_info()[0] == before


def test_misuse_and_shortage_are_one_clear_line(driver: VmmDriver) -> None:
    with pytest.raises(VmmError, match="multiple of the granularity"):
        driver.create(driver.granularity + 1)
    whole = torch.cuda.mem_get_info()[1] // driver.granularity * driver.granularity
    with pytest.raises(VmmError, match="out of memory .* --mem-fraction-static"):
        driver.create(2 * whole)
    with pytest.raises(VmmError, match="cuMemUnmap"):
        driver.unmap(driver.granularity, driver.granularity)


def test_a_failed_block_is_undone(region: SharedRegion, driver: VmmDriver) -> None:
    before = torch.cuda.mem_get_info()[0]
    with pytest.raises(VmmError, match="out of memory"), Transaction(driver) as calls:
        reserved = calls.reserve(UNIT)
        calls.map(reserved.start, calls.create(UNIT))
        calls.create(torch.cuda.mem_get_info()[1] // UNIT * UNIT * 2)
    assert torch.cuda.mem_get_info()[0] == before


def test_aliases_show_the_same_bytes_to_work_in_order() -> None:
    """Written at one address and read at the other, by kernels and copies on two streams."""
    driver = create_driver(torch.device("cuda"))
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    region = SharedRegion(driver, base_bytes=3 * MIB, units=UNITS, unit_bytes=UNIT)
    assert before - torch.cuda.mem_get_info()[0] < (UNITS + 1) * UNIT, "memory is taken once"
    region.uploaded(range(UNITS))
    homes = region.residual_tensor
    [gained] = region.lend(range(UNITS))
    slots = region.kv_tensor[gained.start : gained.stop]
    host = torch.empty(UNITS * UNIT, dtype=torch.uint8, pin_memory=True)
    other, wrong = torch.cuda.Stream(), torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(1, 101):
        slots.fill_(turn)  # through the KV address
        wrong += (homes != turn).sum()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            homes.fill_(turn + 100)  # through the home address
            event = torch.cuda.Event()
            event.record()
        torch.cuda.current_stream().wait_event(event)
        wrong += (slots != turn + 100).sum()
    assert int(wrong) == 0
    host.fill_(7)
    homes.copy_(host, non_blocking=True)  # by a copy engine
    assert bool((slots == 7).all())
    torch.cuda.synchronize()
    region.take_back(range(UNITS))
    region.close()
    torch.cuda.empty_cache()  # of the comparisons above
    # Kernels that were loaded on the way stay; not one unit's memory may.
    assert before - torch.cuda.mem_get_info()[0] < UNITS * UNIT / 2


@pytest.mark.parametrize("aliases", [False, True])
def test_closed_regions_leave_no_address_that_an_allocation_stumbles_over(aliases: bool) -> None:
    driver = CudaDriver(torch.device("cuda"), aliases=aliases)
    for turn in range(4):
        region = SharedRegion(driver, base_bytes=3 * MIB, units=UNITS, unit_bytes=UNIT)
        region.uploaded(range(UNITS))
        region.lend(range(UNITS))
        region.kv_tensor.fill_(turn)
        torch.cuda.synchronize()
        region.take_back(range(turn, UNITS))  # so units are closed at home and at slots
        region.close()
        allocate_plainly()


def test_page_locked_memory_that_was_dropped_does_not_stay_mapped() -> None:
    """A GPU that keeps the pages mapped makes allocations at their addresses fail."""
    for mib in (1, 33, 120, 250) * 2:
        content = torch.full((mib * MIB,), 5, dtype=torch.uint8)
        image = Image.pack({"w": content}, pinned=True)
        assert image.data.is_pinned()
        address = image.data.data_ptr()
        there = torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
        there.copy_(image.data, non_blocking=True)
        del image
        assert not is_locked(address)
        assert bool((there == 5).all())
        del there
        allocate_plainly()


def is_locked(address: int) -> bool:
    attribute = driver_api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    error, *_ = driver_api.cuPointerGetAttribute(attribute, address)
    return bool(error == driver_api.CUresult.CUDA_SUCCESS)


def allocate_plainly() -> None:
    """Through `cudaMalloc`, of many sizes, all at the same time. Launching a kernel in each reports
    an error that an earlier call left behind as well."""
    torch.cuda.empty_cache()
    held = [torch.empty(mib * MIB, dtype=torch.uint8, device="cuda").fill_(1) for mib in SIZES_MIB]
    torch.cuda.synchronize()
    del held
    torch.cuda.empty_cache()
