"""A real server with a batch is killed again and again: every line ends once, and a drain leaves the rest for later."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import openai
import pytest
from e2e_server import (
    COMMON_FLAGS,
    MODEL,
    PYTHON,
    START_TIMEOUT_S,
    WAIT_S,
    Served,
    as_environment,
    child_environment,
    eventually,
    session_pids,
    trust,
)

from jettison.cli.main import main
from jettison.live.experiments.server_process import ServerProcess
from jettison.server.batches.alone import error_path, work_folder
from jettison.server.batches.records import Batch, Result, Status, StoredFile
from jettison.server.batches.store import DATABASE, Store
from jettison.server.batches.window import MOST_S
from longrun import part_of

pytestmark = pytest.mark.live

NUM_LINES = 160
LINE, LONG_LINE = 40, 120
"""Tokens of a line; a window of long ones wants twice the memory, so the newer make way for the older."""
NUM_KILLS = int(os.environ.get("JETTISON_BATCH_KILLS", "0"))
"""The long run: a batch of 2,000 lines, and its server killed so many times."""
BAD_EVERY = 40
HARVEST = {"offline": "harvest", "slo_ttft_ms": 1, "slo_tpot_ms": 50, "safepoint_layers": 1, "host_memory": "64MiB"}
"""A first token is always late, so a step that an online request finds under way is given up."""
FREED = ("checkpointed_blocks", "checkpoint_frees")
UNDER_WAY = (*FREED, "prefetched_blocks", "steps_shed")


def line(number: int, **body) -> str:
    fields = {"model": MODEL, "prompt": f"line {number}", "max_tokens": LINE, "temperature": 0, "ignore_eos": True}
    return json.dumps(
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": fields | body})


def content(num_lines: int = NUM_LINES, **body) -> bytes:
    lines = [line(n, **body | ({"temperature": 9} if n % BAD_EVERY == 3 else {})) for n in range(num_lines)]
    return "".join(text + "\n" for text in lines).encode()


@pytest.fixture
def flags(tmp_path, memory_for):
    return COMMON_FLAGS | {"instances": 1, "batch_dir": tmp_path / "batches", "batch_window": 24,
                           "memory": memory_for(96, instances=1)}  # fmt: skip


@pytest.fixture
def starting(model_dir, tmp_path, flags):
    """A server on the folder, on a port of its own each time."""
    started = []

    def start(**more) -> ServerProcess:
        process = ServerProcess(model_dir, flags | more, tmp_path / "log")
        with as_environment(child_environment()):
            process.start(START_TIMEOUT_S)
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


def client_of(process):
    http = openai.DefaultHttpxClient(verify=trust())
    return openai.OpenAI(
        base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S, http_client=http)


def begin(client, num_lines: int = NUM_LINES, **body) -> str:
    file = client.files.create(file=("in.jsonl", content(num_lines, **body)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def num_done(client, batch_id) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed + counts.failed


def kill(process: ServerProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.close()


def check_whole(outputs: list[dict], errors: list[dict], num_lines: int = NUM_LINES, num_tokens: int = LINE) -> None:
    """Every line once, answered or refused as it should be."""
    ids = Counter(document["custom_id"] for document in (*outputs, *errors))
    assert ids == Counter(f"r{n}" for n in range(num_lines))
    assert {document["custom_id"] for document in errors} == {f"r{n}" for n in range(3, num_lines, BAD_EVERY)}
    assert all(d["response"]["body"]["usage"]["completion_tokens"] == num_tokens for d in outputs)


class Chat:
    """Online requests, one after another, each for half of the memory; while nobody serves they have no answer."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.answers: list[int] = []
        """Tokens of each."""
        self._is_over = threading.Event()

    @contextmanager
    def going_on(self):
        thread = threading.Thread(target=self._ask_on)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _ask_on(self) -> None:
        while not self._is_over.wait(0.05):
            try:
                answer = client_of(self.process).completions.create(
                    model=MODEL, prompt="chat " * 140, max_tokens=8, extra_body={"ignore_eos": True})
                self.answers.append(answer.usage.completion_tokens)
            except openai.APITimeoutError:  # a server that lives has not answered
                self.answers.append(0)
            except (openai.APIConnectionError, openai.InternalServerError):  # killed, or not up yet
                continue


