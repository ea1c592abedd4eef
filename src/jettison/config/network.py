"""Keys of the layers between the HTTP server and its clients: web pages of other origins, connections, TLS, the console
and traces.

The keys of pages and of TLS are named as vLLM's flags. ``server.cors``, ``server.tls`` and ``server.console`` define
their meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

from jettison.config.sections import config_key
from jettison.config.values import float_from, int_from, nonempty, origin_list, text_list, truth


@dataclass(frozen=True, slots=True)
class CorsConfig:
    """Web pages of other origins (CORS)."""

    origins: tuple[str, ...] = config_key(
        (), origin_list, "Origins whose web pages may use this server, as a JSON list ('[\"https://chat.example\"]', "
        "'[\"*\"]' for any); their preflight requests need no key.", name="allowed_origins", metavar="JSON")
    methods: tuple[str, ...] = config_key(
        ("*",), text_list, "Methods that such a page may use, as a JSON list.", name="allowed_methods", metavar="JSON")
    headers: tuple[str, ...] = config_key(
        ("*",), text_list, "Headers that such a page may send, as a JSON list.", name="allowed_headers", metavar="JSON")
    credentials: bool = config_key(
        False, truth, "Such a page may send cookies and the like.", name="allow_credentials")


@dataclass(frozen=True, slots=True)
class ConnectionsConfig:
    """How long clients may keep a connection without moving on."""

    keep_alive_timeout_s: float = config_key(
        75.0, float_from(1.0), "A connection without a request is closed after so long: longer than a proxy before it "
        "keeps its own.", name="keep_alive_timeout", metavar="SECONDS")
    write_timeout_s: float = config_key(
        60.0, float_from(1.0), "A client that takes nothing of its answer for so long is cut off, and its request "
        "cancelled.", name="write_timeout", metavar="SECONDS")


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """HTTPS."""

    certfile: str | None = config_key(
        None, nonempty, "The server's certificate (PEM, with those that vouch for it behind it): HTTPS is spoken, and "
        "nothing else.", name="ssl_certfile", metavar="FILE", unset="none")
    keyfile: str | None = config_key(
        None, nonempty, "Its key (none: in the certificate's file).", name="ssl_keyfile", metavar="FILE", unset="none")
    ca_certs: str | None = config_key(
        None, nonempty, "What clients' certificates are to be signed by (PEM).", name="ssl_ca_certs", metavar="FILE",
        unset="none")
    cert_reqs: int = config_key(
        0, int_from(0, 2), "Whether clients have to show a certificate: 0 no, 1 it is checked where one is shown, 2 "
        "yes.", name="ssl_cert_reqs", metavar="N")
    ciphers: str | None = config_key(
        None, nonempty, "Ciphers of TLS 1.2, as OpenSSL writes them.", name="ssl_ciphers", metavar="LIST", unset="none")


@dataclass(frozen=True, slots=True)
class ConsoleConfig:
    """The page for operators."""

    is_on: bool = config_key(
        True, truth, "Serve the console, a web page for operators, at /console.", name="console")
    is_open: bool = config_key(
        False, truth, "Where keys are asked for, ask for none for what the console shows of the server (its chat and "
        "its batches need one all the same).", name="console_open")


def _collector(value: object) -> str:
    scheme, _, rest = nonempty(value).partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ValueError(f"needs http://HOST:PORT or https://HOST:PORT, not {value!r}: OTLP is spoken over HTTP"
                         " (collectors listen for it on 4318), not over gRPC")
    return f"{scheme}://{rest}"


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """Traces of requests."""

    endpoint: str | None = config_key(
        None, _collector, "Collector of OpenTelemetry's traces (OTLP over HTTP, http://HOST:4318): each request's way "
        "through queue, prefill, decode and moves. Needs pip install 'jettison[otel]'.", name="otlp_traces_endpoint",
        metavar="URL", unset="none")
