"""A limit on the addresses of a process (``ulimit -v``): what it must leave, and the one line that names it.

A worker reserves far more addresses than it uses memory: every layer's KV arena could take the whole budget. What such
a limit breaks fails in many ways, some of them by ending the process from inside a library. So the least is asked for
before any library is loaded, and what fails later is told with the limit's name.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator

from jettison.errors import JettisonError, UserError

PROGRAM_BYTES = 1 << 30
"""Addresses of a process with its libraries and threads, without a worker's arenas: 0.65 to 0.95 GiB were seen."""

MORE_PROGRAM_BYTES = 3 << 29
"""The same of a command that also runs a reference, fits or draws: 0.9 to 1.2 GiB were seen."""

_PHRASES = (
    "failed to map segment", "cannot allocate memory", "can't allocate memory", "unable to allocate",
    "can't start new thread", "bad_alloc",
)
"""How libraries put it that the kernel gave no addresses."""


def address_limit() -> int | None:
    """Bytes of addresses that this process and its children may have each; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def check_address_limit(least_bytes: int = PROGRAM_BYTES) -> None:
    """Raise UserError where libraries need more than the limit. To be called before they are loaded."""
    limit = address_limit()
    if limit is not None and limit < least_bytes:
        raise UserError(f"{_name(limit)}, and this command needs at least {gib(least_bytes)}: {_MEND}")


def spans_complaint(span_bytes: int) -> str | None:
    """One line where a worker that reserves so many bytes may need more than the limit; None where it does not."""
    limit, needed = address_limit(), PROGRAM_BYTES + span_bytes
    if limit is None or needed <= limit:
        return None
    return f"{_name(limit)}, and a worker with this memory needs about {gib(needed)}: lower --memory, or {_MEND}"


def explained(error: Exception) -> Exception:
    """The same error, or, where a limit on addresses may well be why it was raised, a UserError whose line names it.

    One of ours keeps its class.
    """
    limit = address_limit()
    if limit is None or _NAME in str(error):
        return error
    sign = next((cause for cause in _causes(error) if _is_sign(cause)), None)
    if sign is None:
        return error
    told = str(error) if isinstance(error, JettisonError) else f"{type(sign).__name__}: {sign}".removesuffix(": ")
    kind = type(error) if isinstance(error, UserError) else UserError
    return kind(
        f"{' '.join(told.split())[:300]}; {_name(limit)}, which is too little: a process needs {gib(PROGRAM_BYTES)},"
        f" and a worker its --memory once for each layer besides; {_MEND}"
    )


def shortage_hint() -> str:
    """What is to be added to the end of a process that may have met the limit; empty without a limit."""
    limit = address_limit()
    return "" if limit is None else f" ({_name(limit)})"


_NAME = "ulimit -v"
_MEND = f"raise that limit, or lift it with `{_NAME} unlimited`"


def _name(limit: int) -> str:
    return f"{_NAME} lets a process have {gib(limit)} of addresses"


def gib(num_bytes: int) -> str:
    """For people: ``1.50 GiB``."""
    return f"{num_bytes / 2**30:.2f} GiB"


def _is_sign(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    text = str(error).lower()
    return any(phrase in text for phrase in _PHRASES)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """It and what it was raised from, or during; each once."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        found = waiting.pop(0)
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += [cause for cause in (found.__cause__, found.__context__) if cause is not None]
