"""From type-checked fields to ``SamplingParams``: ranges, defaults, and errors that name the field.

Pure: no I/O, no engine. A bad value that passed here would reach a scheduler that serves all clients.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from jettison.live.engine.api import EngineInfo
from jettison.policy.refusal import shown, why_too_long
from jettison.server.answer_form import Form
from jettison.server.bad_words import checked_words
from jettison.server.errors import ApiError, bad_request
from jettison.server.fields import ChatFields, CompletionFields, GenerationFields
from jettison.server.repetition import Repetition, plan_repetition
from jettison.server.settings import RequestLimits
from jettison.server.structured import Constraint, constraint_of
from jettison.server.token_lists import (
    allowed_token_ids,
    check_some_token_is_left,
    logit_bias,
    logprob_token_ids,
    stop_token_ids,
)
from jettison.server.truncation import Truncation, plan_truncation
from jettison.types import Grammar, SamplingParams

MAX_N = 128
MAX_STOP_CHARS = 512
MAX_METADATA = 16
MAX_PRIORITY = 1 << 31
MAX_CACHE_SALT_CHARS = 512
MAX_REQUEST_ID_CHARS = 512
SEED_MODULUS = 1 << 63
NO_SEED = -1
"""The value of ``seed`` that means none, as in vLLM and llama.cpp."""
OFFLINE_TIER = "flex"
SERVICE_TIERS = ("auto", "default", "priority", OFFLINE_TIER, "scale", "fast")
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict")
SERVED_TIER = "default"
"""The tier shown for every request that is not offline."""

SeedSource = Callable[[], int]


def seed_source(default_seed: int | None, series: str = "") -> SeedSource:
    """Seeds for requests that send none: a series fixed by ``default_seed``, or the system's randomness. ``series``: a
    name for another series of the same seed."""
    if default_seed is None:
        return lambda: secrets.randbits(63)
    draws = random.Random(f"{default_seed} {series}" if series else default_seed)
    return lambda: draws.getrandbits(63)


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules for the text of an answer: the tokens that become text, and the texts that end it."""

    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    """Whether a stop string, or the text of a stop token, is part of the answer that it stops."""
    skip_special_tokens: bool = True
    joins_special_tokens: bool = False
    form: Form | None = None
    """How the text is read for calls and thoughts; None: it is content."""
    repetition: Repetition | None = None


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The demands of one HTTP request, apart from its prompts."""

    params: SamplingParams
    """If ``wants_default_length``, ``max_tokens`` is still to be cut to the room that each prompt leaves in the
    context."""
    wants_default_length: bool
    num_samples: int
    text: TextRules
    bad_words: tuple[str, ...]
    """Words to be added to ``params`` as tokens (``with_bad_words``)."""
    truncation: Truncation | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    prompt_logprobs: int | None
    """Prompt logprobs to be shown on their own; an echo may need more of them."""
    return_token_ids: bool
    tokens_as_ids: bool
    priority: int
    request_id: str | None
    """The client's own id, a label; None: none."""
    cache_salt: str
    """The client's own salt; empty for none."""
    service_tier: str | None
    """The tier as served; None where the request names none."""
    wants_offline: bool
    """Whether the client asked for the tier ``flex``."""
    constraint: Constraint | None
    """What the answer has to look like, to be added to ``params`` as a grammar (``with_grammar``)."""
    length_field: str | None
    """The field that the client may lower where its prompt would fit with a shorter answer; None: it named no
    length."""

    def params_for(self, sample: int, max_tokens: int) -> SamplingParams:
        """Parameters of sample ``sample``. With a seed, a prompt gives the same samples alone and in a batch."""
        return replace(self.params, seed=(self.params.seed + sample) % SEED_MODULUS, max_tokens=max_tokens)


def with_bad_words(
    plan: GenerationPlan, sequences: tuple[tuple[int, ...], ...], eos_token_ids: tuple[int, ...]
) -> GenerationPlan:
    """The plan with the tokens of its bad words. Raises ApiError 400 where no token would be left."""
    params = replace(plan.params, bad_words=sequences) if sequences else plan.params
    check_some_token_is_left(params, eos_token_ids)
    return replace(plan, params=params)


def with_grammar(plan: GenerationPlan, text: str) -> GenerationPlan:
    """The plan with the grammar of its constraint."""
    begins_after = "" if plan.constraint is None else plan.constraint.begins_after
    return replace(plan, params=replace(plan.params, grammar=Grammar(text, begins_after)))


