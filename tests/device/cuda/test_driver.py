"""Calls of the driver: failures in one line, a fall-back for machines that export nothing; and the fake's own rules."""

from __future__ import annotations

import sys
from contextlib import suppress

import pytest
import torch
from fakecuda import MIB, CUresult, FakeBindings

from jettison.device.cuda.driver import CardFullError, Driver
from jettison.device.cuda.pages import PagePool
from jettison.errors import BudgetError, ConfigError, MappingError

SIZE = 2 * MIB


@pytest.fixture
def fake():
    fake = FakeBindings(16 * MIB)
    yield fake
    fake.close()


@pytest.fixture
def driver(fake):
    driver = Driver(0, fake)
    driver.start()
    yield driver
    driver.close()
    assert fake.contexts == 0


def refused(driver, call, *arguments) -> str:
    """One line that names the driver's own failure."""
    with pytest.raises(MappingError) as error:
        getattr(driver, call)(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_without_bindings_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match=r"jettison\[cuda\]"):
        Driver().start()


def test_a_pytorch_without_cuda_is_told_before_any_memory_is_taken(monkeypatch, fake):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ConfigError, match="built without CUDA"):
        PagePool(4 * SIZE, SIZE).start()
    assert not fake.log


def test_without_a_driver_a_card_or_virtual_memory_the_error_says_so(fake):
    def no_library(flags):
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    for change, message in [
        ({"cuInit": no_library}, "no NVIDIA driver"),
        ({"cuInit": lambda flags: (CUresult.CUDA_ERROR_NO_DEVICE,)}, "CUDA_ERROR_NO_DEVICE"),
        ({"num_cards": 0}, "shows 0"),
        ({"has_vmm": False}, "no virtual memory management"),
    ]:
        before = {name: getattr(fake, name) for name in change}
        for name, value in change.items():
            setattr(fake, name, value)
        with pytest.raises(ConfigError, match=message) as error:
            PagePool(4 * SIZE, SIZE, Driver(0, fake)).start()
        assert "\n" not in str(error.value) and fake.contexts == 0
        for name, value in before.items():
            setattr(fake, name, value)
    with pytest.raises(ConfigError, match="no CUDA device 3"):
        Driver(3, fake).start()


def test_too_little_memory_is_told_with_figures(fake):
    with pytest.raises(BudgetError, match=rf"budget of {9 * SIZE} bytes: cuda:0 has {16 * MIB}"):
        PagePool(9 * SIZE, SIZE, Driver(0, fake)).start()
    fake.foreign_bytes = 7 * MIB
    with pytest.raises(BudgetError, match=rf"of {16 * MIB} on cuda:0, {9 * MIB} are free; other processes"):
        PagePool(8 * SIZE, SIZE, Driver(0, fake)).start()
    assert not fake.size and not fake.reserved and fake.contexts == 0
    with pytest.raises(ConfigError, match=f"multiples of {SIZE}"):
        PagePool(8 * MIB, MIB, Driver(0, fake)).start()
    with pytest.raises(ValueError):
        PagePool(8 * MIB, 0, Driver(0, fake))


def test_handles_are_exportable_unless_the_machine_refuses(fake):
    driver = Driver(0, fake)
    driver.start()
    driver.release(driver.create(SIZE))
    assert driver.is_exportable
    fake.exports = False
    for _ in range(2):
        driver.release(driver.create(SIZE))
        assert not driver.is_exportable
    assert fake.log.count("cuMemCreate") == 4, "what was refused once is not asked for again"


def test_a_bad_size_is_not_taken_for_a_refusal_to_export(driver):
    assert "CUDA_ERROR_INVALID_VALUE" in refused(driver, "create", SIZE + 1)
    assert driver.is_exportable
    driver.release(driver.create(SIZE))


