"""How many cores the kernel lets this process use at one time: those of its affinity, and what its control groups'
quotas pay for. A container's limit is such a quota: all of the machine's cores stay visible to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cores(root: Path = Path("/")) -> int:
    """At least 1; a part of a core counts for none. ``root``: of the file system that has ``proc`` and ``sys``."""
    if hasattr(os, "sched_getaffinity"):  # absent on macOS
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return max(1, int(min([num_cores, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """In cores, of the control groups that bound this process; in a container only the innermost may be there."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount, inner = root / "sys/fs/cgroup" / ("cpu" if controllers else ""), PurePosixPath(path)
        for part in (inner, *inner.parents):
            folder = mount / str(part).lstrip("/")
            if controllers:  # version 1
                told = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
            else:
                told = _text(folder / "cpu.max").split()
            if len(told) == 2 and all(each.isdecimal() and int(each) for each in told):  # no "max", and no -1
                yield int(told[0]) / int(told[1])


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
