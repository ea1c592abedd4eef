"""The settings of files and batches. Limits are enforced before the work that they bound."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jettison.server.batches.window import Rates

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The folder of files and batches, and their limits."""

    folder: Path
    tokenizer_dir: Path
    """Folder of the tokenizer, which counts the tokens of lines."""
    byte_tokens: int | None = None
    """See ``Tokenizer.from_dir``."""
    is_made_at_once: bool = True
    """Whether the folder is made at the start; if not, it is made when it is first needed, and opened at the start only
    if it exists."""
    window: int = 512
    """Most choices of batches in the core at one time."""
    max_file_bytes: int = 200_000_000
    max_lines: int = 50_000
    """Most lines of one batch."""
    max_stored_bytes: int = 4 << 30
    """Most bytes of all files of one key."""
    max_files: int = 1_000
    """Most files of one key."""
    max_open_batches: int = 100
    """Most batches of one key that are not over."""
    max_uploads: int = 4
    """Most uploads received at one time."""
    profiled: Callable[[], Rates | None] = lambda: None
    """The engine's rates by its profile; None without one."""


def own_folder(model_name: str, port: int) -> Path:
    """The folder of a server without a configured one; the same at every start."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(data) / "jettison" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', model_name)}-{port}"