def test_the_fake_card_has_the_rules_of_a_real_one(fake, driver):
    span, handle = driver.reserve(4 * SIZE), driver.create(SIZE)
    large = driver.create(2 * SIZE)
    assert "cuMemMap: CUDA_ERROR_NOT_SUPPORTED" in refused(driver, "map", span, SIZE, large), "a part of a handle"
    assert fake.cuMemMap(span, SIZE, SIZE, large, 0)[0] == CUresult.CUDA_ERROR_NOT_SUPPORTED, "an offset"
    driver.map(span, SIZE, handle)
    for address, size, which in [(span, SIZE, handle), (span + 4 * SIZE, SIZE, handle), (span + 1, SIZE, handle)]:
        assert "INVALID_VALUE" in refused(driver, "map", address, size, which), "twice, outside, askew"
    driver.map(span + 2 * SIZE, SIZE, handle)  # a second address of one handle
    for address, size in [(span, 2 * SIZE), (span, 3 * SIZE), (span, MIB)]:
        assert "cuMemSetAccess" in refused(driver, "allow", address, size), "not covered"
        assert "cuMemUnmap" in refused(driver, "unmap", address, size)
    driver.map(span + SIZE, SIZE, driver.create(SIZE))
    driver.allow(span, 3 * SIZE)
    assert "cuMemAddressFree" in refused(driver, "free", span, 4 * SIZE), "still mapped"
    driver.unmap(span + SIZE, 2 * SIZE)
    assert "INVALID_VALUE" in refused(driver, "unmap", span + SIZE, SIZE), "nothing there"


def test_memory_is_free_once_it_is_released_and_mapped_nowhere(fake, driver):
    span, handle = driver.reserve(2 * SIZE), driver.create(SIZE)
    driver.map(span, SIZE, handle)
    driver.map(span + SIZE, SIZE, handle)
    driver.release(handle)
    driver.unmap(span, SIZE)
    assert driver.memory() == (16 * MIB - SIZE, 16 * MIB)
    driver.unmap(span + SIZE, SIZE)
    assert driver.memory() == (16 * MIB, 16 * MIB)
    assert "INVALID_VALUE" in refused(driver, "release", handle)


def test_a_full_card_is_an_error_of_its_own(driver):
    for _ in range(8):
        driver.create(SIZE)
    with pytest.raises(CardFullError, match="0 of 16777216 are free"):
        driver.create(SIZE)


def test_calls_go_to_the_drivers_own_card_whichever_is_current(fake):
    fake.num_cards = 2
    driver = Driver(1, fake)
    driver.start()
    fake.cuCtxSetCurrent("context 0")  # as PyTorch does for a tensor there
    address, view = driver.reserve(SIZE), memoryview(bytearray(4))
    for call, arguments in [
        ("wait", ()), ("memory", ()), ("copy", (address, address, 4)), ("read", (view, address)),
        ("write", (address, view)),
    ]:  # fmt: skip
        for fails in (False, True):
            fake.fail = lambda name: fails and name == "cuCtxSynchronize"  # noqa: B023
            before = len(fake.asked)
            with suppress(MappingError):  # nothing is mapped there
                getattr(driver, call)(*arguments)
            assert [context for _, context in fake.asked[before:]] == ["context 1"], call
            assert fake.current == ["context 0"], call
    driver.free(address, SIZE)
    driver.close()


def test_the_bindings_have_every_name_that_is_used():
    real = pytest.importorskip("cuda.bindings.driver")
    prop, access = real.CUmemAllocationProp(), real.CUmemAccessDesc()
    prop.type = real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = access.location.id = 0
    access.location.type = prop.location.type
    prop.requestedHandleTypes = real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    access.flags = real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    assert real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    assert real.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM is not None
    functions = [name for name in vars(FakeBindings) if name.startswith("cu")]
    assert len(functions) > 15 and all(callable(getattr(real, name)) for name in functions)
    for code in CUresult:
        assert int(getattr(real.CUresult, code.name)) == code
