"""API keys. Compared in constant time, and never kept or logged in clear."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Probes carry no key."""


class KeyRing:
    """The keys that open the API; without any, everything is open."""

    def __init__(self, keys: Iterable[str], *, may_change: bool = False) -> None:
        self._may_change = may_change
        self._digests: tuple[bytes, ...] = ()
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """Other keys from now on. Requests that were admitted go on."""
        self._digests = tuple(dict.fromkeys(hashlib.sha256(key.encode()).digest() for key in keys))

    def admits(self, path: str, authorization: bytes | None) -> bool:
        """Whether ``Authorization: Bearer KEY`` opens ``path``. Every key is compared, whichever fits."""
        if not self._digests or path in OPEN_PATHS:
            return True
        digest = _digest(authorization)
        if digest is None:
            return False
        fits = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(fits)

    def tenant(self, authorization: bytes | None) -> str:
        """A label of fixed length for the holder of this key, where there are several or they may change; else empty.

        ``authorization`` has been admitted. The label goes into cache salts: it says nothing about the key.
        """
        # A key that is alone today would otherwise share its cache with the one that takes its place.
        if len(self._digests) < 2 and not self._may_change:
            return ""
        return hashlib.sha256(b"tenant" + (_digest(authorization) or b"")).hexdigest()[:32]


def _digest(authorization: bytes | None) -> bytes | None:
    """Of the key in ``Bearer KEY``; None for anything else."""
    scheme, _, key = (authorization or b"").partition(b" ")
    return hashlib.sha256(key.strip()).digest() if scheme.lower() == b"bearer" else None
