"""Administration of instances that sleep: ``POST /sleep``, ``POST /wake_up``, ``GET /is_sleeping``.

The names and the levels are vLLM's. An order is answered when it has begun, as its requests need time to move
elsewhere; ``/is_sleeping`` shows its progress.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jettison.live.engine.api import SleepControl
from jettison.server.errors import bad_request
from jettison.server.info_routes import json_response


class SleepRoutes:
    """Handlers over one engine's sleepers."""

    def __init__(self, control: SleepControl) -> None:
        self._control = control

    def routes(self) -> list[Route]:
        """All of them, with their paths."""
        return [
            Route("/sleep", self.sleep, methods=["POST"]),
            Route("/wake_up", self.wake_up, methods=["POST"]),
            Route("/is_sleeping", self.is_sleeping),
        ]

    async def sleep(self, request: Request) -> Response:
        """``level`` 1 (the default) keeps a copy of the parameters in host memory, 2 relies on peers; ``instance``: one
        (else all, and the first request wakes one)."""
        _check_names(request, ("level", "instance"))
        level = _whole_number(request, "level")
        if level not in (None, 1, 2):
            raise bad_request("level must be 1 or 2.", "level")
        return json_response(self._control.sleep(_whole_number(request, "instance"), 1 if level is None else level))

    async def wake_up(self, request: Request) -> Response:
        """``instance``: one (else all that sleep)."""
        _check_names(request, ("instance",))
        return json_response(self._control.wake(_whole_number(request, "instance")))

    async def is_sleeping(self, request: Request) -> Response:
        """``instance``: one (else whether all sleep)."""
        _check_names(request, ("instance",))
        return json_response(self._control.states(_whole_number(request, "instance")))


def _check_names(request: Request, known: Sequence[str]) -> None:
    """Raises ApiError 400 for an unknown parameter: a misspelt ``instance`` would be an order to all instances."""
    for name in request.query_params:
        if name not in known:
            raise bad_request(f"{name[:40]!r} is no parameter here: there are {', '.join(known)}.", name[:40])


def _whole_number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise bad_request(f"{name} must be a whole number of at least 0, not {text[:40]!r}.", name)
    return int(text)
