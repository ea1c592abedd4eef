"""R5 in small: mutated requests, byte by byte. No 5xx, no hang, and a canary stream is not disturbed."""

from __future__ import annotations

import asyncio
import json
import os
import random

from fake_engine import FakeEngine
from served import eventually, sse_events

NUM_REQUESTS = int(os.environ.get("JETTISON_FUZZ_REQUESTS", "120"))
ANSWER_LIMIT_S = 30.0  # generous, because machines are shared; the promise is 5

SEEDS = [
    {"model": "fake", "prompt": "hi", "max_tokens": 3, "temperature": 0.5, "stop": ["a", "bc"], "n": 2},
    {"model": "fake", "prompt": [[1, 2], [3]], "max_tokens": 1, "echo": True, "logprobs": 3, "stream": True},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 4, "stream": True,
     "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2},
    {"prompt": "x", "logit_bias": {"65": 1}, "seed": 3, "min_tokens": 1, "stop_token_ids": [5], "max_tokens": 2},
    {"tokens": [1, 2, 3], "prompt": "tokenize me", "add_special_tokens": False},
]  # fmt: skip
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models/x", "/v1/nothing"]
VALUES = [None, True, 0, -1, 2**31, 2**63, -(2**63), 2**64, 10**400, 1e308, 0.5, "", "x", "\x00", "😀", "x" * 2000, [],
          {}, [[]], [None], {"a": {}}, ["x"] * 50, [1] * 500, [[1, "x"]], {"type": "image_url"}]  # fmt: skip
TOKENS = [b"\xff", b"\x00", b"\xed\xa0\x80", b"\\ud800", b"NaN", b"1e999", b"{", b"[" * 500, b'"', b"\r\n\r\n"]


def mutate_document(draw: random.Random, document):
    """Another value somewhere."""
    document = json.loads(json.dumps(document))
    for _ in range(draw.randint(0, 2)):
        key = draw.choice([*document, "top_p", "user", "priority", "metadata", "messages", "prompt", "best_of"])
        document[key] = draw.choice(VALUES)
    return document


def mutate_bytes(draw: random.Random, data: bytes) -> bytes:
    """Cut, insert, replace."""
    changed = bytearray(data)
    for _ in range(draw.randint(0, 3)):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(3):
            case 0:
                changed[at:at] = draw.choice(TOKENS)
            case 1:
                del changed[at : at + draw.randint(1, 20)]
            case _:
                changed[at : at + 1] = bytes([draw.randrange(256)])
    return bytes(changed)


def make_request(draw: random.Random) -> bytes:
    body = json.dumps(mutate_document(draw, draw.choice(SEEDS))).encode()
    if draw.random() < 0.25:
        body = mutate_bytes(draw, body)
    method = draw.choice(["POST"] * 12 + ["GET", "HEAD", "PUT", "OPTIONS", "CONNECT", "PRI"])
    length = len(body) + draw.choice([0] * 10 + [-1, 1, 10**9])
    headers = [b"host: x", b"connection: close", b"content-length: %d" % length]
    if draw.random() < 0.15:
        headers[-1] = b"transfer-encoding: chunked"
        trailers = draw.choice([b"", b"x-t: 1\r\n", b"x-t: " + b"t" * 300 + b"\r\n", b"x-t: t\r\n" * 4000, b"x-t: "])
        extension = draw.choice([b"", b";a=b", b";" + b"a" * 20_000])
        body = b"%x%s\r\n%s\r\n0\r\n%s\r\n" % (len(body), extension, body, trailers)
    extra = [b"x-a: " + b"a" * 20_000, b"x-a: \xff\xfe", b"x-request-id: \x01", b"expect: 100-continue",
             b"upgrade: h2c\r\nconnection: upgrade", b"content-type: text/plain", b"content-length: 3",
             b"x-b: c\r\n" * 50]  # fmt: skip
    if draw.random() < 0.3:
        headers.append(draw.choice(extra))
    head = method.encode() + b" " + draw.choice(PATHS).encode() + b" HTTP/1.1\r\n" + b"\r\n".join(headers) + b"\r\n\r\n"
    if draw.random() < 0.15:
        head = mutate_bytes(draw, head)
    return head + body


async def send(port: int, request: bytes, draw_cut: int | None) -> bytes:
    """One connection: the whole request or its beginning, then what the server says until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request[:draw_cut])
        if draw_cut is not None:
            writer.close()
            return b""
        async with asyncio.timeout(ANSWER_LIMIT_S):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_nothing_a_client_sends_is_our_fault(serve):
    draw = random.Random(20260801)
    engine = FakeEngine(delay_s=0.002)
    limits = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "idle_timeout_s": 0.2, "max_body_bytes": 50_000}
    async with serve(engine, **limits) as served:
        canary = asyncio.create_task(served.completion(max_tokens=200, seed=0, stream=True))
        statuses: dict[bytes, int] = {}

        async def worker(requests):
            for request, cut in requests:
                answer = await send(served.port, request, cut)
                status = answer[9:12]
                assert not status.startswith(b"5"), (request[:3000], answer[:500])
                assert not answer or answer.startswith(b"HTTP/1.1 "), (request[:3000], answer[:100])
                assert b"Traceback" not in answer
                assert b'"error":' not in answer or b"server_error" not in answer, (request[:3000], answer[:500])
                statuses[status] = statuses.get(status, 0) + 1

        requests = []
        for _ in range(NUM_REQUESTS):
            request = make_request(draw)
            requests.append((request, draw.randrange(len(request)) if draw.random() < 0.05 else None))
        await asyncio.gather(*(worker(requests[at::16]) for at in range(16)))
        assert statuses[b"200"] > NUM_REQUESTS // 50
        assert statuses[b"400"] > NUM_REQUESTS // 50
        tokens = [json.loads(event)["choices"][0]["text"] for event in sse_events((await canary).text)[:-1]]
        assert tokens == [chr(97 + at % 26) for at in range(200)]
        await eventually(lambda: served.state.admission.num_active == 0)
        assert not engine.running
        assert served.state.admission._num_buffered_bytes == 0
        assert served.state.admission.num_choices == 0
