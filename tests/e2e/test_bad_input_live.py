"""Bad input against the real thing: design's table row by row, and what must not be reachable or readable from outside.

Every single field is tried in ``tests/server``; here are the rows that need a process, a model folder, real memory or
a real socket.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from e2e_server import (
    COMMON_FLAGS,
    KEY,
    MODEL,
    PYTHON,
    START_TIMEOUT_S,
    WAIT_S,
    child_environment,
    eventually,
    session_pids,
    trust,
)

from jettison.cli.main import main

pytestmark = pytest.mark.live

CANARY = {"model": MODEL, "prompt": "canary", "temperature": 0, "max_tokens": 16, "ignore_eos": True}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def undisturbed(server):
    """Whatever a test sends: the same workers afterwards, the same greedy answer, no memory held, no traceback."""

    def canary() -> str:
        answer = httpx.post(f"{server.url}{COMPLETIONS}", json=CANARY, timeout=WAIT_S, verify=trust())
        return answer.json()["choices"][0]["text"]

    pids, text = server.worker_pids(), canary()
    yield
    server.wait_idle()
    assert server.worker_pids() == pids
    assert canary() == text
    assert "Traceback" not in server.log()


# --- requests


BAD_REQUESTS = [
    (COMPLETIONS, b"{not json", 400, None),
    (COMPLETIONS, b"\xff\xfe", 400, None),
    (COMPLETIONS, b'"a string"', 400, None),
    (COMPLETIONS, {"prompt": 5}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "x", "messages": MESSAGES}, 400, "messages"),
    (COMPLETIONS, {"prompt": "x", "model": "gpt-9"}, 404, "model"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [261]}, 400, "prompt"),
    (CHAT, {"messages": MESSAGES, "prompt": "x"}, 400, "prompt"),
    (CHAT, {"messages": MESSAGES, "model": "gpt-9"}, 404, "model"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}]},
     400, "messages[0].content[0]"),
    ("/v1/embeddings", {"input": "x"}, 404, None),
]  # fmt: skip


@pytest.mark.usefixtures("undisturbed")
def test_bad_requests_get_openai_s_error_and_disturb_nothing(server):
    with httpx.Client(timeout=WAIT_S) as http:
        for path, body, status, param in BAD_REQUESTS:
            content = body if isinstance(body, bytes) else json.dumps(body)
            answer = http.post(f"{server.url}{path}", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == status, (path, body, answer.text)
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["param"] == param, (path, body, error)
            assert error["message"]


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("body", [{"prompt": [7] * 4000, "max_tokens": 97}, {"prompt": "x", "max_tokens": 5000}])
def test_beyond_the_context_is_refused_with_both_numbers(server, body):
    answer = httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=WAIT_S)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "4096" in error["message"]
    assert str(len(body["prompt"]) + body["max_tokens"]) in error["message"]


def test_beyond_all_memory_is_refused_with_both_numbers(guarded):
    """250 blocks of 16 tokens, though the context would hold 4,096."""
    client = guarded.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[7] * 3990, max_tokens=11)
    assert caught.value.code == "context_length_exceeded"
    assert "4000" in caught.value.message
    assert "4001" in caught.value.message
    fits = client.completions.create(model=MODEL, prompt=[7] * 3990, max_tokens=10, extra_body={"ignore_eos": True})
    assert fits.usage.total_tokens == 4000


async def test_a_full_queue_is_429_until_somebody_leaves_it(guarded):
    """One request holds more than half of the memory, one like it waits, and the next is told when to come back."""
    guarded.wait_idle()
    shed = guarded.metric("jettison:sheds_total")

    def numbers() -> tuple[float, float]:
        return guarded.metric("vllm:num_requests_running"), guarded.metric("vllm:num_requests_waiting")

    async with guarded.async_client() as client:

        async def ask(first: int):
            return await client.completions.create(
                model=MODEL, prompt=[first] * 2050, max_tokens=1900, temperature=0, stream=True,
                extra_body={"ignore_eos": True})  # fmt: skip

        running = await ask(1)
        await anext(running)
        waiting = await ask(2)
        assert numbers() == (1, 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(3)
        assert caught.value.code == "queue_full"
        headers = caught.value.response.headers
        assert 1 <= int(headers["retry-after"]) <= 60
        assert 0 < int(headers["retry-after-ms"]) <= 1000 * int(headers["retry-after"])
        assert guarded.metric("jettison:sheds_total") == shed + 1
        await waiting.close()
        await asyncio.to_thread(eventually, lambda: numbers() == (1, 0), "who went away waits no more")
        again = await ask(4)
        assert numbers() == (1, 1)
        await again.close()
        await running.close()
    guarded.wait_idle()


# --- model folders and budgets


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    # It would leave a file behind when it is unpickled.
    (folder / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch " + bytes(folder / "owned") + b"'\ntR.")


def unsupported(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    (folder / "config.json").write_text(json.dumps(config))


BAD_FOLDERS = {
    without_config: ["config.json", "not found", "needs config.json"],
    truncated: ["model.safetensors", "truncated", "download the file again"],
    pickled: ["pytorch_model.bin", "pickled", "safetensors"],
    unsupported: ["config.json", "GPT2LMHeadModel", "LlamaForCausalLM"],
}


class Command:
    """A ``jettison`` that is expected to end by itself."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [PYTHON, "-m", "jettison", *arguments], env=child_environment(), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def outcome(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr); nothing of it is left."""
        try:
            out, err = self.process.communicate(timeout=START_TIMEOUT_S)
        finally:
            self.process.kill()
        assert session_pids(self.process.pid) == set()
        return self.process.returncode, out, err


