"""The server's certificate and the check of clients' certificates: from flags to an ``ssl.SSLContext``. No socket is
opened here."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from jettison.errors import ConfigError

MAX_FILE_BYTES = 16 << 20
HANDSHAKE_TIMEOUT_S = 10.0
"""Time limit of handshakes, short because a connection counts as open only after its handshake."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What the files held when they were read."""

    certificate: bytes = field(repr=False)
    key: bytes | None = field(repr=False)
    authorities: bytes | None = field(repr=False)


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
    files: TlsFiles | None = None
    """None: they are read where they are needed."""

    def read(self) -> TlsSettings:
        """With what the files hold now. Raises ConfigError, one line, where one cannot be read."""
        if self.certfile is None:
            return self
        with _told("--ssl-certfile", self.certfile, "--ssl-keyfile", self.keyfile):
            certificate, key = _content(self.certfile), _content(self.keyfile)
        with _told("--ssl-ca-certs", self.ca_certs):
            authorities = _content(self.ca_certs)
        assert certificate is not None
        return replace(self, files=TlsFiles(certificate, key, authorities))

    def context(self) -> ssl.SSLContext | None:
        """The context; None without a certificate. Raises ConfigError, one line, for unusable values."""
        if self.certfile is None:
            given = [name for name in ("keyfile", "ca_certs", "ciphers") if getattr(self, name) is not None]
            given += ["cert_reqs"] if self.cert_reqs else []
            if given:
                raise ConfigError(f"--ssl-{given[0].replace('_', '-')} needs --ssl-certfile")
            return None
        files = self.files or self.read().files
        assert files is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        with (
            _told("--ssl-certfile", self.certfile, "--ssl-keyfile", self.keyfile),
            _as_file(files.certificate) as certfile, _as_file(files.key) as keyfile,
        ):
            assert certfile is not None
            # Without a given password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(certfile, keyfile, password=lambda: "")
        if files.authorities is not None:
            with _told("--ssl-ca-certs", self.ca_certs), _as_file(files.authorities) as ca_certs:
                context.load_verify_locations(ca_certs)
        elif self.cert_reqs:
            raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs: without it no client's certificate can be checked")
        context.verify_mode = ssl.VerifyMode(self.cert_reqs)
        if self.ciphers is not None:
            with _told("--ssl-ciphers", self.ciphers):
                context.set_ciphers(self.ciphers)
        return context


def _content(path: str | None) -> bytes | None:
    """Raises OSError, ValueError."""
    if path is None:
        return None
    with open(path, "rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    return content


@contextmanager
def _as_file(content: bytes | None) -> Iterator[str | None]:
    """A path in memory: ``ssl`` takes certificates from files alone."""
    if content is None:
        yield None
        return
    fd = os.memfd_create("jettison-tls")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


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
