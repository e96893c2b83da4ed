"""The host driver: memory moves with its content, CUDA's rules hold, stray accesses fault."""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from memory_backends.vmm import MIB, ByteRange, PhysicalMemory, VmmError, create_driver
from memory_backends.vmm.host import HostDriver
from tests.memory_backends.vmm.faulty import Census, discard

G = 2 * MIB


@pytest.fixture
def census() -> Census:
    return Census()


@pytest.fixture
def driver(census: Census) -> Iterator[HostDriver]:
    driver = HostDriver()
    yield driver
    discard(driver)


@pytest.fixture
def reserved(driver: HostDriver) -> ByteRange:
    return driver.reserve(4 * G)


def place(driver: HostDriver, address: int, memory: PhysicalMemory | None = None) -> PhysicalMemory:
    memory = memory or driver.create(G)
    driver.map(address, memory)
    driver.set_access(address, memory.nbytes)
    return memory


def test_memory_moves_with_its_content(
    driver: HostDriver, reserved: ByteRange, census: Census
) -> None:
    first, last = reserved.start, reserved.start + 3 * G
    memory = place(driver, first)
    tensor = driver.tensor(first, 4 * G)
    tensor[:G] = torch.arange(G, dtype=torch.int32).to(torch.uint8)
    content = tensor[:G].clone()
    driver.unmap(first, G)
    place(driver, last, memory)
    assert torch.equal(tensor[3 * G :], content)
    assert [(m.start, m.stop, m.access) for m in census.mappings()] == [(last, last + G, "rw-s")]


def test_memory_lives_until_released_and_unmapped(
    driver: HostDriver, reserved: ByteRange, census: Census
) -> None:
    memory = place(driver, reserved.start)
    tensor = driver.tensor(reserved.start, G)
    driver.release(memory)
    assert census.files() == 0 and len(census.mappings()) == 1
    tensor.fill_(7)
    assert int(tensor.sum()) == 7 * G
    driver.unmap(reserved.start, G)
    assert census.mappings() == set()


def test_access_and_unmapping_take_several_mappings(
    driver: HostDriver, reserved: ByteRange, census: Census
) -> None:
    memories = [driver.create(G), driver.create(2 * G)]
    driver.map(reserved.start, memories[0])
    driver.map(reserved.start + G, memories[1])
    driver.set_access(reserved.start, 3 * G)
    driver.tensor(reserved.start, 3 * G).fill_(1)
    driver.unmap(reserved.start, 3 * G)
    assert census.mappings() == set()


Misuse = Callable[[HostDriver, ByteRange, PhysicalMemory], object]

MISUSES: dict[str, tuple[Misuse, str]] = {
    "size": (lambda d, r, m: d.create(G + 4096), "multiple of the granularity"),
    "nothing": (lambda d, r, m: d.reserve(0), "multiple of the granularity"),
    "occupied": (lambda d, r, m: d.map(r.start, d.create(G)), "already"),
    "unaligned": (lambda d, r, m: d.map(r.start + 4096, m), "unaligned"),
    "beyond": (lambda d, r, m: d.map(r.stop, m), "not reserved"),
    "partly beyond": (lambda d, r, m: d.map(r.stop - G, d.create(2 * G)), "not reserved"),
    "unmap part": (lambda d, r, m: d.unmap(r.start, G // 2), "whole mappings"),
    "unmap more": (lambda d, r, m: d.unmap(r.start, 2 * G), "whole mappings"),
    "access to nothing": (lambda d, r, m: d.set_access(r.start + G, G), "whole mappings"),
    "free while mapped": (lambda d, r, m: d.free(r), "still mapped"),
    "free part": (lambda d, r, m: d.free(ByteRange(r.start, r.start + G)), "whole reservation"),
    "strange handle": (lambda d, r, m: d.map(r.start + G, PhysicalMemory(0, G)), "handle 0"),
    "release twice": (lambda d, r, m: (d.release(m), d.release(m)), "no physical memory"),
    "tensor beyond": (lambda d, r, m: d.tensor(r.start, 5 * G), "not reserved"),
    "tensor over nothing": (lambda d, r, m: d.tensor(r.start + G, G), "nothing is mapped"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_in_one_line_and_changes_nothing(
    driver: HostDriver, reserved: ByteRange, census: Census, name: str
) -> None:
    misuse, message = MISUSES[name]
    memory = place(driver, reserved.start)
    before = census.mappings()
    with pytest.raises(VmmError, match=message) as caught:
        misuse(driver, reserved, memory)
    assert "\n" not in str(caught.value)
    assert census.mappings() == before


def test_a_tensor_keeps_memory_alive_and_the_last_one_gives_it_back(census: Census) -> None:
    driver = HostDriver()
    reserved = driver.reserve(2 * G)
    place(driver, reserved.start)
    view = driver.tensor(reserved.start, 2 * G)[:8].view(torch.int64)
    del driver
    gc.collect()
    assert len(census.mappings()) == census.files() == 1
    assert int(view.fill_(5)) == 5
    del view
    gc.collect()
    assert census.mappings() == set() and census.files() == 0


def test_too_many_open_files_say_what_to_do(driver: HostDriver) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(VmmError, match="larger units"):
            driver.create(G)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


Touch = Callable[[torch.Tensor], object]

TOUCHES: dict[str, tuple[Touch, bool]] = {
    "mapped": (lambda t: t[G - 1].fill_(1), False),
    "read past": (lambda t: int(t[G]), True),
    "write past": (lambda t: t[G].fill_(1), True),
    "unmapped again": (lambda t: int(t[2 * G]), True),
    "without access": (lambda t: int(t[3 * G]), True),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_a_stray_access_ends_the_process(
    driver: HostDriver, reserved: ByteRange, name: str
) -> None:
    touch, faults = TOUCHES[name]
    place(driver, reserved.start)
    place(driver, reserved.start + 2 * G)
    driver.unmap(reserved.start + 2 * G, G)
    driver.map(reserved.start + 3 * G, driver.create(G))
    tensor = driver.tensor(reserved.start, 4 * G)
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            touch(tensor)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (-signal.SIGSEGV if faults else 0)


def test_create_driver_knows_the_cpu_and_refuses_others() -> None:
    assert isinstance(create_driver(torch.device("cpu")), HostDriver)
    with pytest.raises(VmmError, match="'meta' devices .* layer_swap"):
        create_driver(torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_clear_line() -> None:
    with pytest.raises(VmmError, match="no usable GPU"):
        create_driver(torch.device("cuda"))
