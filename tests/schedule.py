"""On several cores: how many workers there are, which tests stay together, and which come first. A plugin of
pytest-xdist's, for any ``--dist``.

A file is run by one worker, in its order: what its tests share (an engine, a model) is made once. The files of
``TOGETHER`` share servers, or parsed sources, so a folder of them goes to one worker, too. The long ones begin, so that
none is left when all else is over. Where no module is compiled yet, each worker begins to collect in another place, and
finds compiled what the others have passed.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

Child = TypeVar("Child")

TOGETHER = ("tests/e2e/", "tests/house/")

LONG_ONES = (
    "tests/e2e/", "tests/live/verify/test_faults.py", "tests/test_demo.py", "tests/live/engine/test_engine.py",
    "tests/house/", "tests/sim/test_faults.py", "tests/core/test_checkpoints.py", "tests/live/", "tests/simulate/",
    "tests/core/", "tests/sim/", "tests/server/",
)  # fmt: skip
"""The longest first; what no entry begins is short."""


def unit_of(nodeid: str) -> str:
    """What is run by one worker: a file, or a folder of those that belong together."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


def rank(nodeid: str) -> int:
    """Where a test's unit stands in the queue."""
    return next((i for i, begin in enumerate(LONG_ONES) if nodeid.startswith(begin)), len(LONG_ONES))


def from_a_place_of_its_own(children: list[Child], worker: int, num_workers: int) -> list[Child]:
    """The children of a folder as one of the workers goes through them."""
    first = len(children) * worker // num_workers
    return children[first:] + children[:first]


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One more than there are cores, which would idle while a test waits for processes, sockets and time limits."""
    num_cores = yield
    return num_cores if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else num_cores + 1


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Of a folder, in a worker: see the top."""
    report = yield
    told = getattr(collector.config, "workerinput", None)
    if told is not None and isinstance(collector, pytest.Directory) and report.passed:
        number = int(told["workerid"].removeprefix("gw"))
        report.result = from_a_place_of_its_own(report.result, number, told["workercount"])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """A worker's list of tests is the queue that its controller hands out, so it is the same in all of them."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: str(item.path))
    yield
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """xdist's own, of whole units instead of modules and classes, in the order of the list."""
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False  # by numbers of tests
    return ByUnit(config, log)
