"""Bad values through all doors: never a 5xx, a traceback or a request that stays; what is refused names a field.

``JETTISON_LONG=1`` sends ten thousand of the same to a server with a model, too, as ``python
tests/server/fuzz_doors.py`` does.
"""

from __future__ import annotations

import os
import subprocess
import sys

import fuzz_doors
import psutil
import pytest
from door_cases import BASES, drawn
from fake_engine import FakeEngine, bytes_of
from fuzz_doors import judge, of_a_file
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from served import eventually
from test_tools import template

from jettison.server.auth import CONSOLE_DATA
from jettison.server.batches.settings import BatchSettings
from jettison.server.doors.message_tables import MESSAGES
from jettison.server.doors.response_tables import RESPONSES
from longrun import LONG

NUM_CASES = int(os.environ.get("JETTISON_FUZZ_DOORS", "600"))
SEED = 20261127
GROWTH_LIMIT_BYTES = 4 * fuzz_doors.GROWTH_LIMIT_BYTES
"""Of this process after the first fifth: it is the tests' and the server's in one, and keeps every line of the log."""


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.skipif(not LONG, reason="in the long run: JETTISON_LONG=1")
def test_ten_thousand_requests_to_a_server_with_a_model():
    document = fuzz_doors.run(10_000, 8)
    assert document["cases"] == 10_000 and document["findings"] == []


async def test_no_bad_value_is_our_fault(serve, tokenizer_of, tokenizer_dir, tmp_path, caplog):
    counts: dict[int, int] = {}
    files: list[str] = []
    engine = FakeEngine(bytes_of('{"a": "<tool_call>'), max_model_len=60_000)
    batches = BatchSettings(folder=tmp_path / "batches", tokenizer_dir=tokenizer_dir, window=4)
    async with serve(engine, tokenizer=tokenizer_of(template("qwen3")), batches=batches) as served:
        for at in range(NUM_CASES):
            if at == NUM_CASES // 5:
                base_bytes = psutil.Process().memory_info().rss
            case = of_a_file(drawn(SEED, at), files)
            answer = await served.post(case.path, **case.arguments())
            if case.path == "/v1/files" and answer.status_code == 200:
                files.append(answer.json()["id"])
            counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
            judge(at, case, answer)
        await eventually(lambda: not engine.running)
        assert served.state.admission.num_active == served.state.admission.num_side_jobs == 0
    grown_bytes = psutil.Process().memory_info().rss - base_bytes
    assert grown_bytes < GROWTH_LIMIT_BYTES, f"{grown_bytes / 1e6:.0f} MB more than after the first fifth"
    assert counts[200] > NUM_CASES // 20 and counts[400] > NUM_CASES // 4, counts
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


def test_what_a_process_allocates_counts_and_pages_of_shared_memory_do_not():
    sizes = []
    for allocated, shared in ((0, 0), (40 << 20, 0), (0, 40 << 20)):
        code = (f"import mmap, sys; own, pages = b'x' * {allocated}, mmap.mmap(-1, {shared + 4096}); "
                f"pages.write(b'x' * {shared}); own, print(flush=True); sys.stdin.read()")  # fmt: skip
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            sizes.append(fuzz_doors.anonymous_bytes(psutil.Process(child.pid)))
            child.stdin.close()
    assert sizes[1] - sizes[0] > fuzz_doors.GROWTH_LIMIT_BYTES > 4 * abs(sizes[2] - sizes[0])


def test_every_field_of_the_sdks_is_in_a_table():
    from anthropic.types import MessageCountTokensParams
    from anthropic.types.message_create_params import MessageCreateParamsNonStreaming

    for params, table in (
        (ResponseCreateParamsNonStreaming, RESPONSES), (MessageCreateParamsNonStreaming, MESSAGES),
        (MessageCountTokensParams, MESSAGES),
    ):
        assert sorted(set(params.__annotations__) - set(table)) == []


@pytest.mark.parametrize("depth", [50, *range(900, 1000, 9)])
async def test_what_could_be_read_can_be_told_and_kept(depth, app_client):
    """Python's bound of nesting counts from where the work is done: what was just read there may be too deep here."""
    deep = '{"a":' * depth + "{}" + "}" * depth
    asks = [
        ("/v1/messages", '"max_tokens":5,"messages":[{"role":"user","content":"x"}],'
                         '"tools":[{"name":"x","input_schema":%s}]'),
        *(("/v1/responses", f'"input":"x",{more}') for more in (
            '"tools":[{"type":"function","name":"x","parameters":%s}]', '"text":{"format":{"type":"text","x":%s}}',
            '"tool_choice":%s', '"unknown":%s')),
        ("/v1/responses", '"input":[{"role":"user","content":"x","z":%s}]'),
    ]
    for path, body in asks:
        for stream in ("true", "false"):
            answer = await app_client.post(
                path, content=f'{{"stream":{stream},' + body % deep + "}", headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400) and "internal" not in answer.text and "failed" not in answer.text
            if answer.status_code == 200 and path == "/v1/responses" and stream == "false":
                kept = f"{path}/{answer.json()['id']}"
                for again in (
                    await app_client.get(kept), await app_client.get(f"{kept}/input_items"),
                    await app_client.post(path, json={"input": "x", "previous_response_id": answer.json()["id"]}),
                ):
                    assert again.status_code in (200, 400)


def test_a_case_depends_on_its_number_alone():
    assert [drawn(SEED, at) for at in range(40)] == [drawn(SEED, at) for at in range(40)]
    assert {drawn(SEED, at).path for at in range(40)} == {path for path, _ in BASES}
    assert drawn(SEED, 3).document not in (BASES[3][1], drawn(SEED, 3 + len(BASES)).document)


async def test_a_stranger_reaches_nothing_new(serve, tokenizer_dir, tmp_path):
    """Without a key every route but probes, metrics and the console's page, which has nothing of the server, answers
    401, before it reads a body."""
    engine = FakeEngine()
    batches = BatchSettings(folder=tmp_path / "batches", tokenizer_dir=tokenizer_dir, window=4)
    async with serve(engine, api_keys=("secret",), batches=batches) as served:
        found = [(route.path, method) for route in served.app.routes for method in sorted(route.methods)]
        assert len(found) > 20
        for path, method in found:
            is_page = path.startswith("/console") and path not in CONSOLE_DATA
            url = served.url + path.replace("{", "").replace("}", "")
            for headers in ({}, {"authorization": "Bearer other"}, {"x-api-key": "other"}):
                answer = await served.http.request(method, url, headers=headers)
                is_open = path in ("/health", "/ping", "/metrics") or is_page
                assert (answer.status_code == 401) == (not is_open), (path, method, answer.status_code)
        for at in range(60):
            case = drawn(SEED, at)
            assert (await served.post(case.path, **case.arguments())).status_code == 401, case
        assert not engine.accepted
