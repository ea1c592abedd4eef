"""The settings of the HTTP front end. Every limit here is enforced before the work that it bounds."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jettison.device.model.end_tokens import EndTokens
from jettison.live.engine.api import SleepControl
from jettison.live.engine.cards import CardUse
from jettison.server.chat_renderer import TemplateSettings
from jettison.server.console.journal import Rows
from jettison.server.console.settings import ConsoleSettings
from jettison.server.cors import CorsSettings
from jettison.server.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from jettison.server.structured import NO_JSON_DEFAULTS, JsonDefaults


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of a request's fields, and their defaults."""

    default_completion_max_tokens: int = 16
    default_chat_max_tokens: int | None = None
    """None: what is left of the context."""
    max_stops: int = 64
    max_logprobs: int | None = 20
    """Alternatives to a token; None: the whole vocabulary."""
    defaults: SamplingDefaults = NO_DEFAULTS
    """Sampling defaults of the model's maker or the operator."""
    json_defaults: JsonDefaults = NO_JSON_DEFAULTS
    """The operator's, for JSON that a request asks for."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Names, keys and limits of one HTTP front end."""

    model_names: tuple[str, ...]
    """Names of the model for clients; answers carry the first."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of the API; empty: no key is required."""
    keys_may_change: bool = False
    """Whether keys may change while the server runs; if so, even a single key is a tenant."""
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of administration; empty: it is open where no key is required, else closed."""
    metrics_need_key: bool = False
    """Whether ``/metrics`` needs a key, too, where keys are required."""
    console: ConsoleSettings = field(default_factory=ConsoleSettings)
    """The page for operators."""
    root_path: str = ""
    """Path under which a proxy shows this server, such as ``/api``; the proxy may remove it or not."""
    cors: CorsSettings = field(default_factory=CorsSettings)
    """Web pages of other origins."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    """None: plain HTTP."""
    default_completion_max_tokens: int = 16
    default_chat_max_tokens: int | None = None
    """None: what is left of the context."""
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    """Sampling defaults of the model's maker; a request's own fields beat them."""
    json_defaults: JsonDefaults = NO_JSON_DEFAULTS
    """Likewise for JSON that requests ask for."""
    end_tokens: EndTokens | None = None
    """For ``/tokenizer_info``: the tokens that end a text, and the files that name them."""
    max_stops: int = 64
    """Most stop strings of a request."""
    max_logprobs: int | None = 20
    """Alternatives to a token; None: the whole vocabulary."""
    default_seed: int | None = None
    """Seed from which the seeds of requests without one are drawn; None: the system draws them."""
    max_active_reqs_per_key: int | None = None
    """Most choices (prompts times ``n``) of one tenant under way (``KeyRing.tenant``: below two keys all clients are
    one tenant). A request has a place from its arrival on, one for each of its choices as soon as its body is read, and
    all of them until the last byte of its answer. None: no limit."""
    max_body_bytes: int = 4 << 20
    max_upload_bytes: int | None = None
    """Most bytes of the body of ``POST /v1/files``, which is written to disk as it arrives. None: the limit of all
    bodies."""
    max_header_bytes: int = 16 << 10
    max_buffered_bytes: int = 256 << 20
    """Most bytes of all request bodies that are read or tokenized at one time, tokenizer requests included."""
    max_side_buffered_bytes: int = 64 << 20
    """Most bytes of these that tokenizer requests (``limits``) have together, so that generating requests always have
    room: a quarter. One alone may have as many as its body may."""
    max_side_body_bytes: int = 1 << 20
    """Most bytes of the body of /tokenize and /detokenize. The body of /v1/messages/count_tokens may have as many as
    that of the message whose tokens it counts (``max_body_bytes``)."""
    max_side_jobs: int = 64
    """Most tokenizer requests in the server; they take no place in the engine's queue."""
    max_running_side_jobs: int = 2
    """Most tokenizer requests that work at one time; the others wait for their turn."""
    max_choices: int = 1024
    """Most choices (prompts times ``n``) of one HTTP request."""
    max_template_chars: int = 8 << 20
    """Most characters of a rendered chat prompt."""
    templates: TemplateSettings = field(default_factory=TemplateSettings)
    """The operator's settings for chat templates."""
    serves_offline: bool = True
    """Whether offline requests are served; if not, they and new batches are refused, and existing batches stay as they
    are."""
    header_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    """Time after which a connection without a request is closed. Longer than most clients and proxies keep theirs (the
    SDKs 5 s, nginx and AWS 60): else a request meets the close on its way, and is lost. One gives way sooner to a
    client that has no place."""
    write_timeout_s: float = 60.0
    """Time without progress after which a client that does not read its answer is dropped, and its request
    cancelled."""
    max_connections: int | None = None
    """Connections of one process beyond which clients get 503 and are closed at once. None: no limit."""
    keep_alive_s: float = 15.0
    """Silence on a stream after which a comment is sent."""
    thread_tokenize_chars: int = 16 << 10
    """Requests with longer prompts in all are tokenized outside the event loop, so that streams do not stall."""
    health_details: Mapping[str, Any] = field(default_factory=dict)
    """Entries added to ``/health``: precision and kernels, and the token identity that follows."""
    record_request: Callable[[int, int, int, int, bool, str], None] | None = None
    """Called for every request that ends: arrival (monotonic ns), input, output and cached tokens, whether offline, and
    its tenant."""
    trace_request: Callable[[Rows], None] | None = None
    """Called with the rows of every request that has ended, for traces; None: none are made."""
    event_log: Callable[[], Mapping[str, Any]] | None = None
    """Answers ``GET /jettison/events`` with ``{"now_s": t, "events": [{"t": s, "kind": ...}, ...]}``; None: no such
    endpoint."""
    deployment: Callable[[], Mapping[str, Any]] | None = None
    """Answers ``GET /jettison/deployment`` (``cost.deployment``); None: no such endpoint."""

    card_uses: Callable[[], list[CardUse]] | None = None
    """A look at the cards' memory, for ``/health`` and ``/metrics``; None: there are no cards."""

    sleep_control: SleepControl | None = None
    """Behind ``/sleep``, ``/wake_up`` and ``/is_sleeping``; None: no such endpoints."""

    @property
    def request_limits(self) -> RequestLimits:
        """The limits that requests are planned by."""
        return RequestLimits(
            self.default_completion_max_tokens, self.default_chat_max_tokens, self.max_stops, self.max_logprobs,
            self.sampling_defaults, self.json_defaults)

    @property
    def model_name(self) -> str:
        """The model's name in answers and metrics."""
        return self.model_names[0]
