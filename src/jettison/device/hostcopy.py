"""A copy between arenas and host pool that runs beside steps: what every back end offers. No torch."""

from __future__ import annotations

from typing import Protocol


class HostCopy(Protocol):
    """A copy between arenas and host pool that has been checked: ``run`` and what it reads belong to one thread, which
    may be another than the device's; the rest may be asked of any."""

    @property
    def copied_bytes(self) -> int:
        """So far, with what was skipped."""
        ...

    @property
    def is_complete(self) -> bool:
        """All is copied."""
        ...

    def run(self, most_bytes: int | None = None) -> None:
        """Copy in pieces until all is copied, at least ``most_bytes`` more are, or it is stopped."""
        ...

    def stop(self) -> None:
        """Have ``run`` return after its piece, and copy nothing more."""
        ...
