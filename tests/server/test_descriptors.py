"""File descriptors: raised as far as it goes, compared with the other limits, and missed aloud."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine

from jettison.config import EngineConfig
from jettison.device.model.end_tokens import EndTokens
from jettison.server import descriptors, launch
from jettison.server.descriptors import DescriptorWatch, connection_limit, raise_descriptor_limit
from jettison.server.quiet_log import Seldom

INFINITY = resource.RLIM_INFINITY


RESERVED_BY_TWO = descriptors.RESERVED + 2 * descriptors.RESERVED_PER_INSTANCE
"""Descriptors that two instances and the server itself may need."""

@pytest.fixture
def limits(monkeypatch):
    """(soft, hard), as the operating system would hold them."""
    held = [1024, 4096]

    def setrlimit(which, pair):
        assert which == resource.RLIMIT_NOFILE
        assert held[1] == pair[1]
        held[:] = pair

    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda which: tuple(held))
    monkeypatch.setattr(descriptors.resource, "setrlimit", setrlimit)
    return held


@pytest.mark.parametrize(
    ("soft", "hard", "result"),
    [
        (1024, 4096, 4096),
        (1024, 1 << 20, 65_536),
        (1024, INFINITY, 65_536),
        (100_000, 1 << 20, 100_000),
        (512, 512, 512),
        (INFINITY, INFINITY, 65_536),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_it_goes(limits, soft, hard, result):
    limits[:] = soft, hard
    assert raise_descriptor_limit(65_536) == result
    assert limits == [soft if soft in (result, INFINITY) else result, hard]


@pytest.mark.parametrize("error", [ValueError("not allowed"), PermissionError(1, "no")])
def test_a_limit_that_cannot_be_raised_stays(limits, monkeypatch, error):
    def refuse(which, pair):
        raise error

    monkeypatch.setattr(descriptors.resource, "setrlimit", refuse)
    assert raise_descriptor_limit(65_536) == 1024


def test_too_few_connections_for_the_other_limits_are_told(limits, caplog):
    assert connection_limit(2, 1000) == 4096 - RESERVED_BY_TWO
    assert connection_limit(2, None) == 4096 - RESERVED_BY_TWO
    assert not caplog.records
    limits[:] = 1024, 1024
    assert connection_limit(2, 1512) == 1024 - RESERVED_BY_TWO
    (record,) = caplog.records
    left = 1024 - RESERVED_BY_TWO
    assert f"1024 open files leaves {left} for connections, but 1512 requests" in record.getMessage()
    assert f"ulimit -n {1512 + RESERVED_BY_TWO}" in record.getMessage()
    limits[:] = 50, 50
    assert connection_limit(2, None) == 1


def test_a_long_queue_gets_what_it_needs(limits, caplog):
    limits[:] = 1024, 1 << 20
    assert connection_limit(2, 100_000) == 100_000
    assert not caplog.records


async def test_the_launcher_limits_connections(tmp_path, monkeypatch, limits, caplog):
    seen = {}

    def create_app(engine, tokenizer, settings, batches):
        seen["max_connections"] = settings.max_connections
        raise RuntimeError("seen enough")

    prepared = SimpleNamespace(end_tokens=EndTokens((), ()), byte_tokens=None)
    monkeypatch.setattr(launch.Engine, "prepare", lambda self: prepared)
    monkeypatch.setattr(launch, "health_details", lambda assembly: {})
    monkeypatch.setattr(launch.Tokenizer, "from_dir", lambda folder, **options: SimpleNamespace(turn_end=lambda: None))
    monkeypatch.setattr(launch, "create_app", create_app)
    with pytest.raises(RuntimeError, match="enough"):
        await launch._serve(EngineConfig.resolve(model=str(tmp_path), max_num_queued_reqs=9000, num_cores=1))
    assert seen == {"max_connections": 4096 - descriptors.RESERVED - descriptors.RESERVED_PER_INSTANCE}
    assert "9256 requests may run and wait" in caplog.text


def test_having_none_left_is_said_once_a_minute(caplog):
    """The real limit, for a moment: nothing else in this process opens a file meanwhile."""
    now_s = [0.0]
    watch = DescriptorWatch(Seldom(logging.getLogger("test"), clock=lambda: now_s[0]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    watch.look()
    assert not caplog.records
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        for now_s[0] in (0.0, 1.0, 59.0, 61.0):
            watch.look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [record.getMessage() for record in caplog.records] == [
        f"no file descriptor is left ({os.strerror(errno.EMFILE)}): new connections are refused",
        f"no file descriptor is left ({os.strerror(errno.EMFILE)}): new connections are refused"
        " (and 2 times since this was last said)",
    ]


async def test_an_event_loop_that_cannot_accept_is_heard_once(serve, caplog):
    loop = asyncio.get_running_loop()
    async with serve(FakeEngine()):
        error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        for _ in range(5):
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})
        assert [record.name for record in caplog.records] == ["jettison.server.serving"]
        loop.call_exception_handler({"message": "something else", "exception": ValueError("x")})
        assert [record.name for record in caplog.records] == ["jettison.server.serving", "asyncio"]
    assert loop.get_exception_handler() is None
