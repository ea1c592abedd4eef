"""For every test: hypothesis without deadlines (no test asserts a time) and with the same examples in every run.

``HYPOTHESIS_PROFILE=explore`` draws new examples instead.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))
