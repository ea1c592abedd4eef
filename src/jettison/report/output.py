"""Output files of a command: checked for writability before the work, and afterwards whole or absent."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from jettison.errors import ConfigError


def check_writable(path: Path) -> None:
    """Raise ConfigError before a long run for a file that could not be written after it. Makes the folder, never the
    file."""
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
    """Write ``path`` atomically, so that no reader finds half of it. Raises OSError, and then leaves the earlier file
    in place."""
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
    """Whether to write into the existing path: a link, a device or a pipe, or a file in a folder that takes no new
    files."""
    if path.is_symlink():
        return True
    return path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK))


def safe_name(text: str) -> str:
    """A part of a file name from any text, without colons, spaces and slashes: ``burst: drop`` -> ``burst-drop``."""
    return re.sub(r"[^\w.=-]+", "-", text).strip("-.") or "run"
