"""Which web pages may talk to this server: Starlette's middleware, and the same for errors that no application sees."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

EXPOSED_HEADERS = ("retry-after", "retry-after-ms", "x-request-id", "www-authenticate")
"""Of an answer, what a page's script may read besides the usual: what SDKs in browsers look for."""


@dataclass(frozen=True, slots=True)
class CorsSettings:
    """What pages of other origins may do."""

    origins: tuple[str, ...] = ()
    """None: such pages get nothing. ``*``: any."""
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False

    def middleware(self) -> list[Middleware]:
        """To stand before everything else: a preflight carries no key."""
        if not self.origins:
            return []
        return [Middleware(
            CORSMiddleware, allow_origins=self.origins, allow_methods=[method.upper() for method in self.methods],
            allow_headers=self.headers, allow_credentials=self.credentials, expose_headers=EXPOSED_HEADERS,
        )]  # fmt: skip

    def error_headers(self, origin: str | None) -> dict[str, str]:
        """For an answer that is written before a request has reached the application; ``origin``: if it has been read.
        Without them a page's script would be told of no status and no words."""
        is_any = "*" in self.origins
        if not self.origins or (origin is None and (not is_any or self.credentials)):
            return {}
        if origin is not None and not is_any and origin not in self.origins:
            return {"vary": "Origin"}
        headers = {"access-control-expose-headers": ", ".join(EXPOSED_HEADERS)}
        if is_any and not self.credentials:
            return headers | {"access-control-allow-origin": "*"}
        headers |= {"access-control-allow-origin": str(origin), "vary": "Origin"}
        return headers | ({"access-control-allow-credentials": "true"} if self.credentials else {})
