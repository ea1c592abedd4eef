"""The server's certificate and the check of clients' certificates: from flags to an ``ssl.SSLContext``. No socket is
opened here."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jettison.errors import ConfigError

HANDSHAKE_TIMEOUT_S = 10.0
"""Time limit of handshakes, short because a connection counts as open only after its handshake."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Files in PEM format, named as vLLM's flags name them."""

    certfile: str | None = None
    """The server's certificate, followed by its chain. None: no TLS."""
    keyfile: str | None = None
    """Its key; None: the key is in ``certfile``."""
    ca_certs: str | None = None
    """Certificates of the authorities that must have signed clients' certificates."""
    cert_reqs: int = 0
    """Whether clients show a certificate: 0 never, 1 if they like, 2 always."""
    ciphers: str | None = None
    """Ciphers of TLS 1.2, as OpenSSL writes them; None: Python's choice."""

    def context(self) -> ssl.SSLContext | None:
        """The context; None without a certificate. Raises ConfigError, one line, for unusable values."""
        if self.certfile is None:
            given = [name for name in ("keyfile", "ca_certs", "ciphers") if getattr(self, name) is not None]
            given += ["cert_reqs"] if self.cert_reqs else []
            if given:
                raise ConfigError(f"--ssl-{given[0].replace('_', '-')} needs --ssl-certfile")
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        with _told("--ssl-certfile", self.certfile, "--ssl-keyfile", self.keyfile):
            # Without a given password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, password=lambda: "")
        if self.ca_certs is not None:
            with _told("--ssl-ca-certs", self.ca_certs):
                context.load_verify_locations(self.ca_certs)
        elif self.cert_reqs:
            raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs: without it no client's certificate can be checked")
        context.verify_mode = ssl.VerifyMode(self.cert_reqs)
        if self.ciphers is not None:
            with _told("--ssl-ciphers", self.ciphers):
                context.set_ciphers(self.ciphers)
        return context


@contextmanager
def _told(*flags: str | None) -> Iterator[None]:
    """Turns errors inside into ConfigError that names the flags; ``flags`` are flags and values in turn, and flags
    without a value are left out."""
    try:
        yield
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        pairs = zip(flags[::2], flags[1::2], strict=True)
        named = ", ".join(f"{flag} {value}" for flag, value in pairs if value is not None)
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{named} cannot be used: {str(why).replace('_', ' ').lower()}") from None
