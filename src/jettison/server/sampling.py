"""From checked field types to ``SamplingParams``: ranges, defaults, and which field is to blame.

Pure: no I/O, no engine. What is refused here would otherwise reach a scheduler that serves everyone.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from jettison.live.engine.api import EngineInfo
from jettison.policy.refusal import shown, why_too_long
from jettison.server.errors import ApiError, bad_request
from jettison.server.fields import ChatFields, CompletionFields, GenerationFields
from jettison.server.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from jettison.types import SamplingParams

MAX_N = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 512
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_METADATA = 16
MAX_PRIORITY = 1 << 31
MAX_CACHE_SALT_CHARS = 512
SEED_MODULUS = 1 << 63
OFFLINE_TIER = "flex"
SERVICE_TIERS = ("auto", "default", "priority", OFFLINE_TIER)
SERVED_TIER = "default"
"""Of every other one."""

SeedSource = Callable[[], int]


def seed_source(default_seed: int | None) -> SeedSource:
    """Seeds for requests that send none: a series fixed by ``default_seed``, or the system's randomness."""
    if default_seed is None:
        return lambda: secrets.randbits(63)
    series = random.Random(default_seed)
    return lambda: series.getrandbits(63)


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What one HTTP request asks for, apart from its prompts."""

    params: SamplingParams
    """``max_tokens`` is still to be bounded by what each prompt leaves of the context when ``wants_default_length``."""
    wants_default_length: bool
    num_samples: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    skip_special_tokens: bool
    return_token_ids: bool
    priority: int
    cache_salt: str
    """The client's own; empty for none."""
    service_tier: str | None
    """As served; None when none was asked for."""
    wants_offline: bool
    """The client asked for the tier ``flex``."""
    length_field: str | None
    """What the client may lower where its prompt would fit with fewer tokens behind it; None: it named no length."""

    def params_for(self, sample: int, max_tokens: int) -> SamplingParams:
        """Sample ``sample`` of a prompt. A prompt gives the same samples alone and in a batch."""
        return replace(self.params, seed=(self.params.seed + sample) % SEED_MODULUS, max_tokens=max_tokens)


def plan_completion(
    fields: CompletionFields, info: EngineInfo, default_max_tokens: int, draw: SeedSource,
    defaults: SamplingDefaults = NO_DEFAULTS,
) -> GenerationPlan:
    """Raises ApiError 400 naming the field."""
    fields = defaults.under(fields)
    echo = bool(fields.echo)
    wanted = default_max_tokens if fields.max_tokens is None else fields.max_tokens
    _check("max_tokens", wanted, 0)
    _check("logprobs", fields.logprobs, 0, MAX_LOGPROBS)
    params = _params(fields, info, defaults.bounded(wanted), draw, fields.logprobs, fields.logprobs if echo else None)
    length_field = None if fields.max_tokens is None else "max_tokens"
    return _plan(fields, params, length_field, echo=echo, wants_default_length=False)


def plan_chat(
    fields: ChatFields, info: EngineInfo, default_max_tokens: int | None, draw: SeedSource,
    defaults: SamplingDefaults = NO_DEFAULTS,
) -> GenerationPlan:
    """Raises ApiError 400 naming the field."""
    fields = defaults.under(fields)
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    sent: int | None = getattr(fields, name)
    _check(name, sent, 1)
    wanted = default_max_tokens if sent is None else sent
    _check("top_logprobs", fields.top_logprobs, 0, MAX_LOGPROBS)
    if fields.top_logprobs and not fields.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    num_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    longest = (defaults.max_tokens or info.max_model_len) if wanted is None else wanted
    params = _params(fields, info, defaults.bounded(longest), draw, num_logprobs, None)
    length_field = name if sent is not None else "min_tokens" if wanted is None else None
    return _plan(fields, params, length_field, echo=False, wants_default_length=wanted is None)


