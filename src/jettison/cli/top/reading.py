"""Asks a server for what its console shows: state, memory, rungs, events, requests and what these wait for.

Only ``GET``, with a client's key. A server that does not answer is a reading, too: the next one may find it again.
"""

from __future__ import annotations

import json
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

TIMEOUT_S = 3.0
"""A server that takes longer has not answered."""
EVERY = 3
"""Lists and ways are asked for at each such reading, as a page of the console does: the server bounds how many."""
MOST_EVERY = 24
"""The same while the server does not give them, twice as long after each refusal."""
MOST_ASKED = 6
"""Waiting requests whose way is asked for with a list."""
MOST_KEPT = 60
"""Events: as many as one answer has. What the server makes answers of is not imported: it would load torch."""
MOST_BYTES = 16 << 20
"""Of one answer: many times what the largest server sends."""

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server said at one time. Without ``trouble`` ``data`` is there."""

    trouble: str = ""
    """Why there is nothing, in a few words."""
    data: Document | None = None
    """``/console/data``."""
    requests: Document = field(default_factory=dict)
    """``/console/requests``."""
    waits: Mapping[str, str] = field(default_factory=dict)
    """Id of a waiting request -> what it waits for."""
    events: Sequence[Document] = ()
    """Oldest first."""


class NoAnswerError(Exception):
    """In words for the reader of the screen."""


class Reader:
    """Of one server. ``async with`` closes its connections."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._has_key = bool(key)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # A full server closes idle connections; one that is used at that moment would look like a lost server.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=2.0), headers=headers,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        self._life = ""
        self._last_event: int | None = None
        self._events: deque[Document] = deque(maxlen=MOST_KEPT)
        self._every = EVERY
        self._num_rests = 0
        """Readings until lists are asked for again."""
        self._requests: Document = {}
        self._waits: Mapping[str, str] = {}

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def read(self) -> Reading:
        """One reading. Never raises for what the server does."""
        try:
            data = await self._data()
        except NoAnswerError as error:
            self._every, self._num_rests = EVERY, 0
            return Reading(str(error))
        if self._num_rests == 0:
            await self._read_lists()
        self._num_rests -= 1
        return Reading("", data, self._requests, self._waits, tuple(self._events))

    async def _read_lists(self) -> None:
        """Without an answer, as where too many viewers ask, the last ones stay, and the next try comes later."""
        try:
            self._requests = await self._ask("/console/requests")
            self._waits = await self._ask_waits(self._requests)
            self._every = EVERY
        except NoAnswerError:
            self._every = min(MOST_EVERY, 2 * self._every)
        self._num_rests = self._every

    async def _data(self) -> Document:
        """The console's data. Events are asked for from the last one on, and anew after a restart."""
        data = await self._ask("/console/data", {} if self._last_event is None else {"after": str(self._last_event)})
        life = str(data.get("life", ""))
        if self._life and life != self._life:
            self._life, self._last_event = life, None
            self._events.clear()
            data = await self._ask("/console/data")
        self._life = life
        last = data.get("last_event")
        self._last_event = last if isinstance(last, int) else None
        self._events.extend(each for each in data.get("events", ()) if isinstance(each, Mapping))
        return data

    async def _ask_waits(self, requests: Document) -> dict[str, str]:
        """What the longest waiting requests wait for, in the server's own words: its last sentence, as those before it
        say what holds of each that waits."""
        waiting = [str(each.get("id", "")) for each in requests.get("waiting", ()) if isinstance(each, Mapping)]
        found: dict[str, str] = {}
        for name in waiting[:MOST_ASKED]:
            try:
                way = await self._ask("/console/request", {"id": name})
            except NoAnswerError:  # it has ended meanwhile, or too many viewers ask
                continue
            choices = way.get("choices")
            if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) and choices[0].get("why"):
                found[name] = str(choices[0]["why"][-1])
        return found

    async def _ask(self, path: str, query: Mapping[str, str] | None = None) -> Document:
        try:
            async with self._session.get(self.url + path, params=query, allow_redirects=False) as answer:
                body = await answer.content.read(MOST_BYTES)
                while len(body) < MOST_BYTES and (more := await answer.content.read(MOST_BYTES - len(body))):
                    body += more
        except TimeoutError:
            raise NoAnswerError(f"no answer from {self.url} within {TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, ssl.SSLError, OSError, ValueError) as error:
            raise NoAnswerError(f"no answer from {self.url}: {error or type(error).__name__}") from None
        if answer.status != 200:
            raise NoAnswerError(_refusal(answer.status, self.url, has_key=self._has_key))
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if not isinstance(document, Mapping):
            raise NoAnswerError(f"what answers at {self.url} is no Jettison server")
        return document


def _refusal(status: int, url: str, *, has_key: bool) -> str:
    refused = "does not take this key: --api-key"
    told = {
        401: refused if has_key else "asks for a key: --api-key", 403: refused,
        404: "shows no console: it was started with --no-console, or is no Jettison server",
        429: "has too many viewers",
    }  # fmt: skip
    return f"no answer from {url}: it {told.get(status, f'answers {status}')}"
