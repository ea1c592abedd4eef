"""Logging of events that clients can cause, so that they cannot fill the log: seldom, on one line, without control
characters."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

Clock = Callable[[], float]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class Seldom:
    """A logger that writes the same message at most once in ``interval_s``, with the number of times that it was left
    out."""

    def __init__(self, logger: logging.Logger, interval_s: float = 60.0, clock: Clock = time.monotonic) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._said_s: dict[str, float] = {}
        self._num_unsaid: dict[str, int] = {}

    def warning(self, message: str, *values: object) -> bool:
        """``message`` is a constant that identifies it. Returns whether it was logged."""
        now_s = self._clock()
        said_s = self._said_s.get(message)
        if said_s is not None and now_s - said_s < self._interval_s:
            self._num_unsaid[message] = self._num_unsaid.get(message, 0) + 1
            return False
        self._said_s[message] = now_s
        num_unsaid = self._num_unsaid.pop(message, 0)
        if num_unsaid:
            message, values = message + " (and %d times since this was last said)", (*values, num_unsaid)
        self._logger.warning(message, *values)
        return True


class TracebackLimit(logging.Filter):
    """Logs the first tracebacks of each minute whole, and one line for each further one, so that a client that repeats
    a fault does not fill the disk. Beyond a hundred such lines in a minute nothing is logged.
    """

    def __init__(self, num_whole: int = 10, num_lines: int = 100, clock: Clock = time.monotonic) -> None:
        super().__init__()
        self._num_whole = num_whole
        self._num_lines = num_lines
        self._clock = clock
        self._minute = -1
        self._num_seen = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Shortens the record. Records without a traceback pass."""
        if not record.exc_info or record.exc_info[1] is None:
            return True
        minute = int(self._clock() // 60)
        if minute != self._minute:
            self._minute, self._num_seen = minute, 0
        self._num_seen += 1
        if self._num_seen > self._num_whole:
            values = record.getMessage().strip(), type(record.exc_info[1]).__name__
            record.msg, record.args = "%s: %s (traceback left out: too many a minute)", values
            record.exc_info = record.exc_text = None
        return self._num_seen <= self._num_lines


class PlainFormatter(logging.Formatter):
    """Writes control characters as escapes, also line ends inside a message; a traceback keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback below it where there is one."""
        return _CONTROL.sub(_escaped, super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        """The line itself."""
        record.message = record.message.strip().replace("\n", "\\n")
        return super().formatMessage(record)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def install_log(level: str) -> None:
    """The log of a server's process, on its standard error. Nothing where there is one."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(TracebackLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler])