def complaint(err: str) -> str:
    """The one line for the user, which comes last; what else is there is no trouble of ours."""
    *logged, last = err.splitlines()
    assert last.startswith("jettison: ")
    assert not [line for line in logged if "Traceback" in line or "ERROR" in line or "WARNING" in line], err
    return last


def serve_arguments(folder: Path, memory: object) -> list[str]:
    flags = COMMON_FLAGS | {"instances": 1, "memory": memory, "port": 0}
    return ["serve", str(folder), *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())]


def test_a_start_that_cannot_work_is_one_line_and_exit_2(model_dir, memory_for, tmp_path, capsys):
    """The command in this process, where it fails before it starts any: one of its own spends its life importing. Two
    are, at the same time."""
    too_small = Command(*serve_arguments(model_dir, memory_for(0) // 2))
    for spoil in BAD_FOLDERS:
        folder = tmp_path / spoil.__name__
        shutil.copytree(model_dir, folder)
        spoil(folder)
        arguments = serve_arguments(folder, "16MiB")
        if spoil is pickled:
            code, out, err = Command(*arguments).outcome()
        else:
            code, (out, err) = main(arguments), capsys.readouterr()
        assert (code, out) == (2, ""), err
        line = complaint(err)
        assert all(word in line for word in [str(tmp_path / spoil.__name__), *BAD_FOLDERS[spoil]]), line
    assert not (tmp_path / "pickled" / "owned").exists()
    code, out, err = too_small.outcome()
    assert (code, out) == (2, ""), err
    line = complaint(err)
    needed = max(int(word) for word in line.replace("(", " ").split() if word.isdigit())
    assert needed == memory_for(4, instances=1), line  # an engine wants at least a few blocks
    assert str(memory_for(0) // 2) in line


def test_a_bad_trace_is_refused_with_line_numbers_before_anything_is_sent(server, tmp_path):
    trace = tmp_path / "bad.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,10,2\n"
        "yesterday,10,2\n"
        "2023-11-16 18:17:04.0319600,10\n"
        "2023-11-16 18:17:04.1319600,-4,2\n"
    )
    sent = server.metric("vllm:prompt_tokens_total")
    report = tmp_path / "report.json"
    code, out, err = Command("bench", "--url", server.url, "--trace", str(trace), "--json", str(report)).outcome()
    assert (code, out) == (2, ""), err
    line = complaint(err)
    for words in ("bad.csv", "3 bad rows", "nothing loaded", "line 3:", "line 4:", "line 5:"):
        assert words in line
    assert "line 2" not in line
    assert not report.exists()
    assert server.metric("vllm:prompt_tokens_total") == sent


# --- what is reachable, and by whom


def test_loopback_is_all_that_listens(server):
    tree = server.pids()
    assert len(tree) == 4, "the server, the fork server, two workers"
    listening = [(c.pid, c.laddr.ip, c.laddr.port) for c in psutil.net_connections(kind="tcp")
                 if c.pid in tree and c.status == psutil.CONN_LISTEN]  # fmt: skip
    assert listening == [(server.pid, "127.0.0.1", server.process.port)]
    assert not [c for c in psutil.net_connections(kind="udp") if c.pid in tree]


def test_worker_sockets_lie_in_a_folder_of_their_own(server):
    tree = server.pids()
    paths = {Path(c.laddr) for c in psutil.net_connections(kind="unix") if c.pid in tree and c.laddr}
    assert len(paths) >= 3  # control, and a link for each worker
    for path in paths:
        assert path.is_absolute()  # none in the abstract name space, which has no permissions
        folder = path.parent.stat()
        assert stat.S_IMODE(folder.st_mode) == 0o700
        assert folder.st_uid == os.getuid()
        assert {entry.name for entry in path.parent.iterdir() if not entry.is_socket()} == set()


def test_a_key_opens_everything_but_probes_and_metrics(guarded):
    with httpx.Client(timeout=WAIT_S, base_url=guarded.url) as http:
        for path in ("/health", "/ping", "/metrics", "/metrics/"):
            assert http.get(path).status_code == 200
        for method, path, body in (
            ("GET", "/v1/models", None), ("POST", COMPLETIONS, CANARY), ("POST", CHAT, {"messages": MESSAGES}),
            ("POST", "/tokenize", {"prompt": "x"}), ("POST", "/detokenize", {"tokens": [1]}),
            ("GET", "/v1//models/", None), ("GET", "/tokenizer_info", None), ("GET", "/load", None),
            ("GET", "/version", None), ("GET", "/jettison/events", None), ("GET", "/no/such/path", None),
        ):  # fmt: skip
            for headers in ({}, {"authorization": "Bearer nonsense"}, {"authorization": f"Basic {KEY}"}):
                answer = http.request(method, path, json=body, headers=headers)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "invalid_api_key"
            admitted = http.request(method, path, json=body, headers=guarded.headers())
            assert admitted.status_code == (404 if path == "/no/such/path" else 200), (path, admitted.text)


def test_the_key_is_seen_nowhere(guarded):
    processes = [psutil.Process(guarded.pid), *psutil.Process(guarded.pid).children(recursive=True)]
    assert len(processes) == 4, "the server, the fork server, a worker, and the guard of the folder of sockets"
    assert not [process for process in processes if any(KEY in word for word in process.cmdline())]
    assert not [child for child in processes[1:] if KEY in child.environ().values()]
    assert KEY not in guarded.log()


CAP_BYTES = 4 << 20


@pytest.mark.usefixtures("undisturbed")
def test_bodies_and_headers_have_caps(server):
    big = b'{"prompt": "' + b"x" * CAP_BYTES + b'"}'
    url = f"{server.url}{COMPLETIONS}"
    with httpx.Client(timeout=WAIT_S) as http:
        announced = http.post(url, content=big)
        chunked = http.post(url, content=(big[at : at + 65536] for at in range(0, len(big), 65536)))
        for answer in (announced, chunked):
            assert answer.status_code == 413
            assert str(CAP_BYTES) in answer.json()["error"]["message"]
        assert http.get(f"{server.url}/health", headers={"x-large": "x" * 20_000}).status_code == 431
    for length in (b"-1", b"ten", b"9" * 30):
        assert raw_status(server, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: " + length + b"\r\n\r\n"
                          ) in (400, 413)  # fmt: skip


def raw_status(server, data: bytes) -> int:
    with socket.create_connection(("127.0.0.1", server.process.port), timeout=WAIT_S) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = sock.makefile("rb").readline()
    assert answer.startswith(b"HTTP/1.1 ")
    return int(answer.split()[1])


def load_of(server) -> int:
    return httpx.get(f"{server.url}/load", timeout=WAIT_S, verify=trust()).json()["server_load"]


def test_a_client_that_hangs_up_in_mid_body_leaves_nothing(server):
    """Half a request, then gone: nothing is submitted, and the place in the queue is given back."""
    with socket.create_connection(("127.0.0.1", server.process.port), timeout=WAIT_S) as sock:
        sock.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"prompt": "x')
        eventually(lambda: load_of(server) == 1, "the request is counted")
    eventually(lambda: load_of(server) == 0, "it is counted out again")
    assert server.is_idle()
