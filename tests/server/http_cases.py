"""What a hostile or broken client sends over one connection, drawn from a seed, played, and judged.

The tests play the cases against a server without a model, ``python tests/server/fuzz_http.py`` ten thousand of them
against one with a model. Nothing here knows how the server is built: bytes go in, and what comes back must be answers
that a client could be at fault for.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import re
import socket
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

ANSWER_LIMIT_S = 30.0
"""For requests that are complete; generous, because machines are shared."""
QUIET_S = 0.25
"""Silence after which a client gives up that has sent something incomplete."""
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")

SEEDS: list[dict[str, object]] = [
    {"prompt": "hi", "max_tokens": 3, "temperature": 0.5, "stop": ["a", "bc"], "n": 2},
    {"prompt": [[1, 2], [3]], "max_tokens": 1, "echo": True, "logprobs": 3, "stream": True},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 4, "stream": True,
     "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2},
    {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "max_completion_tokens": 2},
    {"prompt": "x", "logit_bias": {"65": 1}, "seed": 3, "min_tokens": 1, "stop_token_ids": [5], "max_tokens": 2},
    {"prompt": "x", "max_tokens": 2, "presence_penalty": 1, "frequency_penalty": -1, "top_k": 5, "min_p": 0.1},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], "max_output_tokens": 3,
     "instructions": "x", "tools": [{"type": "function", "name": "f", "parameters": {}}], "stream": True},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "system": "x", "max_tokens": 3,
     "tools": [{"name": "f", "input_schema": {}}], "thinking": {"type": "adaptive"}, "stream": True},
    {"tokens": [1, 2, 3], "prompt": "tokenize me", "add_special_tokens": False},
]  # fmt: skip
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
PATHS = (*GENERATING, *GENERATING, "/v1/messages/count_tokens", "/v1/responses/x", "/tokenize",
         "/detokenize", "/v1/models/x", "/v1/nothing", "/load?x=%zz", "/%00")
FIELDS = ("top_p", "user", "priority", "metadata", "messages", "prompt", "best_of", "model", "tools", "cache_salt",
          "service_tier", "n", "logit_bias", "stop", "stop_token_ids", "seed", "max_tokens", "stream_options", "echo",
          "return_token_ids", "ignore_eos", "input", "system", "text", "reasoning", "thinking", "tool_choice",
          "previous_response_id", "unk\u202enown")  # fmt: skip
NOTHING: list[object] = [None, True, "", [], {}]
NUMBERS: list[object] = [0, -1, 2**31, 2**63, -(2**63), 2**64, 10**400, 1e308, -1e-320, 0.5, float("nan"),
                         float("inf"), float("-inf")]  # fmt: skip
TEXTS: list[object] = ["x", "\x00", "\x1b[2J\r\n", "\ud800", "😀" * 9, "\u202e", "x" * 2000, "9" * 400, "{{ 7*7 }}"]
SHAPES: list[object] = [[[]], [None], {"a": {}}, ["x"] * 50, [1] * 150, [[1, "x"]], [-1], [2**31], {"65": 1e9},
                        {"x" * 300: 1}, {"type": "image_url"}, [{"role": "user"}],
                        [{"role": 5, "content": {}}]]  # fmt: skip
TOKENS = (b"\xff", b"\x00", b"\xed\xa0\x80", b"\\ud800", b"NaN", b"1e999", b"{", b"[" * 5000, b'{"a":' * 2000, b'"',
          b"\r\n\r\n", b"\x1b]0;x\x07")  # fmt: skip
BODIES = (b"", b"null", b"[]", b'"text"', b"1", b"{", b"\xff\xfe", b"--x\r\ncontent-disposition: form-data\r\n\r\n",
          b"prompt=x&max_tokens=1", b"[" * 100_000, b'{"prompt": "x", "prompt": "y"}', b"\x00" * 100,
          b"{}")  # fmt: skip
HEADERS = (b"x-a: " + b"a" * 20_000, b"x-a: \xff\xfe", b"x-request-id: \x01", b"x-request-id: " + b"r" * 500,
           b"expect: 100-continue", b"upgrade: h2c\r\nconnection: upgrade", b"content-type: text/plain",
           b"content-length: 3", b"transfer-encoding: gzip, chunked", b"transfer-encoding: chunked", b"x-b: c\r\n" * 50,
           b"x-b: c\r\n" * 3000, b"authorization: Bearer \xf0\x9f\x98\x80", b"authorization: \x7f", b"x\x00y: z",
           b" folded", b"cookie: " + b"c=d; " * 900, b"content-encoding: gzip", b"host: y",
           b"connection: keep-alive, x")  # fmt: skip
FULL = "529"
"""Anthropic's 429 of a full queue."""
_DEEP = "deep"
_QUOTED_DEEP = b'"deep"'
"""Put in afterwards: Python's own encoder goes no deeper than a thousand levels."""
METHODS = (b"GET", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"PRI", b"DELETE", b"TRACE", b"get", b"M-SEARCH")
LENGTHS = (b"-1", b"+5", b"ten", b"9" * 30, b"0x10", b"1_0", b"", b"5, 5", b"1073741824", b"18446744073709551616")
GARBAGE = (b"\x00", b"\x16\x03\x01\x02\x00\x01\x00\xff\xff", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\r\n" * 40,
           b"\x1b[31mred\x1b[0m\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET http://[: HTTP/1.1\r\n\r\n",
           b"GET / HTTP/1.1\nhost: x\n\n", b"G" * 5000)  # fmt: skip


