"""API keys from a file: one in each line, without blank lines and lines that begin with #. No message quotes a key."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from jettison.errors import ConfigError
from jettison.server.auth import KeyRing

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 20


class KeySource:
    """The sources of a server's keys: fixed ones, and a file that may be read again."""

    def __init__(self, fixed: tuple[str, ...], path: Path | None) -> None:
        self._fixed = fixed
        self.path = path

    def read(self) -> tuple[str, ...]:
        """All keys as of now. Raises ConfigError."""
        return self._fixed if self.path is None else (*self._fixed, *read_key_file(self.path))

    def reload(self, ring: KeyRing) -> tuple[str, ...] | None:
        """Read the file again and replace the ring's keys, which are returned; an unusable file is logged in one line,
        and the ring stays unchanged."""
        try:
            keys = self.read()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            return None
        ring.replace(keys)
        logger.info("API keys were read again: %d are in force", len(set(keys)))
        return keys


def read_key_file(path: Path) -> tuple[str, ...]:
    """The keys in it, at least one. Raises ConfigError: one line that names the file, and the line in it."""
    try:
        content = _read(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read API keys from {path}: {reason}") from None
    keys = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if not all(0x21 <= byte <= 0x7E for byte in key):
            raise ConfigError(f"{path}, line {number}: a key is one word of printable ASCII characters")
        keys.append(key.decode("ascii"))
    if not keys:
        raise ConfigError(f"{path} holds no API key: without one, everything would be open")
    return tuple(keys)


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # A pipe could not be read a second time, and would block the reader.
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        content = os.read(descriptor, MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        return content
    finally:
        os.close(descriptor)
