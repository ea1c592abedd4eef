"""What a bare GPU machine must be able to load: PyTorch, Triton and numpy are all that there is."""

from __future__ import annotations

import subprocess
import sys

import pytest

MISSING = ("msgspec", "starlette", "uvicorn", "httptools", "multipart", "pytest_asyncio", "xxhash")


def load(names: list[str], without: tuple[str, ...]) -> None:
    script = (
        "import importlib, sys\n"
        f"for name in {without!r}: sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_kernels_load_on_a_bare_machine() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    load(["jettison.device.cuda.kernels"], MISSING)


def test_the_list_of_work_loads_without_triton() -> None:
    load(["jettison.device.cuda", "jettison.device.cuda.tiles", "jettison.device.cuda.worklist"], (*MISSING, "triton"))
