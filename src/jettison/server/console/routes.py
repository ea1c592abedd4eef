"""The console's paths: its page, which is open, and its data (``gate`` checks the key)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from importlib import resources
from itertools import islice

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jettison.server.auth import CONSOLE_DATA
from jettison.server.console.feed import PERIOD_NS, Feed
from jettison.server.console.journal import MOST_CHOICES, NUM_KEPT, Journal, Row, has_name, is_of, slowest
from jettison.server.console.way import Meanwhile, Usual, brief, way_of
from jettison.server.console.words import KINDS, told_all
from jettison.server.errors import ApiError, bad_request
from jettison.server.generation import Generation
from jettison.server.info_routes import json_response
from jettison.server.state import FarGeneration, ServerState
from jettison.types import NANOSECONDS

MOST_LISTED = 25
"""Requests in each list."""
MOST_RECORDS = 500
"""Records of the event log that are read for one request's way."""
MOST_ASKED = 32
"""Lists and ways in ``PERIOD_NS``, for all pages together. Each page asks for one in three seconds, and for what its
reader clicks; more would cost the requests that are served."""
MOST_ID_CHARS = 600
"""Longer than the longest ``custom_id`` of a batch's line."""

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cache-control": "no-cache", "cross-origin-opener-policy": "same-origin",
}  # fmt: skip


