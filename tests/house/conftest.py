"""The package's sources, parsed once for all house rules."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class SourceModule:
    """One module of ``jettison``, or of the laboratory beside it."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """The part of the name after ``jettison.``; empty for the package itself, ``papers`` for the laboratory."""
        if self.name.partition(".")[0] == "papers":
            return "papers"
        return self.name.partition(".")[2].partition(".")[0]

    def at(self, line: int) -> str:
        """``path:line``, as an editor opens it."""
        return f"{self.path.relative_to(ROOT)}:{line}"


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def sources() -> list[SourceModule]:
    """Every module below ``src/jettison`` and ``papers``, by name."""
    modules = []
    for base, package in ((ROOT / "src", "jettison"), (ROOT, "papers")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules.append(SourceModule(name, path, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return modules
