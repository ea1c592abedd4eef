"""The kernels on other processors: a program of checks in C, run here and, emulated, on AArch64 (NEON).

Debian's packages for the second: ``gcc-aarch64-linux-gnu``, ``libc6-dev-arm64-cross``, ``qemu-user``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from jettison.device.kernels import build

CHECKS = Path(__file__).with_name("other_processor.c")
FLAGS = ["-std=gnu11", "-O2", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread"]


@pytest.mark.parametrize(
    ("compiler", "emulator"),
    [(shlex.split(os.environ.get("CC", "cc")), []), (["aarch64-linux-gnu-gcc", "-static"], ["qemu-aarch64"])],
    ids=["here", "aarch64"],
)
def test_products_and_attention(tmp_path: Path, compiler: list[str], emulator: list[str]) -> None:
    for program in (compiler[0], *emulator):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    sources = [str(CHECKS), *(str(build.SOURCES / name) for name in ("kernels.c", "pool.c"))]
    binary = str(tmp_path / "checks")
    subprocess.run([*compiler, *FLAGS, "-DVARIANT=portable", *sources, "-lm", "-o", binary], check=True)
    done = subprocess.run([*emulator, binary], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("0 of "), done.stdout
