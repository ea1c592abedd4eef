"""API keys. Compared in constant time, and never kept or logged in clear."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Probes carry no key."""

ADMIN_PATHS = frozenset({"/sleep", "/wake_up", "/is_sleeping"})
"""They change what serves: no client's key opens them."""


class KeyRing:
    """The keys that open the API; without any, everything is open."""

    def __init__(self, keys: Iterable[str], *, may_change: bool = False) -> None:
        self._may_change = may_change
        self._digests: tuple[bytes, ...] = ()
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """Other keys from now on. Requests that were admitted go on."""
        self._digests = tuple(dict.fromkeys(hashlib.sha256(key.encode()).digest() for key in keys))

    @property
    def is_empty(self) -> bool:
        """No key is asked for."""
        return not self._digests

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
        return self.tenant_of(self.owner(authorization))

    def owner(self, authorization: bytes | None) -> str:
        """A label of the key itself, for what is stored: whatever other keys there are today, it is the key's tomorrow.
        Empty where no key is asked for. ``authorization`` has been admitted.
        """
        return hashlib.sha256(b"tenant" + (_digest(authorization) or b"")).hexdigest()[:32] if self._digests else ""

    def tenant_of(self, owner: str) -> str:
        """The tenant behind such a label, as ``tenant`` has it."""
        # A key that is alone today would otherwise share its cache with the one that takes its place.
        return owner if self._may_change or len(self._digests) > 1 else ""


def _digest(authorization: bytes | None) -> bytes | None:
    """Of the key in ``Bearer KEY``; None for anything else."""
    scheme, _, key = (authorization or b"").partition(b" ")
    return hashlib.sha256(key.strip()).digest() if scheme.lower() == b"bearer" else None
