from __future__ import annotations

from fake_engine import FakeEngine
