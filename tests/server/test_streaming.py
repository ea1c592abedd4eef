"""Streams: order, ends, silence, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from fake_engine import FakeEngine
from served import eventually, sse_events

from jettison.live.engine.api import OFTEN_LOST
from jettison.server.settings import ServerSettings
from jettison.server.sse import DONE, EventStream, StreamKeeper


async def test_wire_format_and_token_ids(serve):
    async with serve(FakeEngine()) as served:
        answer = await served.completion(
            max_tokens=3, seed=0, stream=True, return_token_ids=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True})  # fmt: skip
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("data: [DONE]\n\n")
    *chunks, usage, done = sse_events(answer.text)
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[97], [98], [99]]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [104, 105]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert json.loads(usage)["choices"] == []


async def test_many_streams_are_monotone_and_complete(serve):
    """R2: nothing duplicated, lost or reordered, with several tokens an event and streams side by side."""
    engine = FakeEngine(tokens_per_event=3)
    async with serve(engine) as served:

        async def one(seed):
            answer = await served.completion(
                max_tokens=50, seed=seed, n=3, stream=True, return_token_ids=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True})  # fmt: skip
            tokens, totals = {0: [], 1: [], 2: []}, []
            for payload in sse_events(answer.text)[:-2]:
                chunk = json.loads(payload)
                (choice,) = chunk["choices"]
                tokens[choice["index"]] += choice["token_ids"]
                totals.append(chunk["usage"]["completion_tokens"])
            assert totals == sorted(totals) and len(set(totals)) == len(totals)
            assert totals[-1] == 150
            for sample, got in tokens.items():
                assert got == [97 + (seed + sample + at) % 26 for at in range(50)]

        await asyncio.gather(*(one(seed) for seed in range(20)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay_s", [None, 0.01])
async def test_a_client_that_leaves_is_cancelled(serve, stream, delay_s):
    engine = FakeEngine(delay_s=delay_s)
    async with serve(engine) as served:
        body = json.dumps({"model": "fake", "prompt": ["p", "q"], "max_tokens": 290, "stream": stream}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                     b"content-length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
        await eventually(lambda: len(engine.accepted) == 2)
        if stream:
            assert b"200 OK" in await reader.readline()
        writer.close()
        await eventually(lambda: not engine.running)
        await eventually(lambda: served.state.admission.num_active == 0)
        assert sorted(engine.cancelled) == sorted(request.request_id for request in engine.accepted)
        assert served.state.admission.num_choices == 0
        assert not served.state.generations
        metrics = (await served.http.get(f"{served.url}/metrics")).text
        assert 'vllm:request_success_total{finished_reason="abort",model_name="fake"} 2.0' in metrics


async def test_silent_streams_get_comments(serve):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, keep_alive_s=0.02) as served:
        body, text = {"model": "fake", "prompt": "hi", "max_tokens": 2, "stream": True}, ""
        async with served.http.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
            async for piece in answer.aiter_text():
                text += piece
                engine.release()  # it has had a comment
    assert text.startswith(": keep-alive\n\n")
    assert len(sse_events(text)) == 3


async def test_no_keep_alive_after_the_end():
    sent = []

    async def send(message):
        sent.append(message)

    stream, keeper = EventStream(send), StreamKeeper(ServerSettings(model_names=("m",), keep_alive_s=0.0))
    await stream.start()
    keeper._streams.add(stream)
    keeper._look(time.monotonic() + 1)  # a comment is on its way, and the stream ends before it goes out
    await stream.finish(b"data: last\n\n" + DONE)
    while keeper._writes:
        await asyncio.sleep(0)
    assert [message.get("body") for message in sent] == [None, b"data: last\n\ndata: [DONE]\n\n"]


@pytest.mark.parametrize("how", ["write", "comment", "finish"])
async def test_a_send_that_raises_leaves_no_write_open(how, caplog):
    gate = asyncio.Event()

    async def send(message):
        if message["type"] == "http.response.body":
            await gate.wait()
            raise OSError("gone")

    stream = EventStream(send)
    await stream.start()
    write = asyncio.create_task(stream.write(b"x") if how == "write" else getattr(stream, how)())
    await asyncio.sleep(0)
    assert stream.sending_since_s is not None
    gate.set()
    with pytest.raises(OSError, match="gone"):
        await write
    assert stream.sending_since_s is None


async def test_an_event_beside_a_waiting_comment_still_counts_as_waiting():
    gates = [asyncio.Event(), asyncio.Event()]
    waiting = iter(gates)

    async def send(message):
        if message["type"] == "http.response.body":
            await next(waiting).wait()

    stream = EventStream(send)
    await stream.start()
    writes = [asyncio.create_task(stream.comment())]
    await asyncio.sleep(0)
    writes.append(asyncio.create_task(stream.write(b"x")))
    await asyncio.sleep(0)
    gates[0].set()
    await writes[0]
    assert stream.sending_since_s is not None
    gates[1].set()
    await writes[1]
    assert stream.sending_since_s is None


async def test_events_go_out_in_order_whether_written_at_once_or_sent():
    """The protocol takes some at once, refuses others, and none while a comment waits."""
    out, gate, takes = [], asyncio.Event(), True

    async def send(message):
        if message["type"] == "http.response.body":
            if message["body"].startswith(b":"):
                await gate.wait()
            out.append(message["body"])

    def write_now(events):
        if takes:
            out.append(events)
        return takes

    stream = EventStream(send, write_now)
    await stream.start()
    assert stream.write(b"1") is None
    takes = False
    await stream.write(b"2")
    takes = True
    comment = asyncio.create_task(stream.comment())
    await asyncio.sleep(0)
    waiting = stream.write(b"3")
    assert waiting is not None
    gate.set()
    await comment
    await waiting
    assert stream.write(b"4") is None
    assert [events for events in out if not events.startswith(b":")] == [b"1", b"2", b"3", b"4"]


async def test_a_client_that_takes_nothing_is_dropped(serve):
    engine = FakeEngine(lambda request: [0x01] * 300, delay_s=0.01)
    async with serve(engine, keep_alive_s=0.2, write_timeout_s=0.1) as served:
        fields = {"model": "fake", "prompt": "p", "max_tokens": 290, "n": 128, "stream": True, "logprobs": 20}
        body = json.dumps(fields).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await eventually(lambda: len(engine.accepted) == 128)
        await eventually(lambda: served.state.admission.num_active == 0)
        assert not engine.running
        assert engine.cancelled
        assert not (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


async def test_a_crash_leaks_nothing_and_fails_alone(serve, caplog):
    engine = FakeEngine(delay_s=0.001)
    async with serve(engine) as served:
        canary = asyncio.create_task(served.completion(max_tokens=100, stream=True))
        await eventually(lambda: engine.accepted)
        engine.crash_after = 0
        crashed = asyncio.create_task(served.completion(max_tokens=5))
        await eventually(lambda: len(engine.accepted) == 2)
        await asyncio.sleep(0)
        answer = await crashed
        engine.crash_after = None
        assert answer.status_code == 500
        assert "secret" not in answer.text
        message = answer.json()["error"]["message"]
        correlation_id = message.split()[-1].rstrip(".")
        assert correlation_id in caplog.text
        assert "secret internal detail" in caplog.text
        await canary
        assert served.state.admission.num_active == 0


async def test_one_failing_choice_ends_the_others(serve):
    engine = FakeEngine(delay_s=0.001)
    async with serve(engine) as served:
        engine.fail_after = 3
        answer = await served.completion(max_tokens=50, n=4)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_error" and "x-should-retry" not in answer.headers
        await eventually(lambda: not engine.running)
        assert served.state.admission.num_choices == 0


async def test_a_request_that_ended_each_engine_is_not_to_be_sent_again(serve):
    engine = FakeEngine(delay_s=0.001)
    async with serve(engine) as served:
        engine.fail_after, engine.failure = 0, OFTEN_LOST
        answer = await served.completion(max_tokens=50)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")


async def test_submit_is_all_or_none(serve):
    engine = FakeEngine(delay_s=None)
    engine.max_running = 2
    async with serve(engine) as served:
        answer = await served.completion(n=4)
        assert answer.status_code == 429
        assert len(engine.cancelled) == 2
        assert served.state.admission.num_choices == 0
        assert served.state.admission.num_active == 0


async def test_choices_of_one_answer_do_not_fill_the_queue_for_each_other(serve):
    engine = FakeEngine(delay_s=None)
    engine.max_waiting = 2
    async with serve(engine) as served:
        running = asyncio.create_task(served.completion(prompt=["a", "b"], n=4, max_tokens=1))
        await eventually(lambda: len(engine.accepted) == 8)
        assert (await served.completion(max_tokens=1)).status_code == 429
        engine.release()
        assert len((await running).json()["choices"]) == 8
