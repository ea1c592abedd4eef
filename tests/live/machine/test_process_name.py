"""Names of processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jettison.live.machine import process_name

NAMES = [name for key, name in vars(process_name).items() if key.isupper()]


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_keeps_a_whole_name(name: str) -> None:
    program = (
        "import sys; from jettison.live.machine.process_name import name_process; name_process(sys.argv[1]);"
        " print(open('/proc/self/comm').read(), end='')"
    )
    told = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=True).stdout
    assert told == f"{name}\n" and not name.startswith("jettison-w") and len(set(NAMES)) == len(NAMES)
