"""On several cores: which tests stay together, and which come first. A plugin of pytest-xdist's, for any ``--dist``.

A file is run by one worker, in its order: what its tests share (an engine, a model) is made once. The files of
``TOGETHER`` share servers, so a folder of them goes to one worker, too. The long ones begin, so that none is left when
all else is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/e2e/",)

LONG_ONES = (
    "tests/e2e/", "tests/live/verify/test_faults.py", "tests/test_demo.py", "tests/live/engine/test_engine.py",
    "tests/sim/test_faults.py", "tests/core/test_checkpoints.py", "tests/live/", "tests/simulate/", "tests/core/",
    "tests/sim/", "tests/server/",
)  # fmt: skip
"""The longest first; what no entry begins is short."""


def unit_of(nodeid: str) -> str:
    """What is run by one worker: a file, or a folder of those that belong together."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


def rank(nodeid: str) -> int:
    """Where a test's unit stands in the queue."""
    return next((i for i, begin in enumerate(LONG_ONES) if nodeid.startswith(begin)), len(LONG_ONES))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A worker's list of tests is the queue that its controller hands out."""
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
