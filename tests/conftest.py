"""For every test: hypothesis without deadlines (no test asserts a time) and with the same examples in every run, an
order on several cores (``schedule``), and no process left behind (``leftovers``).

``HYPOTHESIS_PROFILE=explore`` draws new examples instead.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode puts no test folder on the path
pytest_plugins = ["leftovers", "schedule"]

from longrun import LONG  # noqa: E402 - of that folder

gc.disable()  # until all tests are collected: what is imported and collected stays

settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=100 if LONG else 60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """A machine with a GPU may have no pytest-asyncio: its settings in pyproject.toml are known all the same."""
    if not pluginmanager.has_plugin("asyncio"):
        for name in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(name, "pytest-asyncio's own")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """From now on garbage is collected, but what stays is not looked at. Also in xdist's controller, which collects no
    tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def warm_workers() -> Iterator[None]:
    """Torch is imported once in a run for all workers of its clusters: their fork server outlives each of them. One is
    for all clusters with the same environment, in which pytest tells each test's name."""
    from jettison.live.host import keeper
    from jettison.live.host.forkserver import fork_servers_kept

    def without_a_name(num_threads: int, environment_of=keeper.worker_environment) -> dict[str, str]:
        environment = environment_of(num_threads)
        environment.pop("PYTEST_CURRENT_TEST", None)
        return environment

    with fork_servers_kept(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "worker_environment", without_a_name)
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of public traces and tables (docs/workloads.md); the test skips where there is none."""
    named = os.environ.get("JETTISON_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "arrivals").is_dir():
        pytest.skip(f"no public data: {folder} has no arrivals folder and JETTISON_DATA names none")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of a small trained model, fetched once into the user's cache; the test skips where it cannot be had."""
    from jettison.errors import JettisonError
    from jettison.modelfiles.fetching import fetch_model

    try:
        return fetch_model("smollm2")[0]
    except JettisonError as error:
        pytest.skip(f"the trained model cannot be had: {error}")
