"""What all cores of this machine did since it was started, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class MachineTime(NamedTuple):
    """In seconds of one core, since the machine was started."""

    busy_s: float
    """Of whatever process."""
    stolen_s: float
    """Wanted, and given to another machine by a hypervisor: in no process's time."""


def machine_time() -> MachineTime:
    """Zeros where the system does not tell."""
    try:
        text = Path("/proc/stat").read_text()
    except OSError:
        return MachineTime(0.0, 0.0)
    user, nice, system, _idle, _iowait, irq, softirq, stolen = (int(f) for f in text.split("\n", 1)[0].split()[1:9])
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return MachineTime((user + nice + system + irq + softirq) / ticks_per_s, stolen / ticks_per_s)
