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
from jettison.server.console.feed import Feed
from jettison.server.console.journal import Journal, Row, is_of, slowest
from jettison.server.console.way import Usual, brief, way_of
from jettison.server.errors import ApiError, bad_request
from jettison.server.info_routes import json_response
from jettison.server.state import ServerState
from jettison.types import NANOSECONDS

MOST_LISTED = 25
"""Requests in each list."""
MOST_CHOICES = 16
"""Choices of one request that are told."""
MOST_RECORDS = 2000
"""Records of the event log that are read for one request's way."""
MOST_ID_CHARS = 300

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
        """What the page shows, with the events after number ``after``."""
        text = request.query_params.get("after", "0")
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            raise bad_request("after must be the number of an event.", "after")
        return Response(self.feed.answer(int(text)), media_type="application/json", headers=_NOT_KEPT)

    async def requests(self, request: Request) -> Response:
        """Requests under way, the last ones that ended, and those with the latest first tokens among them."""
        now_ns, tenant = self._clock(), self._tenant(request)
        rows = [row for row in self._journal.rows if is_of(row, tenant)]
        under_way = sorted(self._under_way(tenant), key=lambda row: row.arrival_ns)
        found: dict[str, Sequence[Row]] = {
            "under_way": under_way[:MOST_LISTED], "recent": list(islice(reversed(rows), MOST_LISTED)),
            "slow": slowest(rows, MOST_LISTED),
        }
        lists = {name: [brief(row, now_ns, self._at_s) for row in some] for name, some in found.items()}
        return json_response(lists | {"num_under_way": len(under_way), "num_kept": len(rows)})

    async def request(self, request: Request) -> Response:
        """The way of the request with this ``id``: the answer's, the ``x-request-id`` of HTTP, or the engine's."""
        name = request.query_params.get("id", "").strip()
        if not 0 < len(name) <= MOST_ID_CHARS:
            raise bad_request(f"id must have from 1 to {MOST_ID_CHARS} characters.", "id")
        now_ns, tenant = self._clock(), self._tenant(request)
        rows = [row for row in self._under_way(tenant) if row.is_named(name)] or self._journal.of(name, tenant)
        if not rows:
            raise ApiError(
                404, f"No such request under way or among the last {self._journal.rows.maxlen} that ended.",
                code="request_not_found")
        usual = Usual.of([row for row in self._journal.rows if is_of(row, tenant)])
        objectives = self._state.engine.objectives()
        first_ns = min(row.arrival_ns for row in rows)
        records = self._state.settings.console.records(first_ns, MOST_RECORDS)
        ways = [
            way_of(row, now_ns, usual, [r for r in records if row.arrival_ns <= r.time_ns <= (row.ended_ns or now_ns)],
                   objectives, self._at_s)
            for row in rows[:MOST_CHOICES]
        ]
        return json_response({"choices": ways})

    def _under_way(self, tenant: str | None) -> list[Row]:
        return [row for each in self._state.generations for row in each.rows() if is_of(row, tenant)]

    def _at_s(self, time_ns: int) -> float:
        return round((time_ns - self.feed.start_ns) / NANOSECONDS, 3)

    def _tenant(self, request: Request) -> str | None:
        """Whose requests may be shown: with several keys each shows its own, a key of administration all."""
        authorization = request.headers.get("authorization", "").encode("latin-1")
        if not self._state.admin_keys.is_empty and self._state.admin_keys.admits(request.url.path, authorization):
            return None
        return self._state.keys.tenant(authorization) or None


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
