"""Python's garbage collector during start-up and after it, in the server's process and in each worker's. Nothing else
lives here.

When the small objects of many steps set off a full collection, it walks everything that start-up has made: all of
torch's modules, the tokenizer, the application. None of that becomes garbage while the process serves, so it is taken
out of the collector's sight once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """While modules are imported: collections in between are an eighth of the time of torch's import, and one behind it
    is another tenth. Nearly all that they make stays, so none looks at it, then or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle_garbage_collector() -> None:
    """Collect what start-up has left over, and never look at the rest again. Once a process, when it is ready."""
    gc.collect()
    gc.freeze()
