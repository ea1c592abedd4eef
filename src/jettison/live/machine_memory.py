"""How much memory the kernel lets this process and its children use, and a warning where more is configured.

A worker's memory is a file whose pages are made when they are first written (``device.pages_host``): a budget beyond
the machine's memory starts, and serves until that much of it is in use; then the kernel ends a worker, or the machine
swaps. So too much is worth a warning, and no refusal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_CGROUP_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Of version 2 (hard, and where it is slowed down) and of version 1."""


def memory_limit(root: Path = Path("/")) -> tuple[int, str] | None:
    """The least bytes that bound this process, and what bounds them: memory and swap, or a control group.

    None where the system does not tell. ``root``: of the file system that has ``proc`` and ``sys``.
    """
    limits: list[tuple[int, str]] = []
    if machine_bytes := _memory_and_swap_bytes(root / "proc/meminfo"):
        limits.append((machine_bytes, "this machine's memory and swap"))
    for folder in _cgroup_folders(root):
        limits += ((found, "this control group's limit") for name in _CGROUP_LIMITS if (found := _bytes(folder / name)))
    return min(limits, default=None)


def memory_warning(wanted_bytes: int, limit: tuple[int, str] | None) -> str | None:
    """One line where all instances together are configured to use more than there is."""
    if limit is None or wanted_bytes <= limit[0]:
        return None
    return (
        f"all instances together may come to use {wanted_bytes / 2**30:.2f} GiB, more than the {limit[0] / 2**30:.2f}"
        f" GiB of {limit[1]}: the kernel will end a worker when they do; lower --memory or --instances"
    )


def _memory_and_swap_bytes(meminfo: Path) -> int:
    """0 where it is not told."""
    kib = {"MemTotal": 0, "SwapTotal": 0}
    for line in _text(meminfo).splitlines():
        name, _, rest = line.partition(":")
        if name in kib:
            kib[name] = int(rest.split()[0])
    return sum(kib.values()) * 1024 if kib["MemTotal"] else 0


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Folders of the control groups that bound this process, innermost first; some may not be there."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # Version 2 has no controllers here; in a container the path may be the host's, and only the root be there.
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = PurePosixPath(path)
        for part in (inner, *inner.parents):
            yield mount / str(part).lstrip("/")


def _bytes(limit: Path) -> int | None:
    """None for ``max``, and for what is not there."""
    text = _text(limit).strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