CODINGS = (b"gzip", b"gzip", b"deflate", b"deflate, gzip", b"zstd", b"br", b"identity", b"gzip, gzip, gzip", b"\xff")
BOMB = gzip.compress(b"\x00" * 5_000_000)


@dataclass(frozen=True)
class Case:
    """One connection."""

    kind: str
    parts: tuple[bytes, ...]
    """Sent one after the other, a moment in between."""
    ending: str
    """answer: read until the server closes; give-up: until it closes or is silent; half: stop sending, then read; cut,
    reset: leave without reading; unread: read nothing for a while, then leave."""


@dataclass
class Verdicts:
    """What all cases came to."""

    statuses: dict[str, dict[str, int]] = field(default_factory=dict)
    """By kind: answers by status; ``none`` counts connections without any."""
    findings: list[str] = field(default_factory=list)

    def note(self, index: int, case: Case, answer: bytes, allowed: Sequence[str]) -> None:
        """Judge what came back."""
        statuses = [status.decode() for status in STATUS.findall(answer)] or ["none"]
        counts = self.statuses.setdefault(case.kind, {})
        for status in statuses:
            counts[status] = counts.get(status, 0) + 1
            if status.startswith("5") and status not in (*allowed, FULL):
                self._find(index, case, f"status {status}", answer)
        if answer and not answer.startswith(b"HTTP/1.1 "):
            self._find(index, case, "bytes that are no answer", answer)
        if b"Traceback" in answer:
            self._find(index, case, "a traceback", answer)
        if b'"type":"server_error"' in answer and not {"500", "503"} & set(statuses):
            self._find(index, case, "an internal error in a stream", answer)

    def silent(self, index: int, case: Case) -> None:
        """A complete request without an end to its answer."""
        self._find(index, case, f"no end within {ANSWER_LIMIT_S:g} s", b"")

    def _find(self, index: int, case: Case, what: str, answer: bytes) -> None:
        sent = b"".join(case.parts)[:600]
        self.findings.append(f"case {index} ({case.kind}, {case.ending}): {what}: sent {sent!r}, got {answer[:300]!r}")


# --- drawing


def draw_case(seed: int, index: int) -> Case:
    """The same for the same numbers, whatever was drawn before."""
    draw = random.Random(f"{seed}/{index}")
    kinds = list(_KINDS)
    kind = draw.choices(kinds, [weight for weight, _ in _KINDS.values()])[0]
    return _KINDS[kind][1](draw)


def _document(draw: random.Random) -> bytes:
    document = json.loads(json.dumps(draw.choice(SEEDS)))
    for _ in range(draw.randint(0, 3)):
        key = draw.choice([*document, *FIELDS])
        if draw.random() < 0.15:
            document.pop(key, None)
            continue
        document[key] = _DEEP if draw.random() < 0.1 else draw.choice(draw.choice([NOTHING, NUMBERS, TEXTS, SHAPES]))
    data = json.dumps(document, ensure_ascii=draw.random() < 0.7).encode("utf-8", "surrogatepass")
    levels = draw.choices([(b"[", b"]"), (b'{"a":', b"}")], k=draw.choice([3, 200, 2000, 60_000]))
    deep = b"".join(opening for opening, _ in levels) + b"0" + b"".join(closing for _, closing in reversed(levels))
    return data.replace(_QUOTED_DEEP, deep)


