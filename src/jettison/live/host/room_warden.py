"""Of a cluster's room, in a process of Ray's. A module of its own, which Ray imports by its name (``keeper_actor``).

The room outlives the driver that has reserved it, so that a driver which comes after finds it, and what still runs
there is counted once. Hence it has to be given back where none comes: the controller has ended then, or its host has.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator

_CONNECT_TIMEOUT_S = 5.0
_LOOK_S = 2.0
"""Between two looks at the head."""
_AGAIN_S = 2.0
"""Before the room is given back again where that has failed."""

log = logging.getLogger(__name__)


class RoomWarden:
    """It gives the room back once no driver has attended for ``grace_s`` seconds in which Ray's head has answered, and
    ends. While the head is away, no driver can attend: the grace begins again when the head is back."""

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
        while (left_s := self._left_s(is_head_away=_is_head_away())) > 0:
            time.sleep(min(left_s, _LOOK_S))
        while True:
            try:
                give_back(self._name)
                break
            except Exception:  # Ray raises what it likes, and a thread that dies here keeps the room for ever
                log.warning("the room %s is not given back yet", self._name, exc_info=True)
                time.sleep(_AGAIN_S)
        _end()

    def _left_s(self, *, is_head_away: bool) -> float:
        with self._lock:
            now_s = time.monotonic()
            if is_head_away:
                self._attended_s = now_s
            left_s = self._attended_s + self._grace_s - now_s
            self._is_over = left_s <= 0
            return left_s


def lone_name(name: str, number: int) -> str:
    """Of the room of one worker that was not reserved with the others; ``name``: of the whole room."""
    return f"{name}-{number}"


def names_reserved(name: str) -> Iterator[str]:
    """All parts of the room that Ray knows: the one reserved at the start, and lone workers'. Raises what Ray does."""
    from ray.util.placement_group import placement_group_table

    for entry in placement_group_table().values():
        found = entry["name"]
        if entry["state"] != "REMOVED" and (found == name or found.startswith(f"{name}-")):
            yield found


def give_back(name: str) -> None:
    """All parts of the room. Raises what Ray does; then some may be left."""
    for each in list(names_reserved(name)):
        remove(each)


def remove(name: str) -> None:
    """One part of the room, if it is there. Raises what Ray does."""
    from ray.util.placement_group import get_placement_group, remove_placement_group

    try:
        group = get_placement_group(name)
    except ValueError:  # there is none of that name
        return
    remove_placement_group(group)


def why_away(address: str) -> str | None:
    """Why no process takes connections at ``host:port``; None: one does, or there is no such address."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return None


def _is_head_away() -> bool:
    import ray

    return why_away(ray.get_runtime_context().gcs_address) is not None


def _end() -> None:
    import ray

    ray.kill(ray.get_runtime_context().current_actor)