def kill_again_and_again(starting, flags, chat: Chat, batch_id: str, num_lines: int, num_kills: int) -> Counter[str]:
    """The first kill comes at once, mostly while lines are validated; later ones behind some more results, with
    harvesting once lines of which there was a copy have made way, else at any moment.

    What of harvesting was counted by servers that were killed."""
    chance = random.Random(5)
    at_least, counted = 0, Counter()
    for number in range(num_kills):
        client = client_of(chat.process)
        eventually(lambda client=client, least=at_least: num_done(client, batch_id) >= least, "some lines are done")
        if number and flags is HARVEST:
            eventually(lambda: all(map(harvested(chat.process).get, FREED)), "lines with a copy have made way")
        else:
            time.sleep(chance.random())
        counted.update(harvested(chat.process))
        kill(chat.process)
        chat.process = starting(**flags)
        before = num_done(client_of(chat.process), batch_id)
        assert before >= at_least  # what was acknowledged is there
        at_least = min(num_lines, before + chance.randrange(1, num_lines // (2 * num_kills)))
    return counted


def harvested(process: ServerProcess) -> dict[str, int]:
    served = Served(process, Path(os.devnull), None)
    return {name: int(served.metric(f"jettison:{name}_total")) for name in UNDER_WAY}


@pytest.mark.parametrize(
    ("flags_of_mode", "num_kills"), part_of([({"offline": "priority"}, 2), (HARVEST, 2)], [(HARVEST, 2)])
)
def test_killed_again_and_again_every_line_ends_once(starting, flags_of_mode, num_kills):
    """Beside a chat. With harvesting each server but the first has copied lines to the host and freed them when it
    dies; that lines came back and steps were given up is asked of the long run, for it is chance in the short one."""
    num_lines, num_kills = (2000, NUM_KILLS) if NUM_KILLS else (NUM_LINES, num_kills)
    chat = Chat(starting(**flags_of_mode))
    batch_id = begin(client_of(chat.process), num_lines, max_tokens=LONG_LINE)
    with chat.going_on():
        counted = kill_again_and_again(starting, flags_of_mode, chat, batch_id, num_lines, num_kills)
    assert set(chat.answers) == {8}
    if flags_of_mode is HARVEST and NUM_KILLS:
        assert all(counted[name] for name in UNDER_WAY), counted
    client = client_of(chat.process)
    eventually(lambda: client.batches.retrieve(batch_id).status == "completed", "the batch is completed", 10 * WAIT_S)
    batch = client.batches.retrieve(batch_id)
    assert (batch.request_counts.total, batch.request_counts.failed) == (num_lines, num_lines // BAD_EVERY)
    output, errors = (
        [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
        for file_id in (batch.output_file_id, batch.error_file_id)
    )
    check_whole(output, errors, num_lines, LONG_LINE)


def test_a_drain_leaves_the_rest_for_the_next_start(starting):
    process = starting()
    client = client_of(process)
    batch_id = begin(client)
    eventually(lambda: num_done(client, batch_id) > NUM_LINES // BAD_EVERY, "some lines are done")
    assert process.close(timeout_s=WAIT_S) == 0
    client = client_of(starting())
    assert num_done(client, batch_id) > NUM_LINES // BAD_EVERY
    eventually(lambda: client.batches.retrieve(batch_id).status == "completed", "the batch is completed")


def packed(*size):
    """The same bytes each time."""
    return gzip.compress(content(*size), mtime=0)


def test_a_file_without_a_server_and_killed_on_the_way(model_dir, tmp_path, memory_for, capsys):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(packed())
    flags = {"memory": memory_for(96, instances=1), "dtype": "float32", "num-threads": 1, "page-size": "4KiB",
             "batch-window": 24, "offline": "harvest", "host-memory": "64MiB"}  # fmt: skip
    arguments = ["batch", "run", str(path), str(model_dir), "-o", str(out)]
    for name, value in flags.items():
        arguments += [f"--{name}", str(value)]
    killed = subprocess.Popen(
        [PYTHON, "-m", "jettison", *arguments], env=child_environment(), start_new_session=True)
    try:
        eventually(lambda: num_results(work_folder(out)) > NUM_LINES // BAD_EVERY, "some lines are done")
    finally:
        killed.kill()
        killed.wait()
    eventually(lambda: not session_pids(killed.pid), "its workers and its check have ended")
    assert not out.exists()
    path.write_bytes(packed(60))
    assert main(arguments) == 2
    assert "work on another input" in capsys.readouterr().err
    path.write_bytes(packed())
    assert main([*arguments, "--offline", "none"]) == 2
    assert "--offline is none" in capsys.readouterr().err
    assert main(arguments) == 0
    output, errors = (
        [json.loads(text) for text in file.read_text().splitlines()] for file in (out, error_path(out)))
    check_whole(output, errors)
    told = capsys.readouterr().err
    assert f"{NUM_LINES - NUM_LINES // BAD_EVERY} of {NUM_LINES} lines" in told and f"{path}: gzip, unpacked" in told
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "out.errors.jsonl", "out.jsonl"]


@pytest.mark.parametrize("status", [Status.IN_PROGRESS, Status.EXPIRED])
def test_a_run_that_was_killed_a_month_ago_loses_nothing(model_dir, tmp_path, memory_for, capsys, status):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(content(30))
    begin_alone(path, out, status)
    memory = str(memory_for(96, instances=1))
    code = main(["batch", "run", str(path), str(model_dir), "-o", str(out), "--dtype", "float32", "--num-threads", "1",
                 "--page-size", "4KiB", "--batch-window", "1", "--memory", memory])  # fmt: skip
    if status is Status.IN_PROGRESS:
        assert code == 0
        output, errors = (
            [json.loads(text) for text in file.read_text().splitlines()] for file in (out, error_path(out)))
        assert output[0]["id"] == "of a month ago" and len(output) == 29
        assert [each["error"]["code"] for each in errors] == ["invalid_value"]
        assert not work_folder(out).exists()
    else:  # an earlier version ended it so
        assert code == 1
        assert f"the work is expired, and stays in {work_folder(out)}" in capsys.readouterr().err
        assert (work_folder(out) / DATABASE).exists()


def begin_alone(path: Path, out: Path, status: Status) -> None:
    """What ``jettison batch run`` leaves of thirty lines, the first of which has an answer, a month later."""
    store, long_ago_s = Store(work_folder(out)), int(time.time()) - MOST_S - 86400
    store.open()
    store.incoming("file-in").write_bytes(path.read_bytes())
    store.add_file(StoredFile(
        id="file-in", owner="", filename=path.name, purpose="batch", num_bytes=path.stat().st_size,
        created_at=long_ago_s))
    batch = store.add_batch(Batch(
        id="batch_1", owner="", endpoint="/v1/completions", input_file_id="file-in", completion_window="30d",
        created_at=long_ago_s, expires_at=long_ago_s + MOST_S, status=Status.IN_PROGRESS,
        reached_at={Status.IN_PROGRESS: long_ago_s}, num_lines=30, num_runnable=29, num_prompt_tokens=200,
        max_output_tokens=29 * LINE, metadata={"input": hashlib.sha256(path.read_bytes()).hexdigest()}))
    store.add_results([(batch.seq, Result(1, False, b'{"id": "of a month ago", "custom_id": "r0"}'))])
    store.close()
    if status is not Status.IN_PROGRESS:
        with closing(sqlite3.connect(work_folder(out) / DATABASE)) as db, db:
            ended = msgspec.json.encode(msgspec.structs.replace(batch, status=status))
            db.execute("UPDATE batches SET is_over = 1, data = ?", (ended,))


def num_results(folder) -> int:
    """On disk, read beside the process that writes them."""
    try:
        with closing(sqlite3.connect(f"file:{folder / DATABASE}?mode=ro", uri=True)) as db:
            return db.execute("SELECT COUNT(*) FROM results").fetchone()[0]
    except sqlite3.OperationalError:  # not there yet
        return 0


def test_a_second_server_on_the_same_folder_is_refused(starting, model_dir, flags, tmp_path, capfd):
    process = starting()
    assert process.is_ready()
    arguments = ["serve", str(model_dir), "--port", "0"]
    for name, value in flags.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    assert main(arguments) == 2
    assert "works on it" in capfd.readouterr().err
