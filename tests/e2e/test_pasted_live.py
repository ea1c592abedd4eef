"""A line of ``vllm serve``, pasted, as a real server: a model of the hub's cache, several names, flags of vLLM."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from e2e_server import PYTHON, START_TIMEOUT_S, WAIT_S, child_environment

from jettison.live.experiments.server_process import free_port
from puppet import TURN_END_ID, chain_of, write_puppet

LINE = (
    "Org/Puppet --host 127.0.0.1 -tp 1 --dtype half --max_model_len=1k --gpu-memory-utilization 0.9 --enforce-eager "
    "--disable-log-requests --download-dir {cache} --revision v1 --swap-space 0 --max-num-seqs 8 "
    "--compilation-config.mode 3 --port {port} --memory 32MiB --num-threads 1 --served-model-name puppet gpt-4o"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Of two revisions, of which v1 says Hi."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / "models--Org--Puppet"
    for at, word in enumerate(("Hi", "No")):
        write_puppet(repository / "snapshots" / (str(at) * 40), chain_of("\n", word, TURN_END_ID),
                     tokenizer_config={"eos_token": "<|im_end|>"})  # fmt: skip
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text("0" * 40)
    (repository / "refs" / "main").write_text("1" * 40)
    return cache


def ask(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return json.loads(answer.read() or b"null")


def await_ready(url, process, log):
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            ask(url, "/health")
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    pytest.fail(log.read_text())


@pytest.mark.live
def test_a_pasted_line_serves_all_names_and_says_what_it_left_out(cache, tmp_path):
    port, log = free_port(), tmp_path / "log"
    words = shlex.split(LINE.format(cache=cache, port=port))
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen([PYTHON, "-m", "jettison", "serve", *words], stderr=file, env=child_environment())
    try:
        await_ready(url, process, log)
        assert [model["id"] for model in ask(url, "/v1/models")["data"]] == ["puppet", "gpt-4o"]
        for name in ("puppet", "gpt-4o"):
            answer = ask(url, "/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "x"}]})
            assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("puppet", "Hi")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(url, "/v1/chat/completions", {"model": "Org/Puppet", "messages": []})
    finally:
        process.terminate()
        assert process.wait(WAIT_S) == 0
    lines = [line for line in log.read_text().splitlines() if "flags of vLLM that have another effect here" in line]
    assert len(lines) == 1 and all(flag in lines[0] for flag in (
        "--dtype half", "--enforce-eager", "--disable-log-requests", "--compilation-config"))  # fmt: skip
    assert "--tensor-parallel-size" not in lines[0] and "-tp" not in lines[0], "a default is not worth a word"
    assert "--memory bounds an instance" in log.read_text()


@pytest.mark.live
def test_a_line_that_does_not_fit_ends_at_once_with_one_line(cache):
    words = ["Org/Puppet", "--download-dir", str(cache), "--trust-remote-code", "-tp", "4", "--enable-lora", "--nope"]
    run = subprocess.run([PYTHON, "-m", "jettison", "serve", *words], capture_output=True, text=True, timeout=WAIT_S,
                         env=child_environment())  # fmt: skip
    assert run.returncode == 2 and run.stdout == "" and run.stderr.count("\n") == 1
    assert all(flag in run.stderr for flag in ("--trust-remote-code: ", "-tp 4: ", "--enable-lora: ", "--nope: "))
