"""Interpreters for clients that are no part of the extra ``dev``: each in an environment of its own, made once.

An environment stands on the one that the tests run in (its packages are found behind the client's own), so a client
brings what it lacks or pins otherwise: tens of megabytes, not gigabytes. It is made and used where
``JETTISON_CLIENTS=1`` asks for it (``make test-clients``). Elsewhere tests of the client are skipped, with the reason.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / ".venv-clients"
WANTED = os.environ.get("JETTISON_CLIENTS", "0") not in ("", "0")
MOST_S = 120.0
MOST_BYTES = 500_000_000


def python_with(module: str, package: str) -> Path:
    """An interpreter that has ``module``, of the Python index's ``package``. Skips where none can be had."""
    if importlib.util.find_spec(module) is not None:
        return Path(sys.executable)
    if not WANTED:
        pytest.skip(f"{package} is not installed: make test-clients installs it beside the repository's own")
    folder = FOLDER / package
    if not (folder / "ready").exists():
        why_not = _made(folder, package)
        if why_not is not None:
            shutil.rmtree(folder, ignore_errors=True)
            pytest.skip(f"{package} cannot be had: {why_not}")
    return folder / "bin" / "python"


def _made(folder: Path, package: str) -> str | None:
    """Make the environment; why it could not be, or None."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False, symlinks=True)
    (own,) = (folder / "lib").glob("python*/site-packages")
    (own / "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
               "--only-binary=:all:", package]  # fmt: skip
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S, check=False)
    except subprocess.TimeoutExpired:
        return f"pip took more than {MOST_S:g} s"
    if ended.returncode != 0:
        return (ended.stderr.strip().splitlines() or ["pip failed"])[-1][:200]
    num_bytes = sum(path.stat().st_size for path in own.rglob("*") if path.is_file())
    if num_bytes > MOST_BYTES:
        return f"it takes {num_bytes / 1e6:.0f} MB"
    (folder / "ready").touch()
    return None
