"""What a model folder says, seen by a client of ``jettison serve`` and in the output of ``jettison batch run``: of a
model that says Hi, ends its turn, and would go on as the user."""

from __future__ import annotations

import json
import subprocess
import urllib.request

import pytest
from e2e_server import PYTHON, START_TIMEOUT_S, WAIT_S, as_environment, child_environment

from jettison.live.experiments.server_process import ServerProcess
from puppet import TURN_END_ID, chain_of, write_puppet

CHAT = {"model": "org/puppet", "messages": [{"role": "user", "content": "x"}]}
FLAGS: dict[str, object] = {"memory": "32MiB", "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A fine-tune of a base model, in the hub's cache: only its tokenizer's configuration knows what ends a turn."""
    return write_puppet(
        tmp_path_factory.mktemp("hub") / "models--org--puppet" / "snapshots" / ("0" * 40),
        chain_of("\n", "Hi", TURN_END_ID, "User"),
        generation={"temperature": 0.5, "top_k": 20, "max_new_tokens": 5},
        tokenizer_config={"eos_token": "<|im_end|>", "added_tokens_decoder": {
            "261": {"content": "<tool>", "special": True}}},
    )  # fmt: skip


@pytest.mark.live
def test_a_server(folder, tmp_path):
    process = ServerProcess(folder, FLAGS, tmp_path / "log")
    with as_environment(child_environment()):
        process.start(START_TIMEOUT_S)

    def ask(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(process.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return json.loads(answer.read())

    try:
        (choice,) = ask("/v1/chat/completions", CHAT)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hi", "stop")
        (choice,) = ask("/v1/chat/completions", CHAT | {"ignore_eos": True})["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("HiUs", "length")
        (choice,) = ask("/v1/chat/completions", CHAT | {"ignore_eos": True, "max_tokens": 7})["choices"]
        assert choice["message"]["content"] == "HiUser"
        assert ask("/tokenize", {"prompt": "<tool>"})["tokens"] == [261]
        assert [model["id"] for model in ask("/v1/models")["data"]] == ["org/puppet"]
        assert ask("/tokenizer_info")["end_tokens"] == [
            {"id": 257, "token": "<|endoftext|>", "from": ["generation_config.json", "config.json"]},
            {"id": 260, "token": "<|im_end|>", "from": ["tokenizer_config.json"]},
        ]
    finally:
        process.close()
    log = (tmp_path / "log").read_text()
    assert log.count("end tokens: 257 <|endoftext|> (generation_config.json, config.json), 260 <|im_end|> (token") == 1
    assert log.count("sampling where a request says nothing: temperature 0.5, top_k 20, max_tokens 5 (") == 1


@pytest.mark.live
def test_a_batch_without_a_server(folder, tmp_path):
    """Named by the repository's folder, which stands for its snapshot."""
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": CHAT | more}
        for name, more in (("ends", {}), ("is cut", {"ignore_eos": True}))
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    command = [PYTHON, "-m", "jettison", "batch", "run", str(tmp_path / "in.jsonl"), str(folder.parent.parent),
               "-o", str(out), "--memory", "32MiB", "--num-threads", "1"]  # fmt: skip
    done = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    texts = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers}
    assert "sampling where a request says nothing: temperature 0.5" in done.stderr
    assert texts == {"ends": "Hi", "is cut": "HiUs"}
