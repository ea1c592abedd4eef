"""Which controller workers obey: the first, then only one of a higher epoch, which their server's parent has signed.

The parent keeps the key, signs one epoch for each controller that it starts, and no controller can sign for another.
Ed25519 by the ``cryptography`` package, which is loaded where a controller is succeeded, and by the parent.
"""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from jettison.errors import LinkDownError


def _signed(secret: bytes, epoch: int) -> bytes:
    """What is signed: of this cluster, of this epoch."""
    return b"jettison controller" + hashlib.sha256(secret).digest() + epoch.to_bytes(8)


class Signer:
    """The parent's key."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        """32 bytes; no secret."""

    def sign(self, secret: bytes, epoch: int) -> bytes:
        """That a controller of this epoch is this cluster's (``secret``: the cluster's)."""
        return self._key.sign(_signed(secret, epoch))


def check_signed(public: bytes, secret: bytes, epoch: int, signature: bytes) -> None:
    """Raises LinkDownError where the holder of the key has not signed this epoch for this cluster."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _signed(secret, epoch))
    except (InvalidSignature, ValueError):
        raise LinkDownError(f"no parent has signed a controller of epoch {epoch}") from None
