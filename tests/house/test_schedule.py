"""How tests are divided among cores (``tests/schedule.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedule import LONG_ONES, TOGETHER, pytest_xdist_make_scheduler, rank, unit_of

ROOT = Path(__file__).parents[2]


def test_what_is_named_is_there() -> None:
    assert all((ROOT / begin).exists() for begin in (*LONG_ONES, *TOGETHER))


def test_files_stay_whole_and_folders_with_shared_servers_too() -> None:
    assert unit_of("tests/sim/test_faults.py::test_a[x::y]") == "tests/sim/test_faults.py"
    assert unit_of("tests/e2e/test_drain.py::test_a") == unit_of("tests/e2e/test_lm_eval.py::test_b")
    assert rank("tests/e2e/test_drain.py::test_a") < rank("tests/live/wire/test_codec.py::test_b")
    assert rank("tests/test_config.py::test_a") == len(LONG_ONES)


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
