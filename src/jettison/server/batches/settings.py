"""What files and batches are told. Limits are enforced before the work that they bound."""

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
    """Where files and batches lie, and how much of them there may be."""

    folder: Path
    model_dir: Path
    """Whose tokenizer counts the tokens of lines."""
    is_made_at_once: bool = True
    """False: the folder is made when it is first needed, and opened at the start only where it is there."""
    window: int = 512
    """Choices of batches in the core at one time."""
    max_file_bytes: int = 200_000_000
    max_lines: int = 50_000
    """Of one batch."""
    max_stored_bytes: int = 4 << 30
    """Files of one key, together."""
    max_files: int = 1_000
    """Of one key."""
    max_open_batches: int = 100
    """Of one key, that are not over."""
    max_uploads: int = 4
    """Being received at one time."""
    profiled: Callable[[], Rates | None] = lambda: None
    """What a profile promises of the engine."""


def own_folder(model_name: str, port: int) -> Path:
    """The folder of a server that was given none: the same at its next start."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(data) / "jettison" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', model_name)}-{port}"
