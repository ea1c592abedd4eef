"""The user's own cache of models that ``jettison model fetch`` made: where it is, and the folder that a name means.

``JETTISON_CACHE`` names the cache, else it is ``jettison`` in ``XDG_CACHE_HOME`` or ``~/.cache``. Nothing is
downloaded here.
"""

from __future__ import annotations

import os

FETCHABLE = ("smollm2", "smollm2-q4")
"""Names that can be fetched (``modelfiles.fetching`` has the rest)."""


def fetched_folder(name: str) -> str:
    """The place of a fetched model, be it there or not."""
    cache = os.environ.get("JETTISON_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "jettison"
    )
    return os.path.join(cache, "models", name)


def fetched_model(named: str) -> str | None:
    """The folder of a fetched model where ``named`` is the name of one that is there, and of nothing else."""
    if named not in FETCHABLE or os.path.exists(named):
        return None
    folder = fetched_folder(named)
    return folder if is_whole(folder) else None


def is_whole(folder: str | os.PathLike[str]) -> bool:
    """Whether a model is there. A folder gets its name when it is complete, so one file of it tells."""
    return os.path.isfile(os.path.join(folder, "config.json"))


def fetch_hint(named: str) -> str:
    """The end of an error about a missing model folder: the command that fetches it, if one does."""
    return f" (`jettison model fetch {named}` gets a model of this name)" if named in FETCHABLE else ""
