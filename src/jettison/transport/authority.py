"""Certificates: one for each life of each worker, and the controller's, signed by an authority that lives in memory.

Each worker makes its own key, which never leaves its process; a signing request travels, a certificate comes back. The
certificate's name is the worker's ``Identity``: a peer of another id or of an older life has another name.

Keys are P-256 and certificates X.509, made by the ``cryptography`` package, which only clusters of several hosts load.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from jettison.errors import LinkDownError
from jettison.transport.handshake import Identity
from jettison.transport.tls import DOMAIN, Papers, name_of

_BEGINS, _ENDS = datetime.datetime(2020, 1, 1), datetime.datetime(9999, 12, 31)
"""UTC. Dates bound nothing: a certificate ends with its worker's life, which the proof inside the connection knows, and
the clock of a host may be wrong."""
MAX_REQUEST_BYTES = 4096
"""A request of ours has about 500."""


class Applicant:
    """A worker that asks for a certificate."""

    def __init__(self, me: Identity) -> None:
        """Makes the key."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name_of(me))])
        request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(self._key, hashes.SHA256())
        self.request = request.public_bytes(serialization.Encoding.DER)
        """What travels, DER."""

    def papers(self, certificate: bytes, authority: bytes) -> Papers:
        """With what came back, both PEM. Raises LinkDownError where the certificate is of another key."""
        public = x509.load_pem_x509_certificate(certificate).public_key()
        if public != self._key.public_key():
            raise LinkDownError("the certificate that came back is of another key")
        key = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Papers(key, certificate, authority)


class Authority:
    """It signs for ends whose requests have been proven otherwise: by the one-time token of their life."""

    def __init__(self) -> None:
        """Makes the key, which is nowhere but here."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority.{DOMAIN}")])
        made = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = made.public_bytes(serialization.Encoding.PEM)
        """PEM; no secret."""

    def papers_for(self, identity: Identity) -> Papers:
        """Of an end in this very process."""
        applicant = Applicant(identity)
        return applicant.papers(self.sign(applicant.request, identity), self.certificate)

    def sign(self, request: bytes, identity: Identity) -> bytes:
        """A certificate, PEM, of the key in a signing request (DER) and of nothing else that it says. Raises
        LinkDownError for bytes that are no request, for a key of another kind, and for one that did not sign it."""
        try:
            if len(request) > MAX_REQUEST_BYTES:
                raise ValueError(f"{len(request)} bytes")
            asked = x509.load_der_x509_csr(request)
            public = asked.public_key()
            if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
                raise ValueError("its key is not of P-256")
            if not asked.is_signature_valid:
                raise InvalidSignature
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
            raise LinkDownError(f"no signing request of {identity}: {error}") from None
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name_of(identity))])
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        made = (
            _builder(subject, self._name, public)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name_of(identity))]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)


class LentAuthority(Authority):
    """One whose key is in another process, which signs what it is asked for."""

    def __init__(self, certificate: bytes, ask: Callable[[bytes, Identity], bytes]) -> None:
        """``certificate``: its own, PEM. ``ask``: as ``sign``."""
        self.certificate = certificate
        self._ask = ask

    def sign(self, request: bytes, identity: Identity) -> bytes:
        """See ``Authority.sign``; LinkDownError also where there is no answer."""
        return self._ask(request, identity)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
        .serial_number(x509.random_serial_number()).not_valid_before(_BEGINS).not_valid_after(_ENDS)
    )  # fmt: skip


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=False, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
