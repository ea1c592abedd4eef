"""The folder's helpers can be imported: pytest's importlib mode puts no test folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
