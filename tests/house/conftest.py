"""The package's sources, parsed once for all house rules."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class SourceModule:
    """One module of ``jettison``."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """The part of the name after ``jettison.``; empty for the package itself."""
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
    """Every module below ``src/jettison``, by name."""
    modules = []
    for path in sorted((ROOT / "src" / "jettison").rglob("*.py")):
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(SourceModule(name, path, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return modules