def plan_completion(
    fields: CompletionFields, info: EngineInfo, limits: RequestLimits, draw: SeedSource
) -> GenerationPlan:
    """Raises ApiError 400 naming the field."""
    fields = limits.defaults.under(fields)
    length_field, asked = _asked_length(fields, ("max_tokens",))
    wanted = limits.default_completion_max_tokens if asked is None else asked
    _check(length_field or "max_tokens", wanted, 0)
    num_logprobs = _num_logprobs("logprobs", fields.logprobs, limits, info)
    echoed = num_logprobs if fields.echo else None
    most_logprobs = num_logprobs, _most(_prompt_logprobs(fields, limits, info), echoed)
    params = _params(fields, info, limits.defaults.bounded(wanted), draw, most_logprobs)
    if fields.echo and wanted == 0 and params.logprob_token_ids:
        raise bad_request("logprob_token_ids are of the answer's tokens, and none are asked for.", "logprob_token_ids")
    return _plan(fields, info, params, limits, length_field=length_field, echo=bool(fields.echo))


def plan_chat(fields: ChatFields, info: EngineInfo, limits: RequestLimits, draw: SeedSource) -> GenerationPlan:
    """Raises ApiError 400 naming the field."""
    fields = limits.defaults.under(fields)
    name, asked = _asked_length(fields, ("max_completion_tokens", "max_tokens"))
    _check(name or "max_tokens", asked, 1)
    wanted = limits.default_chat_max_tokens if asked is None else asked
    num_top = _num_logprobs("top_logprobs", fields.top_logprobs, limits, info)
    if num_top and not fields.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    num_logprobs = (num_top or 0) if fields.logprobs else None
    longest = limits.defaults.bounded((limits.defaults.max_tokens or info.max_model_len) if wanted is None else wanted)
    params = _params(fields, info, longest, draw, (num_logprobs, _prompt_logprobs(fields, limits, info)))
    length_field = name if asked is not None else "min_tokens" if wanted is None else None
    # An echo shows the last message as the client's text, not the rendered prompt.
    return _plan(
        fields, info, params, limits, length_field=length_field, echo=False, wants_default_length=wanted is None)


def _asked_length(fields: GenerationFields, names: tuple[str, ...]) -> tuple[str | None, int | None]:
    """The field that sets the length of an answer, and its value; earlier names are preferred.

    Raises ApiError 400 where an alias from another server has a different value.
    """
    sent = {name: getattr(fields, name) for name in (*names, *_LENGTHS)}
    if sent["n_predict"] == -1:
        sent["n_predict"] = None
    chosen = next((name for name, value in sent.items() if value is not None), None)
    if chosen is None:
        return None, None
    for name, value in sent.items():
        if value not in (None, sent[chosen]) and name not in names:
            raise bad_request(f"{name} ({shown(value)}) says something else than {chosen}.", name)
    return chosen, sent[chosen]


def _num_logprobs(name: str, asked: int | None, limits: RequestLimits, info: EngineInfo) -> int | None:
    """Number of alternatives; -1 asks for the whole vocabulary."""
    if asked is None:
        return None
    wanted = info.vocab_size if asked == -1 else asked
    most = limits.max_logprobs
    if wanted < 0 or (most is not None and wanted > most):
        bound = "at least 0" if most is None else f"from 0 to {most} (--max-logprobs)"
        raise bad_request(f"{name} must be {bound}, got {shown(asked)}.", name)
    return min(wanted, info.vocab_size)


def _prompt_logprobs(fields: GenerationFields, limits: RequestLimits, info: EngineInfo) -> int | None:
    """Number of prompt logprobs to show on their own. A stream has no place for them; 0 is accepted there, as in
    vLLM."""
    wanted = _num_logprobs("prompt_logprobs", fields.prompt_logprobs, limits, info)
    if fields.stream and wanted is not None:
        if wanted > 0:
            raise bad_request("prompt_logprobs are not sent in a stream.", "prompt_logprobs")
        return None
    return wanted


