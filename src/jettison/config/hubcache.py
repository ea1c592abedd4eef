"""The folder that a given name means, and the model's name: folders in Hugging Face's hub cache, and fetched models.

The cache has a folder ``models--ORG--NAME`` for each repository; ``snapshots/REVISION`` in it are model folders, of
links to files in ``blobs``, and ``refs/main`` names the revision that was downloaded last. Nothing is downloaded here.
"""

from __future__ import annotations

import os
import re
import shlex

from jettison.config.modelcache import FETCHABLE, fetch_hint, fetched_model
from jettison.errors import ConfigError

_REPOSITORY = "models--"
_LEAST_OF_A_COMMIT = 7
"""Characters by which a commit may be named."""
_ID = re.compile(r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)?([\w.-]+(?:/[\w.-]+)?)/*")


def model_folder(named: str, revision: str | None = None, cache: str | None = None) -> str:
    """The model folder that ``named`` means: a repository of the hub's cache stands for its downloaded revision, so
    does its ``ORG/NAME`` where no folder of that name is here, and the name of a fetched model (``modelcache``) for its
    folder. ``revision``: a branch, tag or commit of it, in place of the main one; ``cache``: looked in first.

    Raises ConfigError where the repository holds no revision, not the one that is asked for, or several without a main
    one among them.
    """
    if (fetched := fetched_model(named)) is not None:
        return fetched
    path = os.path.abspath(named)
    if not os.path.exists(path) and (kept := _kept(named, cache)) is not None:
        path = kept
    if os.path.basename(path) == "snapshots" and _is_repository(os.path.dirname(path)):
        path = os.path.dirname(path)
    if not _is_repository(path) or os.path.exists(os.path.join(path, "config.json")):
        return named
    snapshots = os.path.join(path, "snapshots")
    revisions = sorted(entry for entry in os.listdir(snapshots) if os.path.isdir(os.path.join(snapshots, entry)))
    return os.path.join(snapshots, _chosen(named, path, revisions, revision))


def _chosen(named: str, repository: str, revisions: list[str], wanted: str | None) -> str:
    """The commit of the revision that is wanted (None: the main one)."""
    if wanted is not None:
        begun = [commit for commit in revisions if len(wanted) >= _LEAST_OF_A_COMMIT and commit.startswith(wanted)]
        commit = _commit_of(repository, wanted) or (begun[0] if len(begun) == 1 else wanted)
        if commit not in revisions:
            told = f"`hf download {_repository_name(repository)} --revision {shlex.quote(wanted)}` gets it"
            raise ConfigError(f"{named}: the hub's cache has no revision {wanted!r} in {repository}; {told}")
        return commit
    main = _commit_of(repository, "main")
    if main in revisions:
        return main
    if len(revisions) != 1:
        has = f"{len(revisions)} snapshots, and refs/main names none of them" if revisions else "no snapshot"
        raise ConfigError(f"{named}: the hub's cache has {has}; name the folder of one, or its --revision")
    return revisions[0]


def _kept(named: str, cache: str | None) -> str | None:
    """The repository of ``ORG/NAME`` in the first cache that has it."""
    name = _id_of(named)
    if name is None:
        return None
    places = [os.path.join(each, _REPOSITORY + name.replace("/", "--")) for each in caches(cache)]
    return next((place for place in places if _is_repository(place)), None)


def _repository_name(path: str) -> str:
    return os.path.basename(path).removeprefix(_REPOSITORY).replace("--", "/")


def model_name(folder: str) -> str:
    """The name of a model: ``ORG/NAME`` for a snapshot in the cache, also through links, else the folder's own name."""
    path = os.path.realpath(folder)
    snapshots = os.path.dirname(path)
    repository = os.path.basename(os.path.dirname(snapshots))
    if os.path.basename(snapshots) == "snapshots" and repository.startswith(_REPOSITORY):
        return _repository_name(repository)  # the hub allows no -- in a name
    return os.path.basename(os.path.abspath(folder))


def download_hint(named: str) -> str:
    """The end of an error about a missing model folder: the command that downloads it. Empty where ``named`` looks like
    no name that can be downloaded.
    """
    if hint := fetch_hint(named):
        return hint
    if named.endswith(".gguf"):
        return f" (`jettison model import {shlex.quote(named)} DIR` makes one of a GGUF file)"
    found = _id_of(named)
    if found is None:
        is_name = re.fullmatch(r"[\w-][\w.-]*", named) is not None
        return f" (names to fetch: {', '.join(FETCHABLE)}; of the hub: ORG/NAME)" if is_name else ""
    return f" (not in the hub's cache {caches()[0]}: after `hf download {found}` the same command serves it)"


def _id_of(named: str) -> str | None:
    """``ORG/NAME`` of a name of the hub, also as a URL; None where it looks like a path."""
    name = named.replace(":/", "://", 1) if re.match(r"(https?|hf):/[^/]", named) else named  # as a Path spells it
    match = _ID.fullmatch(name)
    if match is None or named.startswith(".") or ("/" not in match[1] and match[0] == match[1]):
        return None
    return match[1]


def _is_repository(path: str) -> bool:
    return os.path.basename(path).startswith(_REPOSITORY) and os.path.isdir(os.path.join(path, "snapshots"))


def _commit_of(repository: str, name: str) -> str:
    """The commit that a branch or tag names; empty where there is none."""
    if ".." in name.split("/"):
        return ""
    try:
        with open(os.path.join(repository, "refs", name), encoding="utf-8") as file:
            return file.read(100).strip()
    except (OSError, ValueError):  # ValueError: not UTF-8, or a name with a zero byte
        return ""


def caches(first: str | None = None) -> list[str]:
    """Folders that hold repositories, in the order in which they are looked in: ``first``, then what the variables of
    the hub's own client name."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    told = [first, os.environ.get("HF_HUB_CACHE"), os.environ.get("HUGGINGFACE_HUB_CACHE"), os.path.join(home, "hub")]
    return list(dict.fromkeys(os.path.expanduser(place) for place in told if place))
