"""Lines that clients cause: seldom, short, and harmless to a terminal."""

from __future__ import annotations

import logging

from jettison.server.quiet_log import PlainFormatter, Seldom, TracebackLimit


class Lines(logging.Handler):
    """What a log file would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(PlainFormatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def logger_with(handler: logging.Handler) -> logging.Logger:
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger


def test_the_same_thing_is_said_once_a_minute_with_a_count():
    lines, now_s = Lines(), [0.0]
    seldom = Seldom(logger_with(lines), clock=lambda: now_s[0])
    for at in range(100):
        now_s[0] = at / 10
        seldom.warning("%d files", at)
    seldom.warning("something else")
    now_s[0] = 61.0
    seldom.warning("%d files", 7)
    now_s[0] = 130.0
    seldom.warning("%d files", 8)
    assert lines.lines == [
        "WARNING test: 0 files",
        "WARNING test: something else",
        "WARNING test: 7 files (and 99 times since this was last said)",
        "WARNING test: 8 files",
    ]


def test_a_line_is_a_line_whatever_is_in_it():
    lines = Lines()
    logger_with(lines).warning("model %s\n", "a\nINFO test: forged\r\x1b[31m\x00\x85\u2028\tz")
    assert lines.lines == [r"WARNING test: model a\nINFO test: forged\r\x1b[31m\x00\x85\u2028" + "\tz"]


def fail(logger: logging.Logger, text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("request failed\n")


def test_tracebacks_keep_their_lines_and_lose_control_bytes():
    lines = Lines()
    fail(logger_with(lines), "a\x1b[2Jb")
    (text,) = lines.lines
    assert text.startswith("ERROR test: request failed\nTraceback (most recent call last):\n")
    assert text.endswith("ValueError: a\\x1b[2Jb")


def test_tracebacks_are_counted_by_the_minute():
    lines, now_s = Lines(), [0.0]
    lines.addFilter(TracebackLimit(num_whole=3, num_lines=10, clock=lambda: now_s[0]))
    logger = logger_with(lines)
    for _ in range(100):
        fail(logger, "x" * 1000)
        logger.warning("no traceback")
    told = [line for line in lines.lines if "no traceback" not in line]
    assert len(lines.lines) == 110
    assert ["Traceback" in line for line in told] == [True] * 3 + [False] * 7
    assert told[-1] == "ERROR test: request failed: ValueError (traceback left out: too many a minute)"
    now_s[0] = 60.0
    fail(logger, "y")
    assert "Traceback" in lines.lines[-1]
