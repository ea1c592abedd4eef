"""Web pages that may use this server: Starlette's middleware, and the same headers for errors outside the
application."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

EXPOSED_HEADERS = ("retry-after", "retry-after-ms", "x-request-id", "request-id", "www-authenticate")
"""Headers of an answer that a page's script may read besides the usual ones: SDKs in browsers use them."""


@dataclass(frozen=True, slots=True)
class CorsSettings:
    """The rights of pages of other origins."""

    origins: tuple[str, ...] = ()
    """Allowed origins. Empty: no such page gets an answer. ``*``: any origin."""
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False

    def middleware(self) -> list[Middleware]:
        """The middleware, for the front of the application: a preflight carries no key."""
        if not self.origins:
            return []
        return [Middleware(
            CORSMiddleware, allow_origins=self.origins, allow_methods=[method.upper() for method in self.methods],
            allow_headers=self.headers, allow_credentials=self.credentials, expose_headers=EXPOSED_HEADERS,
        )]  # fmt: skip

    def error_headers(self, origin: str | None) -> dict[str, str]:
        """Headers for an answer that is written before a request has reached the application; ``origin``: of the
        request, if it has been read. Without them a page's script would see neither status nor message."""
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
