"""A limit on a process's addresses: what is told before libraries are loaded, and what of an error that it explains."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator

import pytest

from jettison.errors import BudgetError, JettisonError, MappingError, OutOfBlocksError, UserError
from jettison.live.machine.address_space import (
    PROGRAM_BYTES,
    address_limit,
    check_address_limit,
    explained,
    shortage_hint,
    spans_complaint,
)

GIB = 1 << 30
LIMIT = 1 << 42
"""Far more than these tests need."""


def with_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture
def limit() -> Iterator[None]:
    yield from with_limit(LIMIT)


@pytest.fixture
def no_limit() -> Iterator[None]:
    if resource.getrlimit(resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY:
        pytest.skip("this process has a limit that it cannot lift")
    yield from with_limit(resource.RLIM_INFINITY)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    with pytest.raises(type(error)) as caught:
        raise error from cause
    return caught.value


def of_the_kernel() -> MappingError:
    cause = OSError(errno.ENOMEM, "Cannot allocate memory")
    return raised(MappingError(f"no span of 4096 bytes of addresses: {cause}"), cause)


SIGNS = [
    MemoryError(),
    MemoryError("Unable to allocate 688. KiB for an array"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    RuntimeError("can't start new thread"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to"),
    RuntimeError("std::bad_alloc"),
    raised(ImportError("numpy cannot be imported\nIMPORTANT: read this"), MemoryError()),
]


@pytest.mark.parametrize("error", SIGNS, ids=repr)
def test_signs_of_too_few_addresses_are_a_user_s_line_with_the_limit(error: Exception, limit: None) -> None:
    told = explained(error)
    assert type(told) is UserError and "\n" not in str(told)
    assert all(word in str(told) for word in ("ulimit -v", "4096.00 GiB", "ulimit -v unlimited", "1.00 GiB"))
    assert explained(told) is told, "it is said once"


@pytest.mark.parametrize("error", SIGNS, ids=repr)
def test_without_a_limit_an_error_is_what_it_was(error: Exception, no_limit: None) -> None:
    assert address_limit() is None and explained(error) is error
    assert shortage_hint() == "" and spans_complaint(1 << 60) is None
    check_address_limit()


def test_errors_of_ours_keep_what_they_say_and_users_errors_their_class(limit: None) -> None:
    budget = explained(raised(BudgetError("the system has no addresses for a budget of 1 bytes"), of_the_kernel()))
    assert type(budget) is BudgetError
    assert str(budget).startswith("the system has no addresses for a budget of 1 bytes; ulimit -v lets")
    other = explained(raised(JettisonError("it failed"), MemoryError()))
    assert type(other) is UserError and str(other).startswith("it failed; ulimit -v lets")


@pytest.mark.parametrize("error", [
    ValueError("wrong"), OutOfBlocksError("none left"), BudgetError("4096 bytes are needed"),
    OSError(errno.ENOSPC, "No space left on device"), ImportError("No module named 'x'"),
], ids=repr)
def test_other_errors_are_left_alone(error: Exception, limit: None) -> None:
    assert explained(error) is error


def test_an_error_that_is_its_own_cause_ends(limit: None) -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    assert explained(one) is one


def test_what_a_worker_reserves_counts_beside_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jettison.live.machine.address_space.address_limit", lambda: 4 * GIB)
    assert spans_complaint(4 * GIB - PROGRAM_BYTES) is None
    line = spans_complaint(4 * GIB)
    assert line is not None and "4.00 GiB" in line and "about 5.00 GiB" in line and "--memory" in line
    assert "4.00 GiB" in shortage_hint()
    check_address_limit()
    monkeypatch.setattr("jettison.live.machine.address_space.address_limit", lambda: PROGRAM_BYTES - 1)
    with pytest.raises(UserError, match=r"needs at least 1\.00 GiB"):
        check_address_limit()
