"""Chain hashes of full token blocks: equal hash means equal tokens from the start of the prompt, for one tenant.

Pure. Keyed (a secret per engine) and 128 bits wide, so that nobody outside can construct a collision; the salt keeps
tenants apart.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


class PrefixHasher:
    """Hashes blocks of ``block_size`` tokens, each over its parent's hash."""

    def __init__(self, block_size: int, secret: bytes) -> None:
        self._block_size = block_size
        self._key = hashlib.blake2b(secret, digest_size=32).digest()

    def chain(self, token_ids: Sequence[int], salt: str, parent: bytes | None = None) -> list[bytes]:
        """Hashes of the full blocks in ``token_ids``; a partial last block has none.

        ``parent`` is the hash of the block before, or None at the start, where the salt comes in.
        """
        link = parent if parent is not None else self._digest(b"root", salt.encode())
        hashes: list[bytes] = []
        for start in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            link = self._digest(link, array("i", token_ids[start : start + self._block_size]).tobytes())
            hashes.append(link)
        return hashes

    def _digest(self, parent: bytes, content: bytes) -> bytes:
        return hashlib.blake2b(parent + content, digest_size=DIGEST_BYTES, key=self._key).digest()
