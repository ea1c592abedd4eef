"""The folder that a given name means, and the model's name: folders in Hugging Face's hub cache, and fetched models.

The cache has a folder ``models--ORG--NAME`` for each repository; ``snapshots/REVISION`` in it are model folders, of
links to files in ``blobs``, and ``refs/main`` names the revision that was downloaded last. Nothing is downloaded here.
"""

from __future__ import annotations

import os
import re
import shlex

from jettison.config.modelcache import fetch_hint, fetched_model
from jettison.errors import ConfigError

_REPOSITORY = "models--"
_ID = re.compile(r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)?([\w.-]+(?:/[\w.-]+)?)/*")


def model_folder(named: str) -> str:
    """The model folder that ``named`` means: a repository of the hub's cache stands for its downloaded revision, the
    name of a fetched model (``modelcache``) for its folder.

    Raises ConfigError where the repository holds no revision, or several without a main one among them.
    """
    if (fetched := fetched_model(named)) is not None:
        return fetched
    path = os.path.abspath(named)
    if os.path.basename(path) == "snapshots" and _is_repository(os.path.dirname(path)):
        path = os.path.dirname(path)
    if not _is_repository(path) or os.path.exists(os.path.join(path, "config.json")):
        return named
    snapshots = os.path.join(path, "snapshots")
    revisions = sorted(entry for entry in os.listdir(snapshots) if os.path.isdir(os.path.join(snapshots, entry)))
    main = _main_revision(path)
    if main not in revisions:
        if len(revisions) != 1:
            has = f"{len(revisions)} snapshots, and refs/main names none of them" if revisions else "no snapshot"
            raise ConfigError(f"{named}: the hub's cache has {has}; name the folder of one")
        (main,) = revisions
    return os.path.join(snapshots, main)


def model_name(folder: str) -> str:
    """The name of a model: ``ORG/NAME`` for a snapshot in the cache, also through links, else the folder's own name."""
    path = os.path.realpath(folder)
    snapshots = os.path.dirname(path)
    repository = os.path.basename(os.path.dirname(snapshots))
    if os.path.basename(snapshots) == "snapshots" and repository.startswith(_REPOSITORY):
        return repository.removeprefix(_REPOSITORY).replace("--", "/")  # the hub allows no -- in a name
    return os.path.basename(os.path.abspath(folder))


def download_hint(named: str) -> str:
    """The end of an error about a missing model folder: the model's folder in the hub's cache where it is there, else
    the command that downloads it. Empty where ``named`` looks like no name that can be downloaded.
    """
    if hint := fetch_hint(named):
        return hint
    if named.endswith(".gguf"):
        return f" (`jettison model import {shlex.quote(named)} DIR` makes one of a GGUF file)"
    name = named.replace(":/", "://", 1) if re.match(r"(https?|hf):/[^/]", named) else named  # as a Path spells it
    match = _ID.fullmatch(name)
    if match is None or name.startswith(".") or ("/" not in match[1] and match[0] == match[1]):
        return ""
    kept = os.path.join(_cache(), _REPOSITORY + match[1].replace("/", "--"))
    if _is_repository(kept):
        return f" (the hub's cache has {match[1]} in {kept}, which can be named here)"
    return f" (a model of the hub has to be downloaded first: `hf download {match[1]} --local-dir DIR`)"


def _is_repository(path: str) -> bool:
    return os.path.basename(path).startswith(_REPOSITORY) and os.path.isdir(os.path.join(path, "snapshots"))


def _main_revision(repository: str) -> str:
    try:
        with open(os.path.join(repository, "refs", "main"), encoding="utf-8") as file:
            return file.read(100).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _cache() -> str:
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
