"""Every kernel compiles for three generations of GPUs: with tensor cores, and without spilling more than a little.

``JETTISON_COMPILE_ALL=1``: every signature (minutes) instead of one of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

MOST_STACK_BYTES = {80: 320, 90: 128, 100: 160}
"""Measured: 264 (tiles of 64 and 128 rows have no room in registers before sm_90), 64 and 104 at most."""

MOST_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


@pytest.fixture(scope="module")
def kernels() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    words = ["80,90,100", *(["all"] if os.environ.get("JETTISON_COMPILE_ALL") else [])]
    program = Path(__file__).with_name("compile_ahead.py")
    run = subprocess.run([sys.executable, program, *words], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_what_is_kept_in_registers_stays_there(kernels: list[dict]) -> None:
    assert {kernel["capability"] for kernel in kernels} == {80, 90, 100}
    spilling = [
        kernel for kernel in kernels
        if kernel["stack_bytes"] > MOST_STACK_BYTES[kernel["capability"]] and not kernel["is_float32"]
    ]  # fmt: skip
    assert not spilling


def test_shared_memory_suffices(kernels: list[dict]) -> None:
    assert not [kernel for kernel in kernels if kernel["shared_bytes"] > MOST_SHARED_BYTES[kernel["capability"]]]


def test_attention_multiplies_on_tensor_cores(kernels: list[dict]) -> None:
    multiplying = [kernel for kernel in kernels if kernel["should_multiply"]]
    assert len(multiplying) >= 9
    for kernel in multiplying:
        rows = int(kernel["name"].split()[-1])
        by = "mma.sync" if rows == 16 else {80: "mma.sync", 90: "wgmma.mma", 100: "tcgen05.mma"}[kernel["capability"]]
        assert kernel["multiplies_by"] == [by], kernel


def test_rows_move_in_wide_words(kernels: list[dict]) -> None:
    [num_wide] = [kernel["num_wide"] for kernel in kernels if kernel["name"] == "move_rows"]
    assert num_wide == 8, "4 loads and 4 stores of 16 bytes a thread, all under way at once"


def test_what_is_launched_early_waits(kernels: list[dict]) -> None:
    assert [kernel["waits"] for kernel in kernels] == [kernel["may_wait"] for kernel in kernels]


def test_the_usual_decode_tile_leaves_room_for_two_programs(kernels: list[dict]) -> None:
    decode = next(k for k in kernels if k["name"].startswith("attend bf16 128") and k["capability"] == 90)
    assert decode["registers"] * 32 * decode["warps"] * 2 <= 65536
    assert (decode["shared_bytes"] + 1024) * 2 <= 228 << 10
