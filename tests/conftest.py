"""For every test: hypothesis without deadlines (no test asserts a time) and with the same examples in every run, an
order for what starts processes, and no process left behind.

``HYPOTHESIS_PROFILE=explore`` draws new examples instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode puts no test folder on the path
pytest_plugins = ["leftovers"]

IN_ORDER = ("tests/live/", "tests/e2e/", "tests/server/", "tests/transport/")
"""Folders whose tests start processes or answer over sockets in bounded waits: beside each other they starve."""
IN_ONE_PROCESS = tuple(
    f"tests/live/{name}.py"
    for name in ("engine/test_safepoints", "engine/test_seventh_rung", "verify/test_scenarios", "verify/test_verify")
)
"""Of these folders what does neither: whole clusters in one process, whose clock is a counter."""

settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """A machine with a GPU may have no pytest-asyncio: its settings in pyproject.toml are known all the same."""
    if not pluginmanager.has_plugin("asyncio"):
        for name in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(name, "pytest-asyncio's own")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On several cores (``--dist loadgroup``) the live part runs in one worker, in order, beside all else."""
    for item in items:
        in_order = item.nodeid.startswith(IN_ORDER) and not item.nodeid.startswith(IN_ONE_PROCESS)
        if item.get_closest_marker("live") or in_order:
            item.add_marker(pytest.mark.xdist_group("live"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of public traces and tables (docs/workloads.md); the test skips where there is none."""
    named = os.environ.get("JETTISON_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "arrivals").is_dir():
        pytest.skip(f"no public data: {folder} has no arrivals folder and JETTISON_DATA names none")
    return folder
