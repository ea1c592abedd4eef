"""The front door as proxies, browsers and old clients meet it: one real server behind TLS, from its first moment on."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import ssl
import subprocess
from contextlib import suppress

import httpx
import openai
import pytest
from e2e_server import COMMON_FLAGS, PYTHON, START_TIMEOUT_S, WAIT_S, as_environment, child_environment

from jettison.live.experiments.server_process import ServerProcess

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with"),
]
PAGE = {"origin": "https://chat.example"}
ASK = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Https(ServerProcess):
    """What it tells before it is ready is kept."""

    context: ssl.SSLContext

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}/llm"

    def is_ready(self) -> bool:
        with suppress(httpx.TransportError):  # it does not listen yet
            answer = httpx.post(f"{self.url}/v1/completions", json=ASK, headers=PAGE, verify=self.context)
            self.answers.append(answer)
            return answer.status_code == 200
        return False


@pytest.fixture(scope="module")
def served(model_dir, memory_for, tmp_path_factory):
    folder = tmp_path_factory.mktemp("https")
    files = ("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", *files],
        check=True, capture_output=True)  # fmt: skip
    flags: dict[str, object] = {"instances": 1}
    own = {
        "ssl_certfile": folder / "cert.pem", "ssl_keyfile": folder / "key.pem", "root_path": "/llm",
        "allowed_origins": '["*"]', "memory": memory_for(96, **flags),
    }  # fmt: skip
    process = Https(model_dir, COMMON_FLAGS | flags | own, folder / "log")
    process.context, process.answers = ssl.create_default_context(cafile=str(folder / "cert.pem")), []
    with as_environment(child_environment()):
        process.start(START_TIMEOUT_S)
    try:
        yield process
    finally:
        process.close()


def test_until_it_is_ready_it_says_when_it_will_be(served):
    *early, answered = served.answers
    assert early, "it listens before it is ready"
    assert answered.status_code == 200
    for answer in early:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert 1000 <= int(answer.headers["retry-after-ms"]) <= 60_000
        assert answer.headers["access-control-allow-origin"] == "*"
    log = served._log_path.read_text()
    listens, ready = log.index("listening on https://"), log.index(" ready: 1 instance")
    assert listens < ready and "not serving yet" in log[listens:ready]


def test_tokens_stream_through_tls_whatever_the_version_and_the_coding(served):
    expected = served.answers[-1].json()["choices"][0]["text"]
    with httpx.Client(verify=served.context, timeout=WAIT_S) as http:
        client = openai.OpenAI(base_url=f"{served.url}/v1/", api_key="none", http_client=http, max_retries=0)
        ask = ASK | {"ignore_eos": None}
        ask.pop("ignore_eos")
        chunks = client.completions.create(model="tiny", **ask, stream=True, extra_body={"ignore_eos": True})
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        body = json.dumps(ASK | {"stream": True}).encode()
        headers = {"content-encoding": "gzip", "content-type": "application/json"} | PAGE
        answer = http.post(f"{served.url}//v1/completions/", content=gzip.compress(body), headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert text_of(answer.text) == expected
    raw = socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S)
    with served.context.wrap_socket(raw, server_hostname="127.0.0.1") as sock:
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        sock.sendall(head % len(body) + body)
        told = b""
        while part := sock.recv(65536):
            told += part
    head, _, stream = told.decode().partition("\r\n\r\n")
    assert "transfer-encoding" not in head
    assert stream.startswith("data: {") and text_of(stream) == expected


def text_of(stream: str) -> str:
    events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_a_certificate_that_cannot_be_used_ends_the_start_with_one_line(model_dir):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (COMMON_FLAGS | {"port": 0}).items()]
    run = subprocess.run(
        [PYTHON, "-m", "jettison", "serve", str(model_dir), "--ssl-certfile=/nowhere.pem", *flags],
        env=child_environment(), capture_output=True, text=True, timeout=START_TIMEOUT_S)  # fmt: skip
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.splitlines()[-1].startswith("jettison: --ssl-certfile /nowhere.pem cannot be used: ")
