"""What a process without torch does for devices of others: their environment, and the memory that they share."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

ONEDNN_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables for the number of products that oneDNN, and torch's layer above it, keep code for. Both keep the same code
alive."""

NUM_KEPT_PRODUCTS = 32
"""The five products of a step at the last six numbers of rows. The code of one has 0.4 to 0.8 MiB and takes about half
a millisecond to generate. By default both keep 1,024, which was 0.9 GiB and more for steps of 1 to 256 rows."""


def bound_onednn_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let oneDNN keep little outside of the memory budget. It has an effect only before oneDNN's first product.

    Variables that are set already stay unchanged.
    """
    for name in ONEDNN_CACHES:
        environ.setdefault(name, str(NUM_KEPT_PRODUCTS))


def open_shared_copy() -> int:
    """Create an empty copy of the parameters (``device.sharedcopy``); returns its descriptor, for the workers of a
    machine. It takes no memory before a write.

    Raises OSError."""
    return os.memfd_create("jettison-parameters", os.MFD_CLOEXEC)
