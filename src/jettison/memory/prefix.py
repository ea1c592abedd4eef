"""Hashes that name the content of full KV blocks, chained from the start of a request.

A block's KV depends on every token before it, so its name covers them all: the hash of the block before, and its own
tokens. The hash is keyed: no client without the secret can make two prompts collide or predict a name (a cross-request
attack on other engines; reliability.md section 3). Where blocks with a name lie is the ledger's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


class PrefixHasher:
    """Names of full blocks of ``block_size`` tokens.

    ``secret`` must differ where KV must not be shared: between deployments, and between models, dtypes and layouts (put
    the model's fingerprint into it).
    """

    def __init__(self, block_size: int, secret: bytes) -> None:
        if block_size < 1:
            raise ValueError(f"block_size {block_size}")
        self.block_size = block_size
        key = blake2b(secret, digest_size=64).digest()  # any length of secret makes a full-length key
        self._root = blake2b(key=key, digest_size=DIGEST_BYTES, person=b"jettison-root")
        self._block = blake2b(key=key, digest_size=DIGEST_BYTES, person=b"jettison-block")

    def chain(self, token_ids: Sequence[int], salt: str, parent: bytes | None = None) -> list[bytes]:
        """Names of the full blocks of ``token_ids``; tokens after the last full block are ignored.

        ``parent`` is the name of the block just before ``token_ids``. None means that they start a request: the chain
        then starts from ``salt``, and requests with different salts share nothing. Token ids are 32-bit
        (OverflowError otherwise).
        """
        if parent is None:
            root = self._root.copy()
            root.update(salt.encode())
            parent = root.digest()
        size = self.block_size
        names: list[bytes] = []
        for start in range(0, len(token_ids) - size + 1, size):
            block = self._block.copy()
            block.update(parent)
            block.update(array("i", token_ids[start : start + size]).tobytes())
            parent = block.digest()
            names.append(parent)
        return names
