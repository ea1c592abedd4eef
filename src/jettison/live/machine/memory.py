"""How much memory the kernel lets this process and its children use, and a warning where more is configured.

A worker's memory is a file whose pages are made when they are first written (``device.pages_host``): a budget beyond
the machine's memory starts, and serves until that much of it is in use; then the kernel ends a worker, or the machine
swaps. So too much is worth a warning, and no refusal.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jettison.live.machine.address_space import gib

INTERPRETER_BYTES = 160 << 20
"""Memory of a worker's process beside its budget: Python, libraries and what they allocate (150 MiB were seen)."""

SERVER_BYTES = 256 << 20
"""The same of the server's own process, and of the libraries' files, which all processes share."""

FRONT_END_BYTES = 192 << 20
"""The same of each front end, with its tokenizer and the process that compiles its grammars (91 MiB were seen with a
vocabulary of 49,152, and 82 MiB more of tokenizer with one of 150,000), and of the parent and the process that starts
controllers (44 MiB together), which the first front end brings."""

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


def rss_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages that it has mapped included; 0 where it is no more."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0


def shared_bytes(pid: int) -> int:
    """Pages of memory files that a process has mapped and touched, a worker's parameters and KV among them; 0 where it
    is no more, or the kernel does not tell."""
    for line in _text(Path(f"/proc/{pid}/status")).splitlines():
        name, _, rest = line.partition(":")
        if name == "RssShmem":
            return int(rest.split()[0]) * 1024
    return 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What workers are configured to use, together with what their processes need."""

    num_instances: int
    budget_bytes: int
    """All instances': device memory and host memory."""
    parameter_bytes: int
    """All instances': the part of their budgets that is written at the start."""
    num_front_ends: int = 0
    flag: str = "--instances"
    """Which one says how many instances there may be."""

    @property
    def process_bytes(self) -> int:
        """Of the interpreters, the server's included."""
        return SERVER_BYTES + self.num_instances * INTERPRETER_BYTES + self.num_front_ends * FRONT_END_BYTES

    @property
    def _what_of_it(self) -> str:
        num_interpreters = self.num_instances + self.num_front_ends + 1
        return f"{gib(self.process_bytes)} of it for {num_interpreters} interpreters"

    def complaint(self, limit: tuple[int, str] | None) -> str | None:
        """One line where not even the start has room."""
        start_bytes = self.parameter_bytes + self.process_bytes
        if limit is None or start_bytes <= limit[0]:
            return None
        return (
            f"{self.num_instances} instances need {gib(start_bytes)} before they serve anything"
            f" ({self._what_of_it}), more than the {gib(limit[0])} of {limit[1]}: lower {self.flag}"
        )

    def warning(self, limit: tuple[int, str] | None) -> str | None:
        """One line where all instances together are configured to use more than there is."""
        wanted_bytes = self.budget_bytes + self.process_bytes
        if limit is None or wanted_bytes <= limit[0]:
            return None
        return (
            f"all instances together may come to use {gib(wanted_bytes)} ({self._what_of_it}), more than the"
            f" {gib(limit[0])} of {limit[1]}: the kernel will end a worker when they do; lower --memory or {self.flag}"
        )


def cores_warning(num_instances: int, num_threads: int, num_cores: int, flag: str) -> str | None:
    """One line where there are more instances than cores. ``flag``: which one says how many instances there may be."""
    if num_instances <= num_cores:
        return None
    return (
        f"{num_instances} instances of {num_threads} thread(s) on {num_cores} core(s): they start and compute in turns;"
        f" lower {flag}"
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
