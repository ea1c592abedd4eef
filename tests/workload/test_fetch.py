"""Downloads from a server on this machine: whole and right, or not there."""

from __future__ import annotations

import hashlib
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jettison.errors import ConfigError, TraceError
from jettison.workload.fetch import PUBLIC_TRACES, PublicTrace, fetch, public_trace

CONTENT = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n" * 5000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", "/trace.csv")
            self.end_headers()
            return
        if not self.path.startswith(("/trace.csv", "/short", "/unsized")):
            self.send_error(404, "Not Found")
            return
        self.send_response(200)
        if not self.path.startswith("/unsized"):
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:1000] if self.path.startswith("/short") else CONTENT)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def trace(url: str, sha256: str | None = DIGEST) -> PublicTrace:
    return PublicTrace("here", url, sha256, "CC0", "a test")


@pytest.mark.parametrize("path", ["/trace.csv", "/moved", "/unsized"])
def test_a_whole_file_is_kept(server: str, tmp_path: Path, path: str) -> None:
    seen: list[int] = []
    done = fetch(trace(server + path), tmp_path / "new" / "t.csv", on_progress=lambda sofar, _: seen.append(sofar))
    assert done.path.read_bytes() == CONTENT
    assert (done.sha256, done.num_bytes, done.was_there) == (DIGEST, len(CONTENT), False)
    assert seen[-1] == len(CONTENT)
    assert [p.name for p in done.path.parent.iterdir()] == ["t.csv"]
    assert fetch(trace("http://127.0.0.1:9/never-asked"), done.path).was_there


@pytest.mark.parametrize(
    ("path", "sha256", "reason"),
    [
        ("/trace.csv", "0" * 64, "SHA-256 is .* 0000"),
        ("/short", DIGEST, "ended .* bytes early"),
        ("/nothing", DIGEST, "answers 404"),
    ],
)
def test_nothing_else_is_kept(server: str, tmp_path: Path, path: str, sha256: str, reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        fetch(trace(server + path, sha256), tmp_path / "t.csv")
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_it_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(TraceError, match=r"cannot fetch .*refused; without a network, download it elsewhere") as caught:
        fetch(trace(f"http://127.0.0.1:{port}/t.csv"), tmp_path / "t.csv")
    assert "\n" not in str(caught.value) and str(tmp_path / "t.csv") in str(caught.value)


def test_an_expected_digest_can_be_given(server: str, tmp_path: Path) -> None:
    unknown = trace("https://example.invalid/t.csv", None)
    assert fetch(unknown, tmp_path / "a.csv", url=server + "/trace.csv", sha256=DIGEST.upper()).sha256 == DIGEST
    with pytest.raises(TraceError, match="nothing is kept"):
        fetch(unknown, tmp_path / "b.csv", url=server + "/trace.csv", sha256="1" * 64)


def test_a_file_with_other_content_is_not_overwritten(server: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="other content"):
        fetch(trace(server + "/trace.csv"), path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://example.invalid/x", "trace.csv"])
def test_only_http_is_spoken(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="only http and https"):
        fetch(trace(url), tmp_path / "t.csv")


def test_public_traces_have_digests_where_one_is_published() -> None:
    assert all(len(found.sha256 or "0" * 64) == 64 for found in PUBLIC_TRACES.values())
    assert all(found.url.startswith("https://") for found in PUBLIC_TRACES.values())
    assert public_trace("burstgpt-1").file_name == "BurstGPT_1.csv"
    with pytest.raises(ConfigError, match="known: azure-conv-2023"):
        public_trace("azure")
