"""Of a cluster's room, in a process of Ray's. A module of its own, which Ray imports by its name (``keeper_actor``).

The room outlives the driver that has reserved it, so that a driver which comes after finds it, and what still runs
there is counted once. Hence it has to be given back where none comes: the controller has ended then, or its host has.
"""

from __future__ import annotations

import contextlib
import threading
import time


class RoomWarden:
    """It gives the room back once no driver has attended for ``grace_s`` seconds, and ends."""

    def __init__(self, name: str, grace_s: float) -> None:
        """``name``: the room's."""
        self._name = name
        self._grace_s = grace_s
        self._attended_s = time.monotonic()
        self._is_over = False
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def attend(self) -> bool:
        """There is a driver. False: it comes too late; the room is being given back."""
        with self._lock:
            self._attended_s = time.monotonic()
            return not self._is_over

    def _watch(self) -> None:
        while (left_s := self._left_s()) > 0:
            time.sleep(left_s)
        self._give_back()

    def _left_s(self) -> float:
        with self._lock:
            left_s = self._attended_s + self._grace_s - time.monotonic()
            self._is_over = left_s <= 0
            return left_s

    def _give_back(self) -> None:
        import ray
        from ray.util.placement_group import get_placement_group, remove_placement_group

        with contextlib.suppress(ValueError):  # there is none of that name
            remove_placement_group(get_placement_group(self._name))
        ray.kill(ray.get_runtime_context().current_actor)