def _plan(
    fields: GenerationFields, params: SamplingParams, length_field: str | None, *, echo: bool,
    wants_default_length: bool,
) -> GenerationPlan:
    _check("n", fields.n, 1, MAX_N)
    _check("priority", fields.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if fields.metadata is not None and len(fields.metadata) > MAX_METADATA:
        raise bad_request(f"metadata may have at most {MAX_METADATA} entries.", "metadata")
    if fields.service_tier is not None and fields.service_tier not in SERVICE_TIERS:
        raise bad_request(f"service_tier must be one of {', '.join(SERVICE_TIERS)}.", "service_tier")
    if fields.cache_salt is not None and not 0 < len(fields.cache_salt) <= MAX_CACHE_SALT_CHARS:
        raise bad_request(f"cache_salt must have from 1 to {MAX_CACHE_SALT_CHARS} characters.", "cache_salt")
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise bad_request("stream_options is only allowed when stream is true.", "stream_options")
    continuous = bool(options and options.continuous_usage_stats)
    wants_offline = fields.service_tier == OFFLINE_TIER
    return GenerationPlan(
        params=params,
        wants_default_length=wants_default_length,
        num_samples=fields.n or 1,
        stops=_stops(fields.stop),
        stream=bool(fields.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=continuous,
        echo=echo,
        skip_special_tokens=fields.skip_special_tokens is not False,
        return_token_ids=bool(fields.return_token_ids),
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        service_tier=None if fields.service_tier is None else OFFLINE_TIER if wants_offline else SERVED_TIER,
        wants_offline=wants_offline,
        length_field=length_field,
    )


def _params(
    fields: GenerationFields,
    info: EngineInfo,
    max_tokens: int,
    draw: SeedSource,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
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
        temperature=_or(fields.temperature, 1.0),
        top_p=_or(fields.top_p, 1.0),
        top_k=None if top_k is None else min(top_k, info.vocab_size),
        min_p=_or(fields.min_p, 0.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        seed=draw() if fields.seed is None else fields.seed % SEED_MODULUS,
        min_tokens=min_tokens,
        stop_token_ids=_stop_token_ids(fields.stop_token_ids, info.vocab_size),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=None if logprobs is None else min(logprobs, info.vocab_size),
        prompt_logprobs=None if prompt_logprobs is None else min(prompt_logprobs, info.vocab_size),
        logit_bias=_logit_bias(fields.logit_bias, info.vocab_size),
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


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop may have at most {MAX_STOPS} strings, got {len(stops)}.", "stop")
    if any(not text for text in stops):
        raise bad_request("stop strings must not be empty.", "stop")
    if any(len(text) > MAX_STOP_CHARS for text in stops):
        raise bad_request(f"a stop string may have at most {MAX_STOP_CHARS} characters.", "stop")
    return tuple(stops)


def _stop_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    ids = ids or []
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise bad_request(f"stop_token_ids may have at most {MAX_STOP_TOKEN_IDS} entries.", "stop_token_ids")
    if any(not 0 <= token_id < vocab_size for token_id in ids):
        raise bad_request(f"stop_token_ids must lie in [0, {vocab_size}).", "stop_token_ids")
    return tuple(ids)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > MAX_LOGIT_BIAS:
        raise bad_request(f"logit_bias may have at most {MAX_LOGIT_BIAS} entries.", "logit_bias")
    pairs = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise bad_request(f"logit_bias: {key[:40]!r} is no token id below {vocab_size}.", "logit_bias")
        if not -100.0 <= value <= 100.0:
            raise bad_request("logit_bias values must be from -100 to 100.", "logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)


def too_long(
    num_prompt_tokens: int, max_tokens: int, info: EngineInfo, prompt_field: str, length_field: str | None
) -> ApiError | None:
    """The error for a request that can never fit, with both numbers; None for one that can.

    It names what has to change: the prompt where not even one token fits behind it, else the length asked for.
    """
    message = why_too_long(num_prompt_tokens, max_tokens, info.max_model_len, info.max_request_tokens, prompt_field)
    if message is None:
        return None
    fits_alone = num_prompt_tokens < min(info.max_model_len, info.max_request_tokens)
    param = length_field if length_field is not None and fits_alone else prompt_field
    return bad_request(message, param, "context_length_exceeded")
