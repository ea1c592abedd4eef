"""Responses that are kept, for ``previous_response_id`` and ``GET /v1/responses/ID``: in memory, bounded, by tenant.

A response has its whole conversation with it, so that none depends on another that has gone. What is kept longest goes
first: of the same tenant where its own share is used up, of the tenant that has most where all together are too many.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

MAX_COUNT = 1024
MAX_BYTES = 32 << 20
MAX_RESPONSE_BYTES = 2 << 20
"""Of one response with its conversation: it is read and written again on the server's loop, for each that goes on from
it."""
MAX_TOTAL_BYTES = 128 << 20
"""Enough for four tenants of long conversations, and little beside the host memory of a model."""

_RESPONSE = "resp_"
_ITEM = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4,}")


def item_id_of(prefix: str, response_id: str, index: int) -> str:
    """The id of an item of a response's output: it names the response, too, so that no book of items is kept."""
    return f"{prefix}{response_id.removeprefix(_RESPONSE)}{index:04x}"


def response_id_of(item_id: str) -> str | None:
    """The response whose output has this item; None where it is no id of an item."""
    found = _ITEM.fullmatch(item_id)
    return None if found is None else _RESPONSE + found[1]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response as JSON."""

    document: bytes
    items: bytes
    """What went in, that of the responses before included."""
    output: bytes
    """What came out, which the document has, too."""

    @property
    def num_bytes(self) -> int:
        """Of all."""
        return len(self.document) + len(self.items) + len(self.output)

    def read_all(self) -> list[dict[str, Any]]:
        """The items that went in and came out. Raises RecursionError where they are nested so deeply that they were
        only just read before."""
        return [*msgspec.json.decode(self.items), *msgspec.json.decode(self.output)]

    def read_output(self) -> dict[str, dict[str, Any]]:
        """The items that came out, by their ids."""
        return {item["id"]: item for item in msgspec.json.decode(self.output)}

    def read_input(self) -> list[dict[str, Any]]:
        """The items that went in, with values that are JSON."""
        return msgspec.json.decode(self.items, type=list[dict[str, msgspec.Raw]])


@dataclass(slots=True)
class _Share:
    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def drop_oldest(self) -> int:
        """Its bytes."""
        _, dropped = self.responses.popitem(last=False)
        self.num_bytes -= dropped.num_bytes
        return dropped.num_bytes


class ResponseKeeper(Protocol):
    """Where responses are kept: in this process, or in the controller of this front end."""

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """See ``ResponseStore``."""
        ...

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response of this tenant; None where it has none by this id."""
        ...

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one."""
        ...


class ResponseStore:
    """Counts and bytes: of a tenant, and of all."""

    def __init__(
        self, max_count: int = MAX_COUNT, max_bytes: int = MAX_BYTES, max_total_bytes: int = MAX_TOTAL_BYTES
    ) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._shares: dict[str, _Share] = {}
        self.num_bytes = 0

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Keep a response under a new id; one that is larger than one may be is not kept."""
        if response.num_bytes > min(self._max_bytes, self._max_total_bytes, MAX_RESPONSE_BYTES):
            return
        share = self._shares.setdefault(tenant, _Share())
        share.responses[response_id] = response
        share.num_bytes += response.num_bytes
        self.num_bytes += response.num_bytes
        while len(share.responses) > self._max_count or share.num_bytes > self._max_bytes:
            self.num_bytes -= share.drop_oldest()
        while self.num_bytes > self._max_total_bytes:
            largest = max(self._shares, key=lambda name: self._shares[name].num_bytes)
            self.num_bytes -= self._shares[largest].drop_oldest()
            self._forget_empty(largest)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response of this tenant; None where it has none by this id."""
        share = self._shares.get(tenant)
        return None if share is None else share.responses.get(response_id)

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """``get``, as a ``ResponseKeeper`` has it."""
        return self.get(tenant, response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one."""
        share = self._shares.get(tenant)
        if share is None or (response := share.responses.pop(response_id, None)) is None:
            return False
        share.num_bytes -= response.num_bytes
        self.num_bytes -= response.num_bytes
        self._forget_empty(tenant)
        return True

    def _forget_empty(self, tenant: str) -> None:
        if not self._shares[tenant].responses:
            del self._shares[tenant]
