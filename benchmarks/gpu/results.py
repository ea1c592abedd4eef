"""Figures of a part as they come: one a line, and all of them in a file from the first one on. Needs no PyTorch."""

from __future__ import annotations

import json
from pathlib import Path


class Results:
    """By name, in a file from the first one on."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._found: dict[str, dict] = {}

    def tell(self, name: str, value: object, target: float | None = None, passed: bool | None = None) -> None:
        self._found[name] = {"value": value, "target": target, "pass": None if passed is None else bool(passed)}
        self._path.write_text(json.dumps(self._found, indent=1))
        rounded = json.dumps(json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.4g}")))
        print(f"{name}: {rounded} {'' if target is None else f'(target {target})'}", flush=True)