def _mutated(draw: random.Random, data: bytes) -> bytes:
    """Cut, insert, replace."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(3):
            case 0:
                changed[at:at] = draw.choice(TOKENS)
            case 1:
                del changed[at : at + draw.randint(1, 20)]
            case _:
                changed[at : at + 1] = bytes([draw.randrange(256)])
    return bytes(changed)


def _request(draw: random.Random, body: bytes, *extra: bytes, close: bool, method: bytes = b"POST") -> bytes:
    headers = [b"host: x", b"content-length: %d" % len(body), *extra, *([b"connection: close"] if close else [])]
    return method + b" " + draw.choice(PATHS).encode() + b" HTTP/1.1\r\n" + b"\r\n".join(headers) + b"\r\n\r\n" + body


def _fields(draw: random.Random) -> Case:
    return Case("fields", (_request(draw, _document(draw), close=True),), "answer")


def _body(draw: random.Random) -> Case:
    body = draw.choice(BODIES) if draw.random() < 0.5 else _mutated(draw, _document(draw))
    return Case("body", (_request(draw, body, close=True),), "answer")


def _framing(draw: random.Random) -> Case:
    body = _document(draw)
    match draw.randrange(6):
        case 0:  # a length that lies
            length = draw.choice([b"%d" % (len(body) + draw.choice([-5, -1, 1, 50, 10**9])), *LENGTHS])
            data = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: " + length + b"\r\n\r\n" + body
        case 1:
            data = _chunked(draw, body)
        case 2:
            data = _request(draw, body, *draw.sample(HEADERS, draw.randint(1, 3)), close=True)
        case 3:
            data = _request(draw, draw.choice([b"", body]), close=True, method=draw.choice(METHODS))
        case 4:
            data = draw.choice(GARBAGE)
        case _:
            data = _mutated(draw, _request(draw, body, close=True))
    return Case("framing", (data,), "give-up")


def _chunked(draw: random.Random, body: bytes) -> bytes:
    right, wrong = b"%x" % len(body), b"%x" % (len(body) + 7)
    size = draw.choice([right, right, wrong, b"-1", b"0x5", b"f" * 20, b"", b"\x00"])
    extension = draw.choice([b"", b"", b";a=b", b";" + b"a" * 20_000, b";\x00"])
    end = draw.choice([b"0\r\n", b"0\r\n", b"00\n", b"0;x\r\n", b""])
    trailers = draw.choice([b"", b"", b"x-t: 1\r\n", b"x-t: " + b"t" * 300 + b"\r\n", b"x-t: t\r\n" * 4000, b"x-t: "])
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    return b"%s%s%s\r\n%s\r\n%s%s\r\n" % (head, size, extension, body, end, trailers)


def _pipeline(draw: random.Random) -> Case:
    parts = [_one_of_many(draw) for _ in range(draw.choice([2, 3, 5, 20, 60]))]
    ending = draw.choice(["give-up", "give-up", "half", "reset"])
    return Case("pipeline", (b"".join(parts),), ending)


def _coded(draw: random.Random) -> Case:
    """Bodies in codings, sound, mutated or huge inside, in both versions of HTTP and with slashes to spare; some behind
    heads that ask for another protocol."""
    body = _document(draw)
    data = draw.choice([body, gzip.compress(body), zlib.compress(body), gzip.compress(zlib.compress(body)), BOMB])
    if draw.random() < 0.3:
        data = _mutated(draw, data)
    slashes, version = draw.choice([b"%s", b"/%s", b"%s/", b"/%s//"]), draw.choice([b"1.0", b"1.1"])
    lines = [
        b"POST %s HTTP/%s" % (slashes % draw.choice(PATHS).encode(), version), b"host: x",
        draw.choice([b"connection: close", b"connection: close, upgrade\r\nupgrade: h2c"]),
        b"content-length: %d" % len(data), b"content-encoding: " + draw.choice(CODINGS), b"origin: https://x",
    ]  # fmt: skip
    return Case("coded", (b"\r\n".join(lines) + b"\r\n\r\n" + data,), "answer")


def _one_of_many(draw: random.Random) -> bytes:
    chance = draw.random()
    if chance < 0.55:
        return b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % draw.choice([b"/", b"/health", b"/metrics", b"/v1/models"])
    if chance < 0.95:
        return _request(draw, _document(draw), close=False)
    return draw.choice(GARBAGE) if chance < 0.98 else _request(draw, _document(draw), close=True)


def _half_closed(draw: random.Random) -> Case:
    data = _request(draw, _document(draw), close=draw.random() < 0.5)
    return Case("half-close", (data[: draw.choice([len(data), len(data), draw.randrange(len(data))])],), "half")


def _left(draw: random.Random) -> Case:
    data = _request(draw, _document(draw), close=False)
    return Case("left", (data[: draw.choice([len(data), draw.randrange(len(data))])],), draw.choice(["cut", "reset"]))


def _slow(draw: random.Random) -> Case:
    data = _request(draw, _document(draw), close=True)
    cuts = sorted(draw.randrange(len(data)) for _ in range(draw.randint(1, 12)))
    return Case("slow", tuple(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)), "answer")


def _unread(draw: random.Random) -> Case:
    fields = {"prompt": "x", "max_tokens": 60, "n": 4, "logprobs": 5, "stream": draw.random() < 0.7, "ignore_eos": True}
    data = _request(draw, json.dumps(fields).encode(), close=draw.random() < 0.5)
    return Case("unread", (data * draw.choice([1, 1, 5]),), "unread")


_KINDS: dict[str, tuple[int, Callable[[random.Random], Case]]] = {
    "fields": (32, _fields), "coded": (6, _coded), "body": (12, _body), "framing": (20, _framing),
    "pipeline": (8, _pipeline), "half-close": (8, _half_closed), "left": (8, _left), "slow": (4, _slow),
    "unread": (2, _unread),
}  # fmt: skip


# --- playing


async def play(port: int, case: Case) -> bytes:
    """One connection; what came back. Raises TimeoutError where a complete request gets no end."""
    sock = socket.socket()
    sock.setblocking(False)
    if case.ending == "unread":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    if case.ending == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    except BaseException:
        sock.close()
        raise
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    answer = bytearray()
    try:
        for at, part in enumerate(case.parts):
            if at:
                await asyncio.sleep(0.01)
            writer.write(part)
        await _end(case, reader, writer, answer)
    except TimeoutError:
        raise
    except OSError:  # reset; or closed already when its end is sent, which is no ConnectionError
        pass
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return bytes(answer)


async def _end(case: Case, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytearray) -> None:
    match case.ending:
        case "answer":
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await _read(reader, answer)
        case "give-up":
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(QUIET_S):
                        if not await _read(reader, answer, 1):
                            return
        case "half":
            writer.write_eof()
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await _read(reader, answer)
        case "unread":
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(QUIET_S)
        case "reset":
            await asyncio.sleep(0.005)
        case "cut":
            writer.close()


async def _read(reader: asyncio.StreamReader, answer: bytearray, num_times: int | None = None) -> bool:
    """Until the server closes, or so many times; whether it is open still."""
    while num_times is None or num_times > 0:
        data = await reader.read(1 << 16)
        if not data:
            return False
        if len(answer) < 1 << 20:
            answer += data
        num_times = None if num_times is None else num_times - 1
    return True


async def play_all(
    port: int, seed: int, indices: Sequence[int], verdicts: Verdicts, *, width: int = 24, allowed: Sequence[str] = ()
) -> None:
    """``width`` connections at a time. ``allowed``: statuses from 500 up that are no finding."""
    waiting = iter(indices)

    async def client() -> None:
        for index in waiting:
            case = draw_case(seed, index)
            try:
                verdicts.note(index, case, await play(port, case), allowed)
            except TimeoutError:
                verdicts.silent(index, case)
            except ConnectionError:
                if not allowed:  # else the server is ending
                    verdicts.findings.append(f"case {index}: the server takes no connection")

    await asyncio.gather(*(client() for _ in range(width)))
