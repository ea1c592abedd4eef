"""``/v1/responses``: OpenAI's Responses API. Made as a chat, kept in a bounded store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jettison.server.chat import ChatEndpoint
from jettison.server.doors.response_answer import Keep, ResponseAnswer
from jettison.server.doors.response_input import MAX_ITEMS, chat_of, in_items, items_of, mended, refers
from jettison.server.doors.response_store import MAX_RESPONSE_BYTES, StoredResponse, response_id_of
from jettison.server.doors.response_tables import RESPONSES, ResponseFields
from jettison.server.doors.wire import checked_text, raw, wrong_type
from jettison.server.endpoint import WireAnswer
from jettison.server.errors import ApiError, bad_request
from jettison.server.fields import parse_fields, refusal
from jettison.server.json_out import encode
from jettison.server.pages import is_newest_first, limit_of, page_of
from jettison.server.prompts import Prompt
from jettison.server.sampling import MAX_METADATA, GenerationPlan
from jettison.server.state import ServerState

Items = list[dict[str, Any]]
MAX_PAGE = 100
_NOT_KEPT = "it is another key's, deleted, kept no more, or was too large to be kept (its store is false then)"


class ResponsesEndpoint(ChatEndpoint):
    """Items in, a response out, by way of a chat."""

    prompt_field = "input"

    def __init__(self, state: ServerState) -> None:
        super().__init__(state)
        self.store = state.responses

    async def prepare_for(
        self, tenant: str, document: dict[str, Any]
    ) -> tuple[GenerationPlan, list[Prompt], WireAnswer]:
        """See ``GenerationEndpoint``."""
        fields = parse_fields(document, ResponseFields, self.state.warnings)
        model = self.state.check_model(fields.model)
        _check_metadata(fields.metadata)
        before = await self._before(tenant, fields.previous_response_id)
        sent = items_of(fields.input)
        items = await self._with_referred(tenant, sent)
        before, items = mended(before, items, [refers(item) for item in sent])
        chat, names = chat_of(fields, document, before, items)
        try:
            plan, prompts, _ = await self.prepare(chat)
        except ApiError as error:
            raise in_items(error, sent) from error
        if plan.num_samples > 1:
            raise refusal(RESPONSES, "n")
        if plan.length_field is not None:
            plan = replace(plan, length_field="max_output_tokens")
        keep = None if fields.store is False else self._keep(tenant, bytes(raw(before + items, "input")))
        asked = _asked(fields, plan) | {"store": keep is not None}
        return plan, prompts, ResponseAnswer(plan, model, asked, names, keep)

    async def _before(self, tenant: str, response_id: str | None) -> Items:
        """The items of the responses before this one, and what they said."""
        if response_id is None:
            return []
        stored = await self._stored(tenant, response_id, "previous_response_id")
        try:
            return stored.read_all()
        except RecursionError:
            name = "previous_response_id"
            raise bad_request(f"{name}: its items are nested too deeply.", name) from None

    async def _with_referred(self, tenant: str, items: Items) -> Items:
        """The items with what they refer to in its place. Each is referred to once, as at OpenAI, and what is read for
        it is no larger than what may be kept of one response: a short request must not become a long one."""
        made: Items = []
        found: dict[str, dict[str, Any]] = {}
        """By their ids: items of the outputs that have been read, and not been referred to yet."""
        read: set[str] = set()
        num_bytes = 0
        for at, item in enumerate(items):
            if not refers(item):
                made.append(item)
                continue
            path = f"input[{at}].id"
            item_id = checked_text(item.get("id"), path)
            response_id = response_id_of(item_id)
            if response_id is not None and response_id not in read:
                read.add(response_id)
                if (stored := await self.store.find(tenant, response_id)) is not None:
                    num_bytes += len(stored.output)
                    if num_bytes > MAX_RESPONSE_BYTES:
                        raise bad_request(f"input refers to more than {MAX_RESPONSE_BYTES} bytes.", "input")
                    found |= stored.read_output()
            if item_id not in found:
                message = f"Item with id {item_id[:80]!r} not found: {_NOT_KEPT}, or the input has it twice."
                raise ApiError(404, message, param=path, code="item_not_found")
            made.append(found.pop(item_id))
        return made

    async def _stored(self, tenant: str, response_id: str, param: str | None = None) -> StoredResponse:
        stored = await self.store.find(tenant, response_id)
        if stored is None:
            message = f"Response with id {response_id[:80]!r} not found: {_NOT_KEPT}."
            code = "response_not_found" if param is None else "previous_response_not_found"
            raise ApiError(404, message, param=param, code=code)
        return stored

    def _keep(self, tenant: str, items: bytes) -> Keep | None:
        """None where there is too much to keep: then nothing of it is held while the answer is made."""
        if len(items) > MAX_RESPONSE_BYTES:
            return None

        def keep(response: dict[str, Any]) -> Callable[[], None] | None:
            kept = StoredResponse(encode(response), items, encode(response["output"]))
            if kept.num_bytes > MAX_RESPONSE_BYTES:
                return None
            return lambda: self.store.put(tenant, response["id"], kept)

        return keep

    def _tenant(self, request: Request) -> str:
        return self.state.keys.tenant(dict(request.scope["headers"]).get(b"authorization"))

    async def get(self, request: Request) -> Response:
        """A response that is kept."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise bad_request("stream: a finished response is told whole.", "stream", "unsupported_parameter")
        stored = await self._stored(self._tenant(request), request.path_params["response_id"])
        return Response(stored.document, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """A page of what went into a response, the newest first unless asked otherwise; all of it without a limit."""
        limit = limit_of(request, MAX_ITEMS, MAX_PAGE if "limit" in request.query_params else MAX_ITEMS)
        newest_first, after = is_newest_first(request), request.query_params.get("after")
        stored = await self._stored(self._tenant(request), request.path_params["response_id"])
        items = _named(stored.read_input())
        if newest_first:
            items.reverse()
        if after:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise ApiError(404, f"There is no item {after[:100]!r}.", param="after", code="not_found")
            items = items[ids.index(after) + 1 :]
        return _json(page_of(items, limit))

    async def delete(self, request: Request) -> Response:
        """Forget a response; those that went on from it stay."""
        response_id, tenant = request.path_params["response_id"], self._tenant(request)
        await self._stored(tenant, response_id)
        self.store.delete(tenant, response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Always refused: only responses in the background could be cancelled."""
        await self._stored(self._tenant(request), request.path_params["response_id"])
        raise refusal(RESPONSES, "background")

    def routes(self) -> list[Route]:
        """All of them, with their paths."""
        one = "/v1/responses/{response_id}"
        return [
            Route("/v1/responses", self, methods=["POST"]),
            Route(one, self.get, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/input_items", self.input_items, methods=["GET"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
        ]


def _json(document: dict[str, Any]) -> Response:
    return Response(encode(document), media_type="application/json")


def _named(items: Items) -> Items:
    """Items that went in, with values that are JSON, each with an id that no other has: a page begins behind an id, and
    a client may have sent any."""
    named: dict[str, dict[str, Any]] = {}
    for at, item in enumerate(items):
        item_id = msgspec.json.decode(item["id"]) if "id" in item else None
        if not isinstance(item_id, str):
            item_id = f"item_{at}"
        while item_id in named:
            item_id += f"_{at}"
        named[item_id] = {"type": "message"} | item | {"id": item_id}
    return list(named.values())


def _check_metadata(metadata: dict[str, Any] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise bad_request(f"metadata may have at most {MAX_METADATA} entries.", "metadata")
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise wrong_type(f"metadata.{name[:64]}", "a string")


def _asked(fields: ResponseFields, plan: GenerationPlan) -> dict[str, Any]:
    """What a response tells of its request."""
    reasoning, text = fields.reasoning, fields.text
    form = {"type": "text"} if text is None or text.format is None else text.format
    return {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": plan.service_tier or "default",
        "temperature": plan.params.temperature,
        "text": {"format": raw(form, "text.format")},
        "tool_choice": "auto" if fields.tool_choice is None else raw(fields.tool_choice, "tool_choice"),
        "tools": raw(fields.tools or [], "tools"),
        "top_logprobs": 0,
        "top_p": plan.params.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }
