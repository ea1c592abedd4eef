"""What a request's path means, however a client or a proxy has written it. Routes and handlers are elsewhere."""

from __future__ import annotations

import re

_SLASHES = re.compile("//+")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
_WITHOUT_PREFIX = re.compile(r"/(chat/completions|completions|models|files|batches)(/|$)")
"""Paths of the API as a client writes them whose base URL lacks its ``/v1``."""


def plain_path(path: str, root_path: str = "") -> str:
    """The one spelling of a path: each run of slashes is one, none is at the end, ``root_path`` is not in front.

    Base URLs end in a slash or do not, and clients that add theirs make ``/v1//chat/completions`` of it. A redirect
    would cost a POST its body, and a 404 tells nothing of the cause. Keys and limits go by the plain path, so another
    spelling opens nothing. A proxy may have cut ``root_path`` off, or not: either is the same request.
    """
    path = _SLASHES.sub("/", path)
    if root_path and (path == root_path or path.startswith(root_path + "/")):
        path = path[len(root_path) :]
    return path.rstrip("/") or "/"


def has_controls(path: str) -> bool:
    """Whether a decoded path has characters that no resource's name has. A pattern's ``$`` fits before a line end, so a
    route would be met by a path that is not the one whose key was asked for.
    """
    return _CONTROLS.search(path) is not None


def same_name(in_path: str, name: str) -> bool:
    """Whether this end of a plain path is that name, which may have slashes of its own anywhere."""
    return in_path.strip("/") == _SLASHES.sub("/", name).strip("/")


def prefix_hint(path: str) -> str:
    """For a client that finds nothing at this path: what is wrong with the base URL, if that is what it looks like."""
    if path.startswith("/v1/v1/"):
        return " /v1 stands in it twice: the client adds its own to the base URL."
    if _WITHOUT_PREFIX.match(path):
        return " The API is under /v1: the client's base URL should end in it."
    return ""
