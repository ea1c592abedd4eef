"""Makes the benchmarks' helpers importable: they are scripts beside the package, not part of it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
