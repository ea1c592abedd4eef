"""A trained model behind a real server, under the name that it was fetched by: a chat, a batch and a bench."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_server import COMMON_FLAGS, PYTHON, START_TIMEOUT_S, Served, as_environment, child_environment, eventually

from jettison.live.experiments.server_process import ServerProcess
from jettison.report.results import read_results

pytestmark = [pytest.mark.live, pytest.mark.slow]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def real(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("real")
    flags = COMMON_FLAGS | {
        "instances": 1, "memory": "700MiB", "page_size": "64KiB", "max_model_len": 512, "batch_dir": folder / "batches",
    }  # fmt: skip
    process = ServerProcess(Path(smollm2.name), flags, folder / "log")
    with as_environment(child_environment()):
        process.start(START_TIMEOUT_S)
    yield Served(process, folder / "log", None)
    process.close()


def test_a_chat_is_answered_sensibly(real: Served) -> None:
    answer = real.client().chat.completions.create(model="smollm2", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"


def test_a_batch_of_chats(real: Served) -> None:
    client = real.client()
    lines = [
        {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "smollm2", "messages": QUESTION, "temperature": 0}} for i in range(3)
    ]  # fmt: skip
    file = client.files.create(file=("lines.jsonl", io.BytesIO("\n".join(map(json.dumps, lines)).encode())),
                               purpose="batch")  # fmt: skip
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="1h")
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch is completed")
    output = client.files.content(client.batches.retrieve(batch.id).output_file_id or "").text
    answers = [json.loads(line)["response"]["body"]["choices"][0]["message"]["content"] for line in output.splitlines()]
    assert answers == [ANSWER] * 3


def test_a_bench(real: Served, tmp_path: Path) -> None:
    rows = [f"2026-01-01 00:00:0{i}.000000,{20 + i},6" for i in range(3)]
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    bench = [PYTHON, "-m", "jettison", "bench", "--url", real.url, "--trace", str(tmp_path / "trace.csv")]
    subprocess.run([*bench, "--rate-scale", "4", "--json", str(tmp_path / "run.json")], check=True,
                   env=child_environment(), capture_output=True)  # fmt: skip
    (run,) = read_results(tmp_path / "run.json")
    assert run.requests.completed == 3
