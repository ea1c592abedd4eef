"""How tests are divided among cores (``tests/schedule.py``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from schedule import (
    LONG_ONES,
    TOGETHER,
    from_a_place_of_its_own,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
    rank,
    unit_of,
)

ROOT = Path(__file__).parents[2]


def test_what_is_named_is_there() -> None:
    assert all((ROOT / begin).exists() for begin in (*LONG_ONES, *TOGETHER))


def test_files_stay_whole_and_folders_with_shared_servers_too() -> None:
    assert unit_of("tests/sim/test_faults.py::test_a[x::y]") == "tests/sim/test_faults.py"
    assert unit_of("tests/e2e/test_drain.py::test_a") == unit_of("tests/e2e/test_lm_eval.py::test_b")
    assert rank("tests/e2e/test_drain.py::test_a") < rank("tests/live/wire/test_codec.py::test_b")
    assert rank("tests/test_config.py::test_a") == len(LONG_ONES)


def test_workers_collect_the_same_from_places_of_their_own() -> None:
    for num_workers in (1, 2, 3, 9):
        orders = [from_a_place_of_its_own(list("abcdefg"), worker, num_workers) for worker in range(num_workers)]
        assert all(sorted(order) == list("abcdefg") for order in orders)
        assert len({order[0] for order in orders}) == min(num_workers, 7)
    assert from_a_place_of_its_own([], 1, 2) == []


@pytest.mark.parametrize(("named", "expected"), [(None, 5), ("4", 4)])
def test_there_is_one_worker_more_than_cores(
    named: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    if named is not None:
        monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", named)
    asked = pytest_xdist_auto_num_workers()
    next(asked)
    with pytest.raises(StopIteration) as end:
        asked.send(4)
    assert end.value.value == expected


def test_garbage_is_collected_while_tests_run_in_the_controller_too(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pytestconfig.pluginmanager.hasplugin("xdist"):
        pytest.skip("pytest-xdist is off")
    (tmp_path / "looks.py").write_text(
        "import gc\n"
        "def pytest_sessionfinish(session):\n"
        "    session.exitstatus = 0 if gc.isenabled() and gc.get_freeze_count() else 9\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "looks", "-p", "no:cacheprovider", "-q"]
    run = subprocess.run(
        [*command, f"{__file__}::test_what_is_named_is_there"], cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout


def test_the_installed_xdist_takes_units_and_order_from_here(pytestconfig: pytest.Config) -> None:
    """By its own names, which have changed before."""
    if not pytestconfig.pluginmanager.hasplugin("xdist"):
        pytest.skip("pytest-xdist is off")
    option = pytestconfig.option
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(option, "loadscopereorder", True, raising=False)
        patch.setattr(option, "tx", ["2*popen"])
        scheduler = pytest_xdist_make_scheduler(pytestconfig, None)
        assert scheduler._split_scope("tests/e2e/test_drain.py::test_a") == "tests/e2e/"
        assert scheduler.numnodes == 2 and not option.loadscopereorder
