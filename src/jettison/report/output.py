"""Files that a command was asked to write: refused before the work where they cannot be, afterwards whole or absent."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from jettison.errors import ConfigError


def check_writable(path: Path) -> None:
    """What could fail after a long run fails before it. Makes the folder, never the file. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("a"):
                pass
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def write_whole(path: Path, text: str) -> None:
    """Write ``path`` in one go, so that no reader finds half of it. Raises OSError, and leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_written_in_place(path):
        path.write_text(text, encoding="utf-8")
        return
    staged = path.with_name(f".jettison-{os.getpid()}.tmp")
    try:
        staged.write_text(text, encoding="utf-8")
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def _is_written_in_place(path: Path) -> bool:
    """A link, a device or a pipe stays what it is; so does a file in a folder that takes no new ones."""
    if path.is_symlink():
        return True
    return path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK))


def safe_name(text: str) -> str:
    """Part of a file name made of any text, without colons, spaces and slashes: ``burst: drop`` -> ``burst-drop``."""
    return re.sub(r"[^\w.=-]+", "-", text).strip("-.") or "run"
