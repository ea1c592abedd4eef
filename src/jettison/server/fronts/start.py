"""What a front end's process is told before anything else, as JSON on its standard input, which no other user of the
machine sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_type_hints

import msgspec

from jettison.server.settings import ServerSettings
from jettison.server.tls import TlsSettings

CARRIED = (
    "model_names", "keys_may_change", "root_path", "cors", "default_completion_max_tokens", "default_chat_max_tokens",
    "sampling_defaults", "json_defaults", "max_stops", "max_logprobs", "default_seed", "max_active_reqs_per_key",
    "max_body_bytes", "max_upload_bytes", "max_header_bytes", "max_buffered_bytes", "max_side_buffered_bytes",
    "max_side_body_bytes", "max_side_jobs", "max_running_side_jobs", "max_choices", "max_template_chars", "templates",
    "serves_offline", "header_timeout_s", "body_timeout_s", "idle_timeout_s", "write_timeout_s", "max_connections",
    "keep_alive_s", "thread_tokenize_chars",
)  # fmt: skip
"""Settings of a front end. The others are the controller's: the engine's documents, what administers it, and keys,
which travel over the channel as digests."""

_HINTS = get_type_hints(ServerSettings)
_Carried = msgspec.defstruct("_Carried", [(name, _HINTS[name]) for name in CARRIED], kw_only=True)


class FrontStart(msgspec.Struct, frozen=True, kw_only=True):
    """What every life of every front end is told."""

    settings: msgspec.Raw
    tls: TlsSettings
    tokenizer_dir: str
    byte_tokens: int | None
    folder: str
    """Of the sockets in ``fronts.paths``."""
    orphan_timeout_s: float
    """How long streams wait for the next controller."""
    has_journal: bool
    """Whether the controller has a console, or traces requests."""
    reads_traces: bool
    """Whether it traces them."""
    records: bool
    """Whether it records them."""
    log_level: str


def carried(settings: ServerSettings) -> msgspec.Raw:
    """The settings for a front end."""
    return msgspec.Raw(msgspec.json.encode({name: getattr(settings, name) for name in CARRIED}))


def settings_of(data: msgspec.Raw) -> ServerSettings:
    """Inverse of ``carried``. Raises msgspec.MsgspecError."""
    values: dict[str, Any] = msgspec.structs.asdict(msgspec.json.decode(data, type=_Carried))
    return ServerSettings(**values)


def divided(settings: ServerSettings, num_fronts: int) -> ServerSettings:
    """For one of so many front ends: what bounds the memory of bodies in the server is divided among them; each can
    always take one body. Descriptors are each process's own, as many as the controller has, but each connection may
    need a second one for its way to the controller."""
    least, most = settings.max_body_bytes, settings.max_connections
    return replace(
        settings,
        max_buffered_bytes=max(least, settings.max_buffered_bytes // num_fronts),
        max_side_buffered_bytes=max(least, settings.max_side_buffered_bytes // num_fronts),
        max_side_jobs=max(1, settings.max_side_jobs // num_fronts),
        max_running_side_jobs=max(1, settings.max_running_side_jobs // num_fronts),
        max_connections=None if most is None else -(-most // 2),
    )
