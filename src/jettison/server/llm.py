"""``from jettison import LLM``: the engine for scripts and notebooks, without a server.

The engine runs on an event loop of its own thread, so a script needs no guard and a notebook's running loop is not in
the way; its workers are processes, as always. Requests take the same way as those of HTTP, from the check of a field
on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from starlette.types import Message

from jettison.config import KEYS, EngineConfig, TemplateConfig
from jettison.config.cards import visible_cards
from jettison.config.vllm.serving_rules import NO_LORA
from jettison.config.vllm.translate import note_of, translate_values
from jettison.errors import JettisonError, NotReadyError, OverCapacityError, RequestError
from jettison.live.engine.api import TokenEvent
from jettison.live.engine.engine import Engine
from jettison.live.machine.address_space import check_address_limit
from jettison.server.chat import ChatEndpoint
from jettison.server.chat_renderer import template_settings
from jettison.server.choice import Delta
from jettison.server.completions import CompletionEndpoint
from jettison.server.endpoint import GenerationEndpoint
from jettison.server.errors import ApiError
from jettison.server.generation import Generation, Job
from jettison.server.launch import sampling_defaults
from jettison.server.llm_outputs import Collector
from jettison.server.llm_tokenizer import ServedTokenizer
from jettison.server.llm_types import (
    Conversation,
    RequestOutput,
    SamplingParams,
    listed_conversations,
    listed_params,
    listed_prompts,
)
from jettison.server.prompts import Prompt
from jettison.server.sampling import GenerationPlan
from jettison.server.settings import ServerSettings
from jettison.server.state import ServerState
from jettison.server.structured import JsonDefaults
from jettison.server.tokenizer import Tokenizer

T = TypeVar("T")
logger = logging.getLogger(__name__)

Progress = bool | Callable[..., Any]
"""Whether there is a bar, or what makes one, with tqdm's arguments."""

CHAT_OPTIONS = frozenset({
    "chat_template_content_format", "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs",
    "documents", "reasoning_effort",
})  # fmt: skip
"""What ``LLM.chat`` takes for the template beside ``chat_template``."""

CLOSE_WITHIN_S = 30.0
"""Patience with the engine's end; its workers end with this process anyway."""


