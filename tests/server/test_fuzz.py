"""R5 in small: hostile connections, byte by byte. No 5xx, no hang, no word in the log, and a canary is not disturbed.

``python tests/server/fuzz_http.py`` plays ten thousand of the same cases against a server with a model.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress

import httpx
from fake_engine import FakeEngine
from http_cases import _KINDS, Case, Verdicts, draw_case, play_all
from served import eventually, sse_events

NUM_CASES = int(os.environ.get("JETTISON_FUZZ_REQUESTS", "400"))
SEED = 20260801


async def begun(served, engine) -> asyncio.Task[httpx.Response]:
    """A stream that runs. A machine that stands still for longer than ``header_timeout_s`` may cut a client off before
    it has said a word: then another one comes."""
    for _ in range(10):
        canary = asyncio.create_task(served.completion(max_tokens=200, seed=0, stream=True))
        while not (engine.running or canary.done()):
            await asyncio.sleep(0.005)
        if engine.running:
            return canary
        with suppress(httpx.TransportError):  # the refusal and the request may have crossed
            assert (await canary).status_code == 408
    raise AssertionError("this machine stands still again and again")


async def test_nothing_a_client_sends_is_our_fault(serve, caplog):
    engine = FakeEngine(delay_s=0.002)
    limits = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "idle_timeout_s": 0.2, "write_timeout_s": 1.0}
    verdicts = Verdicts()
    async with serve(engine, **limits, max_body_bytes=50_000) as served:
        canary = await begun(served, engine)
        await play_all(served.port, SEED, range(NUM_CASES), verdicts, width=16)
        assert verdicts.findings == []
        totals: dict[str, int] = {}
        for counts in verdicts.statuses.values():
            for status, number in counts.items():
                totals[status] = totals.get(status, 0) + number
        assert verdicts.statuses.keys() == _KINDS.keys()
        assert totals["200"] > NUM_CASES // 50
        assert totals["400"] > NUM_CASES // 50
        tokens = [json.loads(event)["choices"][0]["text"] for event in sse_events((await canary).text)[:-1]]
        assert tokens == [chr(97 + at % 26) for at in range(200)]
        await eventually(lambda: served.state.admission.num_active == 0)
        assert not engine.running
        assert served.state.admission._num_buffered_bytes == 0
        assert served.state.admission.num_choices == 0
        assert served.state.admission.num_side_jobs == 0
    # One line for each unknown field, one a minute for clients that do not read; and what our own sends meet.
    expected = ("ignoring unknown request field ", "dropping a client that has not read", "socket.send() raised")
    messages = [record.getMessage() for record in caplog.records]
    assert [message for message in messages if not message.startswith(expected)] == []


def test_a_case_depends_on_its_number_alone():
    assert draw_case(SEED, 7) == draw_case(SEED, 7)
    assert len({draw_case(seed, at) for seed in (1, 2) for at in range(50)}) > 90
    assert {draw_case(SEED, at).kind for at in range(300)} == _KINDS.keys()


def test_verdicts_find_what_they_look_for():
    """A check that cannot fail checks nothing."""
    case = Case("fields", (b"GET / HTTP/1.1\r\n\r\n",), "answer")
    for answer in (
        b"HTTP/1.1 500 Internal Server Error\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n{}HTTP/1.1 503 Service Unavailable\r\n\r\n",
        b"data: HTTP/1.1 200 OK",
        b"HTTP/1.1 400 Bad Request\r\n\r\nTraceback (most recent call last)",
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{"type":"server_error"}}',
    ):
        verdicts = Verdicts()
        verdicts.note(3, case, answer, ())
        assert len(verdicts.findings) == 1, answer
        assert verdicts.findings[0].startswith("case 3 (fields, answer): ")
    verdicts = Verdicts()
    verdicts.note(0, case, b"HTTP/1.1 503 Service Unavailable\r\n\r\n", ("503",))
    verdicts.note(1, case, b"", ())
    assert verdicts.findings == []
    assert verdicts.statuses == {"fields": {"503": 1, "none": 1}}
    verdicts.silent(2, case)
    assert "no end within" in verdicts.findings[0]
