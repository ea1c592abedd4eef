"""Public traces by name: their addresses, licences, and the digests that downloads are checked by.

A file appears under its name only when it is whole and its SHA-256 is the expected one. No other module of this package
connects to a machine that the caller did not name, but for ``modelfiles.fetching``, which asks pip.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from jettison import __version__
from jettison.errors import ConfigError, TraceError

CHUNK_BYTES = 1 << 18
MAX_BYTES = 8 << 30
"""Most bytes of a download of unknown size."""

Progress = Callable[[int, int | None], None]
"""(bytes so far, bytes in all where the server says so)."""


@dataclass(frozen=True, slots=True)
class PublicTrace:
    """One published file."""

    name: str
    url: str
    sha256: str | None
    """None: its publisher gives none; the digest of the download is printed."""
    licence: str
    about: str

    @property
    def file_name(self) -> str:
        """The publisher's name of the file."""
        return urlsplit(self.url).path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a fetch."""

    path: Path
    sha256: str
    num_bytes: int
    was_there: bool


_AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/b469a113cedca53ddc3bdea71a143dc4b7d8700c/data"
_AZURE_2024 = "https://azurepublicdatasettraces.blob.core.windows.net/azurellminfererencetrace"
_MOONCAKE = (
    "https://raw.githubusercontent.com/kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28"
    "/FAST25-release/traces"
)
_BURSTGPT = "https://media.githubusercontent.com/media/HPMLL/BurstGPT/5d93d820d9b6bee4e26914df003e5713538164ae/data"
_CC_BY = "CC-BY 4.0"

PUBLIC_TRACES: dict[str, PublicTrace] = {
    trace.name: trace
    for trace in (
        PublicTrace(
            "azure-conv-2023", f"{_AZURE}/AzureLLMInferenceTrace_conv.csv",
            "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8", _CC_BY,
            "Azure, an hour of conversations, 19,366 requests (Patel et al., Splitwise, ISCA 2024)",
        ),
        PublicTrace(
            "azure-code-2023", f"{_AZURE}/AzureLLMInferenceTrace_code.csv",
            "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6", _CC_BY,
            "Azure, an hour of code completion, 8,819 requests (the same)",
        ),
        PublicTrace(
            "azure-conv-2024", f"{_AZURE_2024}/AzureLLMInferenceTrace_conv_1week.csv", None, _CC_BY,
            "Azure, a week of conversations in May 2024 (Stojkovic et al., DynamoLLM, HPCA 2025)",
        ),
        PublicTrace(
            "azure-code-2024", f"{_AZURE_2024}/AzureLLMInferenceTrace_code_1week.csv", None, _CC_BY,
            "Azure, a week of code completion in May 2024 (the same)",
        ),
        PublicTrace(
            "burstgpt-1", f"{_BURSTGPT}/BurstGPT_1.csv",
            "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122", _CC_BY,
            "BurstGPT, 61 days, 1.4 million requests, 52 MB (Wang et al., KDD 2025)",
        ),
        PublicTrace(
            "burstgpt-2", f"{_BURSTGPT}/BurstGPT_2.csv",
            "44bf5942b03fca42c01a226a545ad3a750ec62688faecd67b6831c56a8928bf7", _CC_BY,
            "BurstGPT, second part, 3.9 million requests, 145 MB (the same)",
        ),
        PublicTrace(
            "burstgpt-1-without-fails", f"{_BURSTGPT}/BurstGPT_without_fails_1.csv",
            "a4d068a7113ec0290e74063a1b3447dc6001a30e4298eb313581b71006dda1f4", _CC_BY,
            "burstgpt-1 without failed requests",
        ),
        PublicTrace(
            "mooncake-conversation", f"{_MOONCAKE}/conversation_trace.jsonl",
            "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df", "Apache-2.0",
            "Kimi, an hour of conversations, 12,031 requests (Qin et al., Mooncake, FAST 2025)",
        ),
        PublicTrace(
            "mooncake-toolagent", f"{_MOONCAKE}/toolagent_trace.jsonl", None, "Apache-2.0",
            "Kimi, tools and agents (the same)",
        ),
    )
}  # fmt: skip


def public_trace(name: str) -> PublicTrace:
    """The trace of this name; ConfigError lists the known ones."""
    if name not in PUBLIC_TRACES:
        raise ConfigError(f"unknown public trace {name!r}; known: {', '.join(PUBLIC_TRACES)}")
    return PUBLIC_TRACES[name]


def fetch(
    trace: PublicTrace,
    path: Path,
    *,
    url: str | None = None,
    sha256: str | None = None,
    timeout_s: float = 30.0,
    on_progress: Progress | None = None,
) -> Fetched:
    """Download to ``path``, unless it is there already with the expected digest.

    ``url`` names another place that has the same file; ``sha256`` an expected digest where the trace has none.
    ``timeout_s`` bounds every single wait for the network. Raises TraceError for an unreachable server, a download cut
    short, or other content than expected; nothing is left under ``path`` then. Raises ConfigError for an unusable path
    or address, or an existing file with other content.
    """
    expected = trace.sha256 or (None if sha256 is None else sha256.lower())
    address = url or trace.url
    if urlsplit(address).scheme not in ("http", "https"):
        raise ConfigError(f"{address}: only http and https addresses can be fetched")
    if path.exists():
        return _there(path, expected)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            digest, num_bytes = _download(address, file, timeout_s, on_progress)
        if expected is not None and digest != expected:
            raise TraceError(f"{address}: its SHA-256 is {digest}, {expected} is expected; nothing is kept")
        partial.replace(path)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise TraceError(
            f"cannot fetch {address}: {_reason(error)}; without a network, download it elsewhere and put it at {path}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return Fetched(path, digest, num_bytes, was_there=False)


def _there(path: Path, expected: str | None) -> Fetched:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if expected is not None and digest != expected:
        raise ConfigError(f"{path} is there with other content (SHA-256 {digest}); remove it to fetch it again")
    return Fetched(path, digest, path.stat().st_size, was_there=True)


def _download(address: str, file: IO[bytes], timeout_s: float, on_progress: Progress | None) -> tuple[str, int]:
    request = urllib.request.Request(address, headers={"User-Agent": f"jettison/{__version__}"})
    digest, num_bytes = hashlib.sha256(), 0
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        said = answer.headers.get("Content-Length")
        total = int(said) if said is not None and said.isdigit() else None
        while chunk := answer.read(CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > MAX_BYTES:
                raise TraceError(f"{address}: more than {MAX_BYTES} bytes; nothing is kept")
            digest.update(chunk)
            file.write(chunk)
            if on_progress is not None:
                on_progress(num_bytes, total)
        if total is not None and num_bytes < total:
            raise http.client.IncompleteRead(b"", total - num_bytes)
    return digest.hexdigest(), num_bytes


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    if isinstance(error, http.client.IncompleteRead):
        return f"the download ended {error.expected} bytes early"
    if isinstance(error, urllib.error.URLError):
        inner = error.reason
        return str(getattr(inner, "strerror", None) or inner)
    return str(error) or type(error).__name__
