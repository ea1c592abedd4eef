"""Stand-ins for files of a model folder, left by a checkout, a copy or a download.

Only a file's first bytes are read, and only where reading it has failed or would fail.
"""

from __future__ import annotations

from pathlib import Path

_LFS = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")
_PAGES = (b"<!doctype html", b"<html")
_HEAD_BYTES = 512


def why_not_itself(path: Path) -> str | None:
    """A description of the stand-in, with the remedy; None: no known kind."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        if path.is_symlink():
            return "a link to a file that is not there; copy the folder with its files (cp -rL), or download it again"
        return None
    except OSError:
        return None
    if head.startswith(_LFS):
        return f"a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}, or download the file"
    if head.lstrip().lower().startswith(_PAGES):
        return "a web page, not the file; download it again"
    return None