class ConsoleRoutes:
    """Handlers over one server's console."""

    def __init__(self, state: ServerState, journal: Journal) -> None:
        self._state = state
        self._journal = journal
        self._clock = state.settings.console.clock or time.monotonic_ns
        self.feed = Feed(state, journal)
        self._asked_since_ns = self.feed.start_ns
        self._num_asked = 0
        self._files = {file.name: _Static(file.name, file.read_bytes()) for file in static_files()}

    def routes(self) -> list[Route]:
        """All of them, with their paths."""
        data, listed, one = CONSOLE_DATA
        return [
            Route("/console", self.page),
            Route(data, self.data),
            Route(listed, self.requests),
            Route(one, self.request),
            Route("/console/{file}", self.file),
        ]

    async def page(self, request: Request) -> Response:
        """The page. Its links are relative, so its own address must not end in a slash."""
        if request.scope.get("raw_path", b"").endswith(b"/"):
            return Response(status_code=308, headers={"location": "../console", **_HEADERS})
        return self._files["index.html"].response(request)

    async def file(self, request: Request) -> Response:
        """A file of the page."""
        file = self._files.get(request.path_params["file"])
        if file is None:
            raise ApiError(404, "The console has no such file.", code="not_found")
        return file.response(request)

    async def data(self, request: Request) -> Response:
        """What the page shows, with the events after number ``after``; a page's first ask has none."""
        body = self.feed.answer(_number(request, "after", "after must be the number of an event."))
        return Response(body, media_type="application/json", headers=_NOT_KEPT)

    async def requests(self, request: Request) -> Response:
        """Requests under way, those of them that have no token yet, the last ones that ended, and those with the latest
        first tokens among these."""
        now_ns, tenant = self._clock(), self._tenant(request)
        self._count(now_ns)
        kept = self._journal.kept(tenant)
        under_way = self._under_way(tenant)
        # A list of their own: those that came first run, and would fill the other one.
        waiting = list(islice((each for each in under_way if not each.has_begun), MOST_LISTED))
        found: dict[str, Sequence[Row]] = {
            "under_way": [each.rows(0, 1)[0] for each in under_way[:MOST_LISTED]],
            "waiting": [each.rows(0, 1)[0] for each in waiting],
            "recent": [rows[0] for rows in kept[:MOST_LISTED]], "slow": slowest(kept, MOST_LISTED),
        }
        lists = {name: [brief(row, now_ns, self._at_s) for row in some] for name, some in found.items()}
        return json_response(lists | {"num_under_way": len(under_way), "num_kept": len(kept)})

    async def request(self, request: Request) -> Response:
        """The way of the request with this ``id``: the answer's, the ``x-request-id`` of HTTP, or the engine's. Of
        several with one id the newest is told; of many choices ``MOST_CHOICES`` from number ``first`` on."""
        name = request.query_params.get("id", "").strip()
        if not 0 < len(name) <= MOST_ID_CHARS:
            raise bad_request(f"id must have from 1 to {MOST_ID_CHARS} characters.", "id")
        first = _number(request, "first", "first must be the number of a choice.") or 0
        now_ns, tenant = self._clock(), self._tenant(request)
        self._count(now_ns)
        kept = self._journal.kept(tenant)
        running = [each.rows(first, MOST_CHOICES) for each in reversed(self._under_way(tenant)) if each.is_named(name)]
        found = [*running, *(rows[first : first + MOST_CHOICES] for rows in kept if has_name(rows, name))]
        if not found:
            raise ApiError(
                404, f"No such request under way or among the last {NUM_KEPT:,} that ended.", code="request_not_found")
        rows, usual = found[0], Usual.of(kept)
        if not rows:
            raise bad_request("The request has fewer choices.", "first")
        end_ns = max(row.ended_ns or now_ns for row in rows)
        first_ns = min(row.arrival_ns for row in rows)
        part = self._state.settings.console.records(first_ns - 1, MOST_RECORDS, KINDS, end_ns)
        meanwhile = Meanwhile(told_all(part.records), part.is_whole)
        objectives = self._state.engine.objectives()
        ways = [way_of(row, now_ns, usual, meanwhile.of(row, now_ns), objectives, self._at_s) for row in rows]
        return json_response({"choices": ways, "first": first, "num_others": len(found) - 1})

    def _under_way(self, tenant: str | None) -> list[Generation | FarGeneration]:
        """Requests under way, those of the chat first, then by their arrival."""
        every = (*self._state.generations, *self._state.far_generations, *self._state.lines)
        found = [each for each in every if is_of(each.tenant, tenant)]
        return sorted(found, key=lambda each: (each.is_offline, each.arrival_ns))

    def _count(self, now_ns: int) -> None:
        """Raises ApiError 429 where pages ask too often: an answer takes milliseconds of the loop that serves."""
        if not 0 <= now_ns - self._asked_since_ns < PERIOD_NS:
            self._asked_since_ns, self._num_asked = now_ns, 0
        if self._num_asked >= MOST_ASKED:
            raise ApiError(429, "Too many pages ask for requests at one time: try again in a second.",
                           code="too_many_viewers", headers={"retry-after": "1"})
        self._num_asked += 1

    def _at_s(self, time_ns: int) -> float:
        return round((time_ns - self.feed.start_ns) / NANOSECONDS, 3)

    def _tenant(self, request: Request) -> str | None:
        """Whose requests may be shown: where keys have labels each shows its own, a key of administration all."""
        authorization = request.headers.get("authorization", "").encode("latin-1")
        # The path is fixed: one that a client can shape (by its Host, too) may be one that needs no key.
        if not self._state.admin_keys.is_empty and self._state.admin_keys.admits(CONSOLE_DATA[1], authorization):
            return None
        return self._state.keys.tenant(authorization) or None


def _number(request: Request, name: str, wanted: str) -> int | None:
    """A parameter of the query; None where there is none. Raises ApiError."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise bad_request(wanted, name)
    return int(text)


_NOT_KEPT = {"cache-control": "no-store"}


def static_files() -> list[resources.abc.Traversable]:
    """The files of the page, which are part of the package."""
    folder = resources.files("jettison.server.console").joinpath("static")
    return [file for file in folder.iterdir() if f".{file.name.rpartition('.')[2]}" in _TYPES]


class _Static:
    """One file, with the tag that tells whether a browser has it already."""

    def __init__(self, name: str, body: bytes) -> None:
        self._body = body
        self._type = _TYPES[f".{name.rpartition('.')[2]}"]
        self._tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'

    def response(self, request: Request) -> Response:
        """The file, or that the browser's copy is good."""
        headers = {**_HEADERS, "etag": self._tag}
        asked = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self._tag in asked:
            return Response(status_code=304, headers=headers)
        return Response(self._body, media_type=self._type, headers=headers)
