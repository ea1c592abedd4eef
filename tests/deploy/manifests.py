"""What the tests of ``deploy/`` share: the folder, YAML, and a command line parsed as ``jettison serve`` parses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import yaml
from typer.testing import CliRunner

from jettison.cli.main import app
from jettison.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def documents(path: Path) -> list[dict]:
    """Of a file of YAML."""
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each is not None]


def by_kind(path: Path) -> dict[str, dict]:
    """Kind -> its only document."""
    found = {each["kind"]: each for each in documents(path)}
    assert len(found) == len(documents(path))
    return found


def served(arguments: Sequence[str]) -> EngineConfig:
    """What ``jettison serve`` with these arguments would serve. Fails on a flag or key that it does not know."""
    with patch("jettison.cli.serve._run", return_value=0) as server:
        done = CliRunner().invoke(app, ["serve", *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return server.call_args.args[0]
