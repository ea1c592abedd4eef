"""API keys. Compared in constant time, and never kept or logged in clear."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Paths of probes, which carry no key."""

ADMIN_PATHS = frozenset({"/sleep", "/wake_up", "/is_sleeping"})
"""Paths of administration, which no client's key opens."""

CONSOLE_DATA = ("/console/data", "/console/requests", "/console/request")
"""Paths of what the console shows of the server, lists of requests, and one of them. The console's other paths are its
page, which has nothing of the server."""


class KeyRing:
    """The keys of the API; without any, every path is open."""

    def __init__(self, keys: Iterable[str], *, may_change: bool = False) -> None:
        self._may_change = may_change
        self._digests: tuple[bytes, ...] = ()
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """Replace the keys. Admitted requests go on."""
        self._digests = tuple(dict.fromkeys(hashlib.sha256(key.encode()).digest() for key in keys))

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Of all keys."""
        return self._digests

    def replace_digests(self, digests: tuple[bytes, ...]) -> None:
        """``replace``, by what ``digests`` of another ring gave."""
        self._digests = digests

    @property
    def is_empty(self) -> bool:
        """Whether there are no keys, and none is required."""
        return not self._digests

    def admits(self, path: str, authorization: bytes | None) -> bool:
        """Whether ``Authorization: Bearer KEY`` opens ``path``. All keys are compared, to take the same time whichever
        fits."""
        if not self._digests or path in OPEN_PATHS:
            return True
        digest = _digest(authorization)
        if digest is None:
            return False
        fits = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(fits)

    def tenant(self, authorization: bytes | None) -> str:
        """A label of fixed length for the tenant with this key, where there are several keys or keys may change; else
        empty.

        ``authorization`` has been admitted. The label goes into cache salts: it says nothing about the key.
        """
        return self.tenant_of(self.owner(authorization))

    def owner(self, authorization: bytes | None) -> str:
        """A label of the key itself, for stored items: it stays the same whatever other keys there are. Empty where no
        key is required. ``authorization`` has been admitted.
        """
        return hashlib.sha256(b"tenant" + (_digest(authorization) or b"")).hexdigest()[:32] if self._digests else ""

    def tenant_of(self, owner: str) -> str:
        """The tenant of such a label, equal to the result of ``tenant``."""
        # A single key would otherwise share its cache with the key that replaces it.
        return owner if self._may_change or len(self._digests) > 1 else ""


def _digest(authorization: bytes | None) -> bytes | None:
    """The digest of the key in ``Bearer KEY``; None for any other value."""
    scheme, _, key = (authorization or b"").partition(b" ")
    return hashlib.sha256(key.strip()).digest() if scheme.lower() == b"bearer" else None
