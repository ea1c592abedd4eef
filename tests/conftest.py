"""For every test: hypothesis without deadlines (no test asserts a time) and with the same examples in every run.

``HYPOTHESIS_PROFILE=explore`` draws new examples instead.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of public traces and tables (docs/workloads.md); the test skips where there is none."""
    named = os.environ.get("JETTISON_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "arrivals").is_dir():
        pytest.skip(f"no public data: {folder} has no arrivals folder and JETTISON_DATA names none")
    return folder