class LLM:
    """A model, loaded and ready: ``LLM("models/tiny", instances=2, memory="1GiB").generate(["Hello"])``.

    Keywords are the flags of ``jettison serve`` with underscores, and vLLM's (docs/from-vllm.md). Raises UserError, in
    one line, for what the caller can mend. ``shutdown`` or the end of a ``with`` gives the memory back.
    """

    def __init__(self, model: str | Path, **flags: Any) -> None:
        config = _config(str(model), flags)
        check_address_limit()
        for note in config.notes:
            logger.info("%s", note)
        self._loop = _Loop()
        self._closer = weakref.finalize(self, self._loop.close)
        try:
            with config.placed():
                self._served = self._loop.run(_Served.start(config))
        except BaseException:
            self.shutdown()
            raise
        self._loop.at_end = self._served.close

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        use_tqdm: Progress = True, lora_request: object = None,
    ) -> list[RequestOutput]:
        """Continue prompts: a text, token ids, ``{"prompt": ...}``, ``{"prompt_token_ids": ...}``, or a list of such.

        Answers come in the order of the prompts. Without parameters the maker's sampling holds, and 16 tokens. Raises
        RequestError for a prompt or a parameter, before anything is computed; JettisonError where the engine fails.
        """
        _refuse_adapters(lora_request)
        listed = listed_prompts(prompts)
        params = listed_params(sampling_params, len(listed))
        bodies = [{"prompt": prompt, **_fields(each, is_chat=False)} for prompt, each in zip(listed, params)]
        return self._answers(self._served.completions, bodies, params, use_tqdm)

    def chat(
        self, messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: Progress = True,
        lora_request: object = None, chat_template: str | None = None, **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, by the model's chat template.

        ``options`` are for the template, as in a chat request (``CHAT_OPTIONS``); ``tools`` are written into the
        prompt, and calls of them are text. Raises as ``generate`` does; TypeError for any other name.
        """
        _refuse_adapters(lora_request)
        if unknown := [name for name in options if name not in CHAT_OPTIONS]:
            raise TypeError(f"LLM.chat() got an unexpected keyword argument {unknown[0]!r}")
        written = options.pop("chat_template_content_format", None)
        if written not in ("auto", None, self._served.state.settings.templates.content_format):
            raise RequestError("chat_template_content_format: say it to LLM", "chat_template_content_format")
        listed = listed_conversations(messages)
        params = listed_params(sampling_params, len(listed))
        told = {"chat_template": chat_template, **options}
        told = {name: value for name, value in told.items() if value is not None}
        if "tools" in told:
            told["tool_choice"] = "none"
        bodies = [{"messages": each, **told, **_fields(p, is_chat=True)} for each, p in zip(listed, params)]
        return self._answers(self._served.chats, bodies, params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """The maker's sampling, over the neutral one."""
        defaults = self._served.state.settings.sampling_defaults
        told = {name: getattr(defaults, name, None) for name in SamplingParams.__slots__}
        return SamplingParams(**{name: value for name, value in told.items() if value is not None})

    def get_tokenizer(self) -> ServedTokenizer:
        """The model's tokenizer, and its chat template."""
        return ServedTokenizer(self._served.state.tokenizer)

    def shutdown(self) -> None:
        """End the engine and its workers. Idempotent."""
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _answers(
        self, endpoint: GenerationEndpoint, bodies: list[dict[str, Any]], params: Sequence[SamplingParams | None],
        use_tqdm: Progress,
    ) -> list[RequestOutput]:
        if not self._closer.alive:
            raise NotReadyError("this LLM was shut down")
        bar = _bar(use_tqdm, len(bodies))
        with contextlib.closing(bar) if bar is not None else contextlib.nullcontext():
            return self._loop.run(self._served.answer(endpoint, bodies, params, bar))


def _config(model: str, flags: Mapping[str, Any]) -> EngineConfig:
    """Raises ConfigError with all flags that do not fit."""
    found = translate_values({"model": model, **flags}, KEYS)
    found.check()
    config = EngineConfig.resolve(look_for_cards=visible_cards, **found.values)
    return replace(config, notes=(*note_of(found.notes), *config.notes))


def _templates(told: TemplateConfig) -> TemplateConfig:
    """The templates are the caller's own. A parser of thoughts that was named says where a grammar begins: behind them.
    One that the template shows does not, as in vLLM: the answer is the text that the grammar binds, and no other. Calls
    are text."""
    parser = "none" if told.reasoning_parser == "auto" else told.reasoning_parser
    return replace(told, trust_requests=True, reasoning_parser=parser, tool_call_parser="none")


def _fields(params: SamplingParams | None, *, is_chat: bool) -> dict[str, Any]:
    if params is None:
        return {"max_tokens": 16}
    fields = params.fields(is_chat=is_chat)
    if params.max_tokens is None:
        least = params.min_tokens  # not checked yet
        fields["max_tokens"] = least if isinstance(least, int) and least > 1 else 1  # ``_Served._prepare`` lifts it
    return fields


def _refuse_adapters(wanted: object) -> None:
    if wanted is not None:
        raise RequestError(f"lora_request: {NO_LORA}", "lora_request")


def _bar(use_tqdm: Progress, num_prompts: int) -> Any:
    if use_tqdm is False:
        return None
    if use_tqdm is True:
        from tqdm.auto import tqdm

        return tqdm(total=num_prompts, desc="Answered prompts", dynamic_ncols=True)
    return use_tqdm(total=num_prompts, desc="Answered prompts")


class _Loop:
    """An event loop on a thread of its own. It knows nothing of the LLM, which may be collected while it runs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jettison-llm", daemon=True)
        self._thread.start()
        self.at_end: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Run on the loop before it ends."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work on the loop. An interrupt of the waiting thread cancels it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise JettisonError("an LLM cannot be used from inside its own event loop")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise JettisonError("this LLM was shut down") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End what runs on the loop, then the loop."""
        if threading.current_thread() is self._thread:  # the collector ran here, and the loop cannot wait for itself
            threading.Thread(target=self.close, name="jettison-llm-end").start()
            return
        with contextlib.suppress(Exception):  # at the interpreter's end much is gone already; workers end by themselves
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_WITHIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_WITHIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        if self.at_end is not None:
            await self.at_end()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class _Chats(ChatEndpoint):
    tells_parts_apart = False


class _Served:
    """A started engine and what turns requests into its own. Lives on the loop."""

    def __init__(self, engine: Engine, state: ServerState, window: int) -> None:
        self.engine, self.state = engine, state
        self.completions = CompletionEndpoint(state)
        self.chats = _Chats(state)
        self._places = asyncio.Semaphore(window)

    @classmethod
    async def start(cls, config: EngineConfig) -> _Served:
        """Load the model. Raises UserError, JettisonError."""
        engine = Engine(config)
        assembly = engine.prepare()
        settings = ServerSettings(
            model_names=config.model.served_model_names, default_seed=config.model.seed,
            max_stops=config.server.max_stop_strings, max_logprobs=config.server.max_logprobs,
            sampling_defaults=sampling_defaults(config), end_tokens=assembly.end_tokens,
            json_defaults=JsonDefaults.of(config.server.structured_outputs_config),
            templates=template_settings(_templates(config.templates)))
        tokenizer = Tokenizer.from_dir(
            config.model.tokenizer_dir, max_template_chars=settings.max_template_chars, templates=settings.templates,
            byte_tokens=assembly.byte_tokens)
        state = ServerState(engine, tokenizer, settings)  # before there is a worker: a parser may be unknown
        try:
            await engine.start()
        except BaseException:
            await engine.close()
            raise
        return cls(engine, state, _window(config))

    async def close(self) -> None:
        """Give everything back. No thread is asked for: at the interpreter's end there is none to be had."""
        try:
            await self.engine.close()
        finally:
            self.state.grammars.close()

    async def answer(
        self, endpoint: GenerationEndpoint, bodies: Sequence[dict[str, Any]], params: Sequence[SamplingParams | None],
        bar: Any,
    ) -> list[RequestOutput]:
        """All answers, in order. The first failure ends all others."""
        each = enumerate(zip(bodies, params))
        prepared = [await self._prepare(endpoint, body, told, at) for at, (body, told) in each]
        tasks = [asyncio.create_task(self._one(endpoint, *ready, bar)) for ready in prepared]
        try:
            return list(await asyncio.gather(*tasks))
        except ApiError as error:
            raise self._failure(error) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _failure(self, error: ApiError) -> JettisonError:
        if error.status < 500:
            return RequestError(error.message, error.param, error.code)
        return JettisonError(f"the engine failed: {self.engine.failure or error.message}")

    async def _prepare(
        self, endpoint: GenerationEndpoint, body: dict[str, Any], params: SamplingParams | None, at: int
    ) -> tuple[GenerationPlan, list[Prompt]]:
        try:
            plan, prompts, _ = await endpoint.prepare(body)
            if params is not None and params.max_tokens is None:
                longest = self.state.settings.sampling_defaults.bounded(self.engine.info.max_model_len)
                plan = replace(
                    plan, wants_default_length=True, length_field="min_tokens",
                    params=replace(plan.params, max_tokens=longest))
            endpoint.generation(plan, prompts, time.monotonic_ns(), "")  # whether it fits
        except ApiError as error:
            raise RequestError(f"prompt {at}: {error.message}", error.param, error.code) from None
        return plan, prompts

    async def _one(
        self, endpoint: GenerationEndpoint, plan: GenerationPlan, prompts: Sequence[Prompt], bar: Any
    ) -> RequestOutput:
        async with self._places:
            while True:
                generation = endpoint.generation(plan, prompts, time.monotonic_ns(), "")
                try:
                    generation.submit()
                    break
                except OverCapacityError as error:
                    await asyncio.sleep(error.retry_after_ms / 1e3)
            output = await self._run(generation, plan)
        if bar is not None:
            bar.update(1)
        return output

    async def _run(self, generation: Generation, plan: GenerationPlan) -> RequestOutput:
        collector = Collector(self.state.tokenizer, plan)

        async def keep(job: Job, event: TokenEvent, delta: Delta) -> None:
            collector.keep(job, event, delta)

        await generation.run(_silence, keep)
        return collector.output(generation)


def _window(config: EngineConfig) -> int:
    """Prompts in the engine at one time: all that run, and as many that wait, as far as its queue takes them."""
    running = config.scheduler.max_num_seqs * config.instances
    queued = config.scheduler.max_num_queued_reqs
    return running + (running if queued is None else min(running, queued))


async def _silence() -> Message:
    """ASGI's ``receive`` of a client that never leaves."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


__all__ = ["LLM", "RequestOutput", "SamplingParams"]
