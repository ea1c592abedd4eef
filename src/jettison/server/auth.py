"""API keys. Compared in constant time, and never kept or logged in clear."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Probes carry no key."""


class KeyRing:
    """The keys that open the API; without any, everything is open."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def admits(self, path: str, authorization: bytes | None) -> bool:
        """Whether ``Authorization: Bearer KEY`` opens ``path``. Every key is compared, whichever fits."""
        if not self._digests or path in OPEN_PATHS:
            return True
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = hashlib.sha256(key.strip()).digest()
        fits = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(fits)
