"""Prefixes: which packed requests begin with the same blocks, as the packer is told.

Requests are compared at 1, 2, 4, ... blocks of their prompts, by the names that the prefix cache uses. So no more
counts as shared than is, and a request costs as many look-ups as its number of blocks has bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jettison.types import RequestId


class Shared(NamedTuple):
    """A prefix that a request has in common with others: its key, and its length in blocks."""

    key: str
    num_blocks: int


class Joined(NamedTuple):
    """The result of taking a request in: the prefix that it shares, and the request that shares one only since then."""

    shared: Shared | None = None
    """The prefix that the request shares; None: no other request begins as it does."""
    also: RequestId | None = None
    """Another request, which had no prefix in common with any until now, and has this one from now on."""


class Prefixes:
    """The prefixes that the requests of one packing share."""

    def __init__(self) -> None:
        self._at: defaultdict[bytes, dict[RequestId, None]] = defaultdict(dict)
        """By name of a block at one of these places: the requests with that block in their prompts, in order."""
        self._names: dict[RequestId, list[tuple[bytes, int]]] = {}
        """By request: the names of its blocks at these places, with the number of blocks up to each, the deepest
        first."""
        self._shared: dict[RequestId, Shared] = {}

    def join(self, request_id: RequestId, names: Sequence[bytes]) -> Joined:
        """Take a request in, and say what it shares. ``names``: the chained names of its prompt's full blocks. It gets
        the deepest key that other requests have already; else a new key, together with the newest request that begins
        like it and has none; else no key."""
        places = [1 << i for i in range(len(names).bit_length()) if 1 << i <= len(names)]
        rows = [(names[place - 1], place) for place in reversed(places)]
        deepest: tuple[bytes, int] | None = None
        found = Joined()
        for name, place in rows:
            others = self._at.get(name)
            if not others:
                continue
            deepest = deepest or (name, place)
            shared = Shared(name.hex(), place)
            if any(self._shared.get(other) == shared for other in others):
                found = Joined(shared)
                break
        else:
            if deepest is not None:
                shared = Shared(deepest[0].hex(), deepest[1])
                alone = next((r for r in reversed(self._at[deepest[0]]) if r not in self._shared), None)
                found = Joined(shared, alone) if alone is not None else Joined()
        self._names[request_id] = rows
        for name, _ in rows:
            self._at[name][request_id] = None
        if found.shared is not None:
            self._shared[request_id] = found.shared
            if found.also is not None:
                self._shared[found.also] = found.shared
        return found

    def shared(self, request_id: RequestId) -> Shared | None:
        """The prefix that a request shares with others, as ``join`` said; None: it shares none, or is not known."""
        return self._shared.get(request_id)

    def leave(self, request_id: RequestId) -> None:
        """Forget a request; nothing where it is not known. Requests that shared a prefix with it keep their key."""
        for name, _ in self._names.pop(request_id, ()):
            del self._at[name][request_id]
            if not self._at[name]:
                del self._at[name]
        self._shared.pop(request_id, None)
