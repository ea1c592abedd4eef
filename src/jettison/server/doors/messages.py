"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jettison.errors import OverCapacityError
from jettison.server.chat import ChatEndpoint
from jettison.server.compiling import TENANT
from jettison.server.doors.message_answer import MessageAnswer
from jettison.server.doors.message_input import RENAMED, chat_of
from jettison.server.doors.message_tables import MessageFields
from jettison.server.doors.wire import renamed
from jettison.server.endpoint import WireAnswer, check_content_type
from jettison.server.errors import ApiError
from jettison.server.fields import parse_fields, parse_json
from jettison.server.json_out import encode
from jettison.server.prompts import Prompt
from jettison.server.sampling import GenerationPlan
from jettison.server.state import require


class MessagesEndpoint(ChatEndpoint):
    """Anthropic's messages in, a message out, by way of a chat."""

    async def prepare(self, document: dict[str, Any]) -> tuple[GenerationPlan, list[Prompt], WireAnswer]:
        """See ``GenerationEndpoint``."""
        fields = parse_fields(document, MessageFields, self.state.warnings)
        require(fields.max_tokens, "max_tokens")
        try:
            plan, prompts, _ = await super().prepare(self._chat(fields))
        except ApiError as error:
            raise _in_own_words(error) from error
        asked = plan.params.max_tokens  # as far as the operator lets it
        plan = self._cut_to_room(plan, prompts)
        return plan, prompts, MessageAnswer(plan, self.state.check_model(fields.model), asked)

    def _chat(self, fields: MessageFields) -> dict[str, Any]:
        return chat_of(fields, knows_thinking=self.state.tokenizer.chat.knows_variable("enable_thinking"))

    def _cut_to_room(self, plan: GenerationPlan, prompts: list[Prompt]) -> GenerationPlan:
        """The plan with no more tokens than the prompt leaves room for: agents ask for what the largest models can say,
        and Anthropic's own answers end where the context does."""
        room = self._most_tokens(plan) - len(prompts[0].token_ids)
        if plan.params.max_tokens <= room:
            return replace(plan, length_field="max_tokens")
        return replace(plan, wants_default_length=True, length_field=None)

    async def count_tokens(self, request: Request) -> Response:
        """The tokens of the prompt that a message's request would make."""
        check_content_type(request.scope)
        state = self.state
        tenant = state.keys.tenant(request.headers.get("authorization", "").encode("latin-1"))
        try:
            async with state.admission.side.job(tenant, reads_chats=True) as job:
                body = await job.read_body(request.receive)
                TENANT.set(tenant)
                async with job.turn:
                    fields = parse_fields(parse_json(body), MessageFields, state.warnings)
                    # Nothing is generated, so what an answer has to look like matters not.
                    chat = self._chat(fields) | {"max_tokens": 1, "stream": False, "response_format": None}
                    if chat.get("tool_choice") != "none":
                        chat["tool_choice"] = "auto"
                    try:
                        _, prompts, _ = await super().prepare(chat)
                    except ApiError as error:
                        raise _in_own_words(error) from error
        except OverCapacityError:
            state.metrics.count_shed("tokenizer_busy")
            raise
        return Response(encode({"input_tokens": len(prompts[0].token_ids)}), media_type="application/json")

    def routes(self) -> list[Route]:
        """Both, with their paths."""
        return [
            Route("/v1/messages", self, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]


def _in_own_words(error: ApiError) -> ApiError:
    told = renamed(error, RENAMED)
    if told.param == "stop" or (told.param or "").startswith("stop["):
        told.param = "stop_sequences"
        told.message = told.message.replace("stop", "stop_sequences", 1)
    return told
