"""Normal forms of a request's path, as clients and proxies may write it. Routes and handlers are elsewhere."""

from __future__ import annotations

import re

_SLASHES = re.compile("//+")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
_WITHOUT_PREFIX = re.compile(r"/(chat/completions|completions|responses|messages|models|files|batches)(/|$)")
"""Paths of the API as written by a client with a base URL that lacks ``/v1``."""

_MESSAGES = re.compile(r"(/v1)?/messages(/|$)")

_LEFT_OUT = {
    "embeddings": "Embeddings are not served here",
    "rerank|score|classify|pooling|moderations": "Scores and classes of texts are not served here",
    "(un)?load_lora_adapter": "Adapters (LoRA) are not served here",
    "images/[a-z]+|audio/[a-z]+|videos": "Images, sound and video are not served here",
}
"""Ends of paths that servers of its kind may have, and what each asks for."""


def left_out(path: str) -> str:
    """What a path asks for that no version of this server does, for a 404; empty for any other path."""
    end = re.sub(r"^(/v[12])?/", "", path)
    told = (told for ends, told in _LEFT_OUT.items() if re.fullmatch(ends, end))
    return next((f" {each}: use /v1/chat/completions or /v1/completions." for each in told), "")


def plain_path(path: str, root_path: str = "") -> str:
    """The normal form of a path: each run of slashes becomes one, none at the end, and no ``root_path`` in front.

    A base URL may end in a slash, and clients that add another make ``/v1//chat/completions`` of it. A redirect would
    lose the body of a POST, and a 404 would not show the cause. Keys and limits use the plain path, so no other
    spelling avoids them. A proxy may have removed ``root_path`` or not: both are the same request.
    """
    path = _SLASHES.sub("/", path)
    if root_path and (path == root_path or path.startswith(root_path + "/")):
        path = path[len(root_path) :]
    return path.rstrip("/") or "/"


def is_messages_path(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return _MESSAGES.match(path) is not None


def has_controls(path: str) -> bool:
    """Whether a decoded path has control characters, which no resource's name has. A pattern's ``$`` also matches
    before a line end, so a route could match a path other than the one that the key was checked for.
    """
    return _CONTROLS.search(path) is not None


def same_name(in_path: str, name: str) -> bool:
    """Whether this end of a plain path is that name; the name may have slashes anywhere."""
    return in_path.strip("/") == _SLASHES.sub("/", name).strip("/")


def prefix_hint(path: str) -> str:
    """A hint for a 404: the likely error in the client's base URL; empty where the path does not suggest one."""
    if path.startswith("/v1/v1/"):
        return " /v1 stands in it twice: the client adds its own to the base URL."
    if _WITHOUT_PREFIX.match(path):
        return " The API is under /v1: the client's base URL should end in it."
    return ""
