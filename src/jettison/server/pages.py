"""Lists of the API, a page at a time: what a request asks for, and the page as OpenAI writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from jettison.server.errors import bad_request


def limit_of(request: Request, default: int, most: int) -> int:
    """Most items that the request wants on its page. Raises ApiError 400."""
    text = request.query_params.get("limit", str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 6 or not 1 <= int(text) <= most:
        raise bad_request(f"limit must be a whole number from 1 to {most}.", "limit")
    return int(text)


def is_newest_first(request: Request) -> bool:
    """The order that the request wants. Raises ApiError 400."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc.", "order")
    return order == "desc"


def page_of(items: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """The document of a page. ``items``: one more than the limit, or several, where there are more."""
    data = items[:limit]
    return {
        "object": "list", "data": data, "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None, "has_more": len(items) > limit,
    }  # fmt: skip
