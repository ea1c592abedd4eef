"""File descriptors: raises the limit, computes the limit of connections, and warns when descriptors run out.

Every connection takes one. Without any left, connections are reset or wait without a line in any log, and other files
fail to open: a worker's new channel, the time line, a recorded trace.
"""

from __future__ import annotations

import logging
import os
import resource

from jettison.errors import OUT_OF_DESCRIPTORS
from jettison.server.quiet_log import Seldom

logger = logging.getLogger(__name__)

WANTED = 65_536
"""Wanted limit, even where other limits admit fewer requests: refused clients have connections too. Checking so many
connections takes milliseconds."""
RESERVED = 80
RESERVED_PER_INSTANCE = 16
"""Descriptors of one instance besides clients' connections: logs, libraries, listeners, 16 probes; a worker's channel,
links and restart."""


def raise_descriptor_limit(wanted: int) -> int:
    """Raise the soft limit towards ``wanted``, as far as the hard one allows; returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft >= ceiling:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
    except (ValueError, OSError) as error:  # some systems have a lower ceiling than they report
        logger.debug("the limit of open files stays at %d: %s", soft, error)
        return soft
    return ceiling


def connection_limit(instances: int, num_requests: int | None) -> int:
    """Raise the limit of open files; returns the number of connections that it allows.

    ``num_requests``: requests that the other limits admit at one time; None: unbounded. Too few connections for them
    are logged as a warning.
    """
    num_reserved = RESERVED + RESERVED_PER_INSTANCE * instances
    num_descriptors = raise_descriptor_limit(max(WANTED, num_reserved + (num_requests or 0)))
    limit = max(1, num_descriptors - num_reserved)
    if num_requests is not None and limit < num_requests:
        logger.warning(
            "the limit of %d open files leaves %d for connections, but %d requests may run and wait at one time: "
            "raise it (ulimit -n %d), or lower --max-num-queued-reqs",
            num_descriptors, limit, num_requests, num_requests + num_reserved)
    return limit


class DescriptorWatch:
    """Logs, at most once a minute, that no descriptor is left."""

    def __init__(self, seldom: Seldom) -> None:
        self._seldom = seldom

    def look(self) -> None:
        """Try to open one more descriptor, because event loops silently reset connections that they have no descriptor
        for."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            self.note(error)

    def note(self, error: OSError) -> bool:
        """Whether an error means that no descriptor is left; if so, it is logged."""
        if error.errno not in OUT_OF_DESCRIPTORS:
            return False
        self._seldom.warning("no file descriptor is left (%s): new connections are refused", error.strerror)
        return True
