"""A server's API keys and the content of its TLS files, good ones: where a file is bad when a controller comes back,
what an earlier one found in it stays in force.

They lie in a memory file of the parent, which each controller inherits by its fork; front ends are told what their
controller has. So a file that is half rotated ends neither, and nothing of it is on a disk or in an environment.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import msgspec

from jettison.config import EngineConfig
from jettison.errors import ConfigError
from jettison.server.auth import KeyRing
from jettison.server.key_file import KeySource
from jettison.server.tls import TlsSettings

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32
T = TypeVar("T")


class _Good(msgspec.Struct, frozen=True):
    """What lies in the memory file, behind its digest."""

    keys: tuple[str, ...]
    tls: TlsSettings


class Credentials:
    """Those in force."""

    def __init__(self, config: EngineConfig, good_fd: int | None = None) -> None:
        """``good_fd``: of the parent's memory file, where there is a parent. Raises ConfigError, one line, where a file
        is bad and no earlier controller has found it good."""
        key_file = config.server.api_key_file
        self._source = KeySource(config.server.api_keys, None if key_file is None else Path(key_file))
        self._fd = good_fd
        before = None if good_fd is None else _read(good_fd)
        told = TlsSettings(**asdict(config.tls))
        self.keys = _now_or_before(self._source.read, None if before is None else before.keys, "API keys")
        self.tls = _now_or_before(lambda: _usable(told), None if before is None else before.tls, "TLS files")
        """With what its files held."""
        self._keep()

    @property
    def keys_may_change(self) -> bool:
        """Whether ``reload`` may find other keys."""
        return self._source.path is not None

    def reload(self, ring: KeyRing) -> None:
        """See ``KeySource``: what it finds good is good for later controllers, too."""
        keys = self._source.reload(ring)
        if keys is not None:
            self.keys = keys
            self._keep()

    def _keep(self) -> None:
        if self._fd is None:
            return
        content = msgspec.msgpack.encode(_Good(self.keys, self.tls))
        data = hashlib.sha256(content).digest() + content
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))


def _usable(told: TlsSettings) -> TlsSettings:
    read = told.read()
    read.context()
    return read


def _now_or_before(now: Callable[[], T], before: T | None, what: str) -> T:
    try:
        return now()
    except ConfigError as error:
        if before is None:
            raise
        logger.warning("the %s stay as they were: %s", what, error)
        return before


def _read(fd: int) -> _Good | None:
    """None where nothing was kept, or its controller died while it wrote."""
    kept = os.pread(fd, os.fstat(fd).st_size, 0)
    digest, content = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
    return msgspec.msgpack.decode(content, type=_Good) if hashlib.sha256(content).digest() == digest else None
