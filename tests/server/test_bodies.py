"""Coded bodies over HTTP: the same answer as to the plain one, and limits that count what comes out."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import pytest
from fake_engine import FakeEngine
from served import eventually

from jettison.server.batches.settings import BatchSettings
from jettison.server.codings import TAKEN, zstd

BODY = json.dumps({"model": "fake", "prompt": "hi", "max_tokens": 3, "seed": 1}).encode()
WAYS = {
    "gzip": gzip.compress(BODY), "deflate": zlib.compress(BODY), "x-gzip": gzip.compress(BODY), "identity": BODY,
    "identity, gzip": gzip.compress(BODY), "": BODY,
}  # fmt: skip
if zstd is not None:
    WAYS["zstd"] = zstd.compress(BODY)


JSON = ("content-type", "application/json")


def headers(encoding: str) -> dict[str, str]:
    return dict([JSON, ("content-encoding", encoding)])


async def post(served, encoding, content, path="/v1/completions"):
    return await served.http.post(f"{served.url}{path}", content=content, headers=headers(encoding))


async def in_parts(data, size):
    for at in range(0, len(data), size):
        yield data[at : at + size]
        await asyncio.sleep(0)


async def test_a_coded_body_is_the_same_request(serve):
    async with serve(FakeEngine()) as served:
        plain = (await post(served, "identity", BODY)).json()["choices"]
        for encoding, data in WAYS.items():
            for content in (data, in_parts(data, 7)):  # with a length, and in chunks
                answer = await post(served, encoding, content)
                assert (answer.status_code, answer.json().get("choices")) == (200, plain), (encoding, answer.text)
        tokens = await post(served, "gzip", gzip.compress(b'{"prompt": "ab"}'), "/tokenize")
        assert tokens.json()["count"] == 2
        two_lines = [("content-encoding", "identity"), ("content-encoding", "gzip")]
        answer = await served.http.post(
            f"{served.url}/v1/completions", content=WAYS["gzip"], headers=[*two_lines, JSON])
        assert answer.status_code == 200
        assert served.state.admission.num_active == served.state.admission._num_buffered_bytes == 0


async def test_a_stream_is_begun_by_a_coded_body(serve):
    async with serve(FakeEngine()) as served:
        body = json.dumps(json.loads(BODY) | {"stream": True}).encode()
        answer = await post(served, "gzip", gzip.compress(body))
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.text.count("data: ") == 4


async def test_what_is_not_taken_is_told_with_what_is(serve):
    async with serve(FakeEngine(), batches=None) as served:
        for encoding in ("br", "compress", "gzip, br", "deflate, gzip", "gzip, gzip, gzip", "aes128gcm", "*"):
            answer = await post(served, encoding, b"\x00" * 40)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (415, "unsupported_content_encoding"), encoding
            assert answer.headers["accept-encoding"] == ", ".join(TAKEN)
            assert repr(encoding) in error["message"] and "gzip" in error["message"]
        for path, status in (("/v1/nowhere", 404), ("/v1/models", 405)):  # there no handler asks for the body
            assert (await post(served, "br", b"x", path)).status_code == status
        assert (await post(served, "br", BODY)).status_code == 415
        assert (await post(served, "identity", BODY)).status_code == 200, "the connection is as good as before"


async def test_a_broken_body_is_told(serve):
    async with serve(FakeEngine()) as served:
        whole = gzip.compress(BODY)
        for encoding, data, what in (
            ("gzip", BODY, "is broken"), ("gzip", whole + b"xyz", "is broken"),
            ("gzip", whole[:-5], "ends in the middle"),
            ("deflate", b"\xff\xff\xff", "is broken"), ("gzip", whole[:-8] + b"\0" * 8, "is broken"),
            ("deflate", whole, "is broken"), ("deflate", b"x", "ends in the middle"),
        ):  # fmt: skip
            for content in (data, in_parts(data, 3)):
                answer = await post(served, encoding, content)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, "invalid_content_encoding"), (encoding, answer.text)
                assert what in error["message"]
        empty = await post(served, "gzip", b"")
        assert (empty.status_code, empty.json()["error"]["code"]) == (400, "invalid_json")
        await eventually(lambda: served.state.admission.num_active == 0)


async def test_what_grows_beyond_the_limit_is_refused(serve):
    async with serve(FakeEngine(), max_body_bytes=100_000, max_side_body_bytes=2000) as served:
        large = b'{"prompt": "' + b"x" * 200_000
        nothing_comes_out = b"\x78\x01" + b"\x00\x00\x00\xff\xff" * 60_000
        for encoding, data in (
            ("gzip", gzip.compress(b"\0" * 50_000_000)), ("gzip", gzip.compress(large)),
            ("deflate", zlib.compress(large)), ("deflate", nothing_comes_out), ("identity", large),
            *([("zstd", zstd.compress(b"\0" * 50_000_000))] if zstd else []),
        ):  # fmt: skip
            for content in (data, in_parts(data, 20_000)):
                answer = await post(served, encoding, content)
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large"), encoding
        small = gzip.compress(b'{"prompt": "' + b"x" * 5000)
        assert (await post(served, "gzip", small, "/tokenize")).status_code == 413
        await eventually(lambda: served.state.admission._num_buffered_bytes == 0)
        assert (await post(served, "gzip", WAYS["gzip"])).status_code == 200


async def test_a_key_is_asked_for_before_anything_is_decoded(serve):
    async with serve(FakeEngine(), api_keys=("secret",)) as served:
        for encoding in ("gzip", "br"):
            assert (await post(served, encoding, b"\xff" * 100)).status_code == 401


@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_uploads_are_decoded_too(serve, tmp_path, tokenizer_dir, encoding):
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "fake"}}\n'
    form = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n' + line + b"\r\n--b--\r\n"
    )
    own = {"content-type": "multipart/form-data; boundary=b", "content-encoding": encoding}
    batches = BatchSettings(folder=tmp_path / "batches", tokenizer_dir=tokenizer_dir, window=4)
    async with serve(FakeEngine(), batches=batches) as served:
        answer = await served.http.post(f"{served.url}/v1/files", content=gzip.compress(form), headers=own)
        if encoding == "br":
            assert answer.status_code == 415
            assert (await served.http.get(f"{served.url}/v1/files")).json()["data"] == []
            return
        file = answer.json()
        assert (answer.status_code, file["bytes"], file["filename"]) == (200, len(line), "x.jsonl")
        assert (await served.http.get(f"{served.url}/v1/files/{file['id']}/content/")).content == line
        bomb = gzip.compress(form[:-10] + b" " * 30_000_000)
        answer = await served.http.post(f"{served.url}/v1/files", content=bomb, headers=own)
        assert answer.status_code == 413
