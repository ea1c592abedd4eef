"""The small endpoints: the served model, the server's state, and the tokenizer over HTTP."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import jettison
from jettison.errors import OverCapacityError
from jettison.live.engine.api import WorkerSnapshot
from jettison.server.chat_options import chat_options
from jettison.server.endpoint import check_content_type
from jettison.server.errors import bad_request, retry_headers
from jettison.server.fields import DetokenizeFields, TokenizeFields, parse_fields, parse_json
from jettison.server.json_out import encode
from jettison.server.paths import same_name
from jettison.server.prompts import chat_prompt, off_loop
from jettison.server.state import ServerState, require
from jettison.server.tools import checked_tools
from jettison.types import WorkerId


def json_response(document: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(encode(document), status, media_type="application/json")


def _of_instances(workers: Sequence[WorkerSnapshot], waits: Mapping[WorkerId, str]) -> dict[str, Any]:
    """Which instances have a process, for ``/health``."""
    ids = {state: [w.worker_id for w in workers if w.sleep == state] for state in ("starting", "unprovisioned")}
    told: dict[str, Any] = {"provisioned": sum(w.is_provisioned for w in workers), **ids}
    if waits:
        told["waits"] = {str(worker_id): reason for worker_id, reason in sorted(waits.items())}
    return told


class InfoRoutes:
    """Handlers over one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._created_s = int(time.time())

    def routes(self) -> list[Route]:
        """All of them, with their paths."""
        routes = [
            Route("/health", self.health),
            Route("/ping", self.ping),
            Route("/version", self.version),
            Route("/load", self.load),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{model_id:path}", self.model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info),
        ]
        if self._state.settings.event_log is not None:
            routes.append(Route("/jettison/events", self.events))
        if self._state.settings.deployment is not None:
            routes.append(Route("/jettison/deployment", self.deployment))
        return routes

    async def health(self, request: Request) -> Response:
        """Readiness: 200 only while requests are accepted and some instance can serve them.

        ``recovering``: no group of workers can serve. Requests are still accepted, and wait for a group that is
        recovering. ``asleep``: instances that sleep; where all do, the first request wakes one. ``degraded``: some
        worker is missing, or cannot load its layers, or a front end takes no connections; ``reasons`` gives causes.
        ``instances``: where some have no process, which these are, and why one that is wanted waits; they are no part
        of ``workers``.
        """
        status: str = self._state.status
        document = {**self._state.settings.health_details, "status": status, "model": self._state.settings.model_name}
        snapshot = self._state.engine.snapshot()
        if (card_uses := self._state.settings.card_uses) is not None:
            document["cards"] = [asdict(use) for use in card_uses()]
        reasons = list(snapshot.troubles)
        if self._state.fronts is not None:
            document.update(self._state.fronts.health())
            reasons += self._state.fronts.troubles()
            document["degraded"] = bool(reasons)
        if snapshot.own_products:
            document["own_products"] = list(snapshot.own_products)
        if snapshot.products_of_some:
            document["own_products_of_some"] = list(snapshot.products_of_some)
        if snapshot.weights is not None:
            document["weights"] = snapshot.weights
        if workers := snapshot.workers:
            there = [worker for worker in workers if worker.is_provisioned]
            num_alive = sum(worker.alive for worker in there)
            document["workers"] = {"alive": num_alive, "total": len(there)}
            if len(there) < len(workers):
                document["instances"] = _of_instances(workers, snapshot.waits)
            asleep = [worker.worker_id for worker in workers if worker.is_asleep]
            if asleep:
                document["asleep"] = asleep
            document["degraded"] = num_alive < len(there) or bool(reasons)
            can_wake = any(worker.alive and worker.is_asleep for worker in workers)
            if status == "ready" and not can_wake and (num_alive == 0 or not snapshot.groups):
                status = document["status"] = "recovering"
        if reasons:
            document["reasons"] = reasons
        answer = json_response(document, 200 if status == "ready" else 503)
        if status == "loading":
            answer.headers.update(retry_headers(self._state.retry_after_ms()))
        return answer

    async def ping(self, request: Request) -> Response:
        """Liveness: 200 unless the engine has failed for good."""
        return json_response({}, 503 if self._state.status == "failed" else 200)

    async def version(self, request: Request) -> Response:
        """The version of the package."""
        return json_response({"version": jettison.__version__})

    async def load(self, request: Request) -> Response:
        """Number of requests in the server."""
        snapshot = self._state.engine.snapshot()
        return json_response(
            {
                "server_load": self._state.admission.num_active,
                "num_requests_running": sum(g.num_running + g.num_moving for g in snapshot.groups),
                "num_requests_waiting": snapshot.num_waiting,
            }
        )

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        if self._state.fronts is not None:
            await self._state.fronts.gather()
        return Response(self._state.all_metrics().exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def models(self, request: Request) -> Response:
        """All names of the one model."""
        data = [self._model_card(name) for name in self._state.settings.model_names]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """One name."""
        asked = request.path_params["model_id"]
        name = next((name for name in self._state.settings.model_names if same_name(asked, name)), asked)
        self._state.check_model(name)
        return json_response(self._model_card(name))

    def _model_card(self, name: str) -> dict[str, Any]:
        info = self._state.engine.info
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "jettison",
            "root": self._state.settings.model_name,
            "parent": None,
            "max_model_len": info.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of messages through the chat template."""
        return await self._side_job(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids, special tokens included."""
        return await self._side_job(request, self._detokenize)

    async def _side_job(self, request: Request, work: Callable[[dict[str, Any]], Awaitable[Response]]) -> Response:
        """Read a body and process it, under the limits of tokenizer requests."""
        check_content_type(request.scope)
        tenant = self._state.keys.tenant(request.headers.get("authorization", "").encode("latin-1"))
        try:
            async with self._state.admission.side.job(tenant) as job:
                body = await job.read_body(request.receive)
                async with job.turn:
                    return await work(parse_json(body))
        except OverCapacityError:
            self._state.metrics.count_shed("tokenizer_busy")
            raise

    async def _tokenize(self, document: dict[str, Any]) -> Response:
        state = self._state
        fields = parse_fields(document, TokenizeFields, state.warnings)
        state.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise bad_request("exactly one of prompt and messages is needed.", "prompt")
        thread_chars = state.settings.thread_tokenize_chars
        if fields.prompt is not None:
            text, special = fields.prompt, fields.add_special_tokens is not False
            ids = await off_loop(lambda: state.tokenizer.encode(text, special), len(text), thread_chars)
        else:
            tools = list(checked_tools(fields.tools or ()))
            options = chat_options(fields, tools, state.tokenizer.chat, state.warnings)
            prompt = await chat_prompt(
                fields.messages, state.tokenizer, options, thread_chars=thread_chars,
                add_special_tokens=bool(fields.add_special_tokens))
            ids = list(prompt.token_ids)
        max_len = state.engine.info.max_model_len

        def answer() -> Response:
            strings = state.tokenizer.token_strings(ids) if fields.return_token_strs else None
            return json_response({"count": len(ids), "max_model_len": max_len, "tokens": ids, "token_strs": strings})

        return await off_loop(answer, len(ids), thread_chars)

    async def _detokenize(self, document: dict[str, Any]) -> Response:
        state = self._state
        fields = parse_fields(document, DetokenizeFields, state.warnings)
        state.check_model(fields.model)
        require(fields.tokens, "tokens")
        ids = fields.tokens or []
        vocab_size = state.engine.info.vocab_size
        if any(not 0 <= token_id < vocab_size for token_id in ids):
            raise bad_request(f"tokens must lie in [0, {vocab_size}).", "tokens")
        decode = state.tokenizer.decode
        text = await off_loop(lambda: decode(ids, False), len(ids), state.settings.thread_tokenize_chars)
        return json_response({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """The data that remote clients need to build prompts themselves."""
        tokenizer = self._state.tokenizer
        return json_response(
            {
                "tokenizer_class": tokenizer.tokenizer_class,
                "bos_token": tokenizer.bos_token,
                "eos_token": tokenizer.eos_token,
                "pad_token": tokenizer.pad_token,
                "end_tokens": self._end_tokens(),
                "chat_template": tokenizer.chat_template,
                "vocab_size": tokenizer.vocab_size,
            }
        )

    def _end_tokens(self) -> list[dict[str, Any]]:
        """The tokens that end a text, and the files that name them."""
        ends = self._state.settings.end_tokens
        if ends is None:
            return [{"id": token_id} for token_id in self._state.engine.info.eos_token_ids]
        return [{"id": end.token_id, "token": end.text, "from": list(end.sources)} for end in ends.tokens]

    async def events(self, request: Request) -> Response:
        """The engine's log of moves, on the engine's clock."""
        event_log = self._state.settings.event_log
        return json_response({"now_s": 0.0, "events": []} if event_log is None else event_log())

    async def deployment(self, request: Request) -> Response:
        """The deployment document, for a simulation of this server."""
        describe = self._state.settings.deployment
        if describe is None:
            return json_response({}, 404)
        return json_response(describe())
