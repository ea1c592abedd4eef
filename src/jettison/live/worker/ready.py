"""Which links have something new, by the kernel's word: a turn polls these, and no others."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Watched(Protocol):
    """A link, or whatever else has a descriptor."""

    @property
    def wants_write(self) -> bool:
        """Whether it waits for room, too."""

    def fileno(self) -> int:
        """Its descriptor now; -1 where it has none."""


class Readiness(Generic[Key]):
    """Ends that are watched, each under a key. What has no descriptor always counts as ready to its owner."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[Key, tuple[int, int]] = {}
        """Descriptor, and what the kernel is to tell of it."""
        self._key_of: dict[int, Key] = {}

    def fileno(self) -> int:
        """Readable while any of them is ready."""
        return self._epoll.fileno()

    def watch(self, key: Key, end: Watched) -> None:
        """From now on, or on, as ``end`` is now: its descriptor and what it waits for may have changed."""
        fd, mask = end.fileno(), select.EPOLLIN | (select.EPOLLOUT if end.wants_write else 0)
        before = self._watched.get(key)
        if before == (fd, mask):
            return
        if before is not None and before[0] != fd:
            self.forget(key)
        if fd < 0:
            return
        self._watched[key] = (fd, mask)
        self._key_of[fd] = key
        try:
            self._epoll.modify(fd, mask)
        except FileNotFoundError:
            self._epoll.register(fd, mask)

    def forget(self, key: Key) -> None:
        """Watch it no more. Nothing where it is not watched."""
        before = self._watched.pop(key, None)
        if before is not None and self._key_of.get(before[0]) == key:
            del self._key_of[before[0]]
            with contextlib.suppress(OSError):  # a descriptor that was closed has left by itself
                self._epoll.unregister(before[0])

    def look(self, timeout_s: float = 0.0) -> set[Key]:
        """The keys of those that are ready, at once or after this long at the latest."""
        return {self._key_of[fd] for fd, _ in self._epoll.poll(timeout_s) if fd in self._key_of}

    def close(self) -> None:
        """Watch nothing more. Idempotent."""
        self._epoll.close()
