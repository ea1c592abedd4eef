"""Files of a model folder that are not themselves: what a checkout, a copy or a download left in a file's place.

Looks at a file's first bytes only, and only where reading it has failed or is about to.
"""

from __future__ import annotations

from pathlib import Path

_LFS = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")
_PAGES = (b"<!doctype html", b"<html")
_HEAD_BYTES = 512


def why_not_itself(path: Path) -> str | None:
    """What stands in the file's place, with the mend; None: nothing that is known here."""
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