def _most(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _plan(
    fields: GenerationFields, info: EngineInfo, params: SamplingParams, limits: RequestLimits, *,
    length_field: str | None, echo: bool, wants_default_length: bool = False,
) -> GenerationPlan:
    _check("n", fields.n, 1, MAX_N)
    _check("priority", fields.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_labels(fields)
    options = fields.stream_options
    if options is not None and (options.include_usage or options.continuous_usage_stats) and not fields.stream:
        raise bad_request("stream_options is only allowed when stream is true.", "stream_options")
    wants_offline = fields.service_tier == OFFLINE_TIER
    return GenerationPlan(
        params=params,
        wants_default_length=wants_default_length,
        num_samples=fields.n or 1,
        text=TextRules(
            stops=_stops(fields.stop, limits.max_stops),
            keeps_stop=bool(fields.include_stop_str_in_output),
            skip_special_tokens=fields.skip_special_tokens is not False,
            joins_special_tokens=fields.spaces_between_special_tokens is False,
            repetition=plan_repetition(fields.repetition_detection),
        ),
        bad_words=checked_words(fields.bad_words),
        truncation=plan_truncation(fields, info.max_model_len),
        stream=bool(fields.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        echo=echo,
        prompt_logprobs=_prompt_logprobs(fields, limits, info),
        return_token_ids=bool(fields.return_token_ids),
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        priority=fields.priority or 0,
        request_id=fields.request_id,
        cache_salt=fields.cache_salt or "",
        service_tier=None if fields.service_tier is None else OFFLINE_TIER if wants_offline else SERVED_TIER,
        wants_offline=wants_offline,
        constraint=constraint_of(fields, limits.json_defaults),
        length_field=length_field,
    )


def _check_labels(fields: GenerationFields) -> None:
    if fields.metadata is not None and len(fields.metadata) > MAX_METADATA:
        raise bad_request(f"metadata may have at most {MAX_METADATA} entries.", "metadata")
    if fields.service_tier is not None and fields.service_tier not in SERVICE_TIERS:
        raise bad_request(f"service_tier must be one of {', '.join(SERVICE_TIERS)}.", "service_tier")
    if fields.cache_salt is not None and not 0 < len(fields.cache_salt) <= MAX_CACHE_SALT_CHARS:
        raise bad_request(f"cache_salt must have from 1 to {MAX_CACHE_SALT_CHARS} characters.", "cache_salt")
    if fields.request_id is not None and not 0 < len(fields.request_id) <= MAX_REQUEST_ID_CHARS:
        raise bad_request(f"request_id must have from 1 to {MAX_REQUEST_ID_CHARS} characters.", "request_id")


def _params(
    fields: GenerationFields,
    info: EngineInfo,
    max_tokens: int,
    draw: SeedSource,
    logprobs: tuple[int | None, int | None],
) -> SamplingParams:
    """``logprobs``: alternatives to each token of the answer, and of the prompt."""
    _check("temperature", fields.temperature, 0.0, 2.0)
    _check("top_p", fields.top_p, 0.0, 1.0)
    if fields.top_p == 0.0:
        raise bad_request("top_p must be above 0.", "top_p")
    _check("top_k", fields.top_k, -1)
    _check("min_p", fields.min_p, 0.0, 1.0)
    _check("presence_penalty", fields.presence_penalty, -2.0, 2.0)
    _check("frequency_penalty", fields.frequency_penalty, -2.0, 2.0)
    _check("repetition_penalty", fields.repetition_penalty, 0.01, 100.0)
    _check("seed", fields.seed, -SEED_MODULUS, SEED_MODULUS - 1)
    _check("min_tokens", fields.min_tokens, 0)
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        asked = f"min_tokens ({shown(min_tokens)}) is above max_tokens ({shown(max_tokens)})."
        raise bad_request(asked, "min_tokens")
    top_k = fields.top_k if fields.top_k and fields.top_k > 0 else None  # 0 and -1 both mean all tokens
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if fields.do_sample is False else _or(fields.temperature, 1.0),
        top_p=_or(fields.top_p, 1.0),
        top_k=None if top_k is None else min(top_k, info.vocab_size),
        min_p=_or(fields.min_p, 0.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        seed=draw() if fields.seed is None or fields.seed == NO_SEED else fields.seed % SEED_MODULUS,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids(fields.stop_token_ids, info.vocab_size),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs[0],
        prompt_logprobs=logprobs[1],
        logit_bias=logit_bias(fields.logit_bias, info.vocab_size),
        logprob_token_ids=logprob_token_ids(
            fields.logprob_token_ids, info.vocab_size, has_logprobs=logprobs[0] is not None),
        allowed_token_ids=allowed_token_ids(fields.allowed_token_ids, info.vocab_size),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _check(name: str, value: float | None, low: float, high: float | None = None) -> None:
    if value is None:
        return
    is_number = isinstance(value, int) or math.isfinite(value)  # an integer may be too large for a float
    if not is_number or value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise bad_request(f"{name} must be {wanted}, got {shown(value)}.", name)


def _stops(stop: str | list[str] | None, most: int) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > most:
        raise bad_request(f"stop may have at most {most} strings (--max-stop-strings), got {len(stops)}.", "stop")
    if any(not text for text in stops):
        raise bad_request("stop strings must not be empty.", "stop")
    if any(len(text) > MAX_STOP_CHARS for text in stops):
        raise bad_request(f"a stop string may have at most {MAX_STOP_CHARS} characters.", "stop")
    return tuple(stops)


def too_long(
    num_prompt_tokens: int, max_tokens: int, info: EngineInfo, prompt_field: str, length_field: str | None
) -> ApiError | None:
    """The error for a request that can never fit, with both numbers; None for one that can.

    It names the field to change: the prompt where not even one token fits after it, else the requested length.
    """
    message = why_too_long(num_prompt_tokens, max_tokens, info.max_model_len, info.max_request_tokens, prompt_field)
    if message is None:
        return None
    fits_alone = num_prompt_tokens < min(info.max_model_len, info.max_request_tokens)
    param = length_field if length_field is not None and fits_alone else prompt_field
    return bad_request(message, param, "context_length_exceeded")
