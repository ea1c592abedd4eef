"""What the HTTP front end is told. Every limit here is enforced before the work that it bounds."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jettison.device.model.end_tokens import EndTokens
from jettison.live.engine.api import SleepControl
from jettison.server.chat_renderer import TemplateSettings
from jettison.server.cors import CorsSettings
from jettison.server.sampling_defaults import NO_DEFAULTS, SamplingDefaults


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may ask for, and what it gets where it asks for nothing."""

    default_completion_max_tokens: int = 16
    default_chat_max_tokens: int | None = None
    """None: what is left of the context."""
    max_stops: int = 4
    max_logprobs: int | None = 20
    """Alternatives to a token; None: the whole vocabulary."""
    defaults: SamplingDefaults = NO_DEFAULTS
    """What the model's maker, or the operator, says of sampling."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Names, keys and limits of one HTTP front end."""

    model_names: tuple[str, ...]
    """Names under which clients may ask for the model; the first one is reported."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Empty: no key is asked for."""
    keys_may_change: bool = False
    """While the server runs: each key is a tenant then, also one that is alone."""
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    """What opens administration; empty: it is open where no key is asked for, else closed."""
    metrics_need_key: bool = False
    """Where keys are asked for: of ``/metrics`` too."""
    root_path: str = ""
    """Under which a proxy shows this server, as ``/api``; it may cut it off or not."""
    cors: CorsSettings = field(default_factory=CorsSettings)
    """Web pages of other origins."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    """None: plain HTTP."""
    default_completion_max_tokens: int = 16
    default_chat_max_tokens: int | None = None
    """None: what is left of the context."""
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    """What the model's maker says of sampling; a request's own fields beat it."""
    end_tokens: EndTokens | None = None
    """For ``/tokenizer_info``: what ends a text, and which file says so."""
    max_stops: int = 4
    """Stop strings of a request."""
    max_logprobs: int | None = 20
    """Alternatives to a token; None: the whole vocabulary."""
    default_seed: int | None = None
    """Seeds of requests that send none are drawn from this one; None draws them from the system."""
    max_active_reqs_per_key: int | None = None
    """Choices (prompts times ``n``) under way, of one tenant (``KeyRing.tenant``: below two keys all clients are one).
    A request has a place from its arrival on, one for each of its choices as soon as its body is read, and all of them
    until the last byte of its answer. None: no limit."""
    max_body_bytes: int = 4 << 20
    max_upload_bytes: int | None = None
    """Body of ``POST /v1/files``, which is written to disk as it comes. None: no exception for it."""
    max_header_bytes: int = 16 << 10
    max_buffered_bytes: int = 256 << 20
    """All request bodies that are being read or tokenized at one time, tokenizer requests included."""
    max_side_body_bytes: int = 1 << 20
    """Body of a tokenizer request (/tokenize, /detokenize)."""
    max_side_jobs: int = 64
    """Tokenizer requests in the house; they take no place in the engine's queue."""
    max_running_side_jobs: int = 2
    """Of these, how many work at one time; the others wait for their turn."""
    max_choices: int = 1024
    """Prompts times ``n`` of one HTTP request."""
    max_template_chars: int = 8 << 20
    """A rendered chat prompt."""
    templates: TemplateSettings = field(default_factory=TemplateSettings)
    """What the operator says of chat templates."""
    serves_offline: bool = True
    """False: offline requests and new batches are refused, and batches that are there stay as they are."""
    header_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 5.0
    """A kept connection without a request is closed after so long."""
    write_timeout_s: float = 60.0
    """A client that takes nothing of its answer for so long is dropped, and its request cancelled."""
    max_connections: int | None = None
    """Connections beyond which clients are told 503 and closed at once. None: no limit."""
    keep_alive_s: float = 15.0
    """Silence on a stream after which a comment is sent."""
    thread_tokenize_chars: int = 16 << 10
    """Requests whose prompts are longer in all are tokenized outside the event loop, so that streams do not stall."""
    health_details: Mapping[str, Any] = field(default_factory=dict)
    """Added to ``/health``: precision and kernels, and what they say of token identity."""
    record_request: Callable[[int, int, int, int, bool, str], None] | None = None
    """Told of every request that ends: arrival (monotonic ns), input, output and cached tokens, whether offline, and
    its tenant."""
    event_log: Callable[[], Mapping[str, Any]] | None = None
    """Answers ``GET /jettison/events`` with ``{"now_s": t, "events": [{"t": s, "kind": ...}, ...]}``; None: no such
    endpoint."""
    deployment: Callable[[], Mapping[str, Any]] | None = None
    """Answers ``GET /jettison/deployment`` (``cost.deployment``); None: no such endpoint."""

    sleep_control: SleepControl | None = None
    """Behind ``/sleep``, ``/wake_up`` and ``/is_sleeping``; None: no such endpoints."""

    @property
    def request_limits(self) -> RequestLimits:
        """Those that a request is planned by."""
        return RequestLimits(
            self.default_completion_max_tokens, self.default_chat_max_tokens, self.max_stops, self.max_logprobs,
            self.sampling_defaults)

    @property
    def model_name(self) -> str:
        """The name that answers and metrics carry."""
        return self.model_names[0]
