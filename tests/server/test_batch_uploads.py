"""Uploads byte by byte: what a form may be, whatever pieces it comes in."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from jettison.server.batches.uploads import PIECE_BYTES, Upload
from jettison.server.errors import ApiError

BOUNDARY = b"b0undary"
TYPE = b"multipart/form-data; boundary=" + BOUNDARY


def part(name: bytes, content: bytes, filename: bytes | None = None) -> bytes:
    tail = b"" if filename is None else b'; filename="%s"' % filename
    return b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % (BOUNDARY, name, tail, content)


END = b"--" + BOUNDARY + b"--\r\n"


def receiver(body: bytes, cuts=()):
    ends = sorted({*(cut % (len(body) + 1) for cut in cuts), len(body)})
    pieces = [body[a:b] for a, b in zip([0, *ends], ends)]

    async def receive():
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    return receive


async def receive(tmp_path, body, cuts=(), content_type=TYPE, max_bytes=1 << 20):
    path = tmp_path / "incoming"
    path.unlink(missing_ok=True)
    upload = Upload(content_type, path, max_bytes, 5.0)
    await upload.receive(receiver(body, cuts))
    return upload, path.read_bytes()


@given(content=st.binary(max_size=300), cuts=st.lists(st.integers(0, 800), max_size=12))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_the_file_arrives_as_it_was_whatever_the_pieces(tmp_path, content, cuts):
    body = part(b"purpose", b"batch") + part(b"file", content, b"a/b\\in.jsonl") + part(b"more", b"x") + END
    upload, written = await receive(tmp_path, body, cuts)
    assert written == content
    assert (upload.num_bytes, upload.filename) == (len(content), "in.jsonl")
    assert upload.fields == {"purpose": "batch", "more": "x"}


async def test_a_large_file_is_written_in_pieces(tmp_path):
    content = bytes(range(256)) * (PIECE_BYTES // 64)
    body = part(b"file", content, b"in.jsonl") + END
    _, written = await receive(tmp_path, body, range(0, len(body), 50_000))
    assert written == content


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (END, 400), (b"nonsense", 400), (part(b"purpose", b"batch") + END, 400),
        (part(b"file", b"x", b"f"), 400), (part(b"file", b"x", b"f") + part(b"file", b"x", b"f") + END, 400),
        (part(b"file", b"x" * 101, b"f") + END, 413), (part(b"purpose", b"x" * 5000) + END, 400),
        (part(b"p", b"") * 20 + END, 400), (part(b"x" * 5000, b"") + END, 400),
    ],
)
async def test_a_form_that_is_refused_leaves_nothing(tmp_path, body, status):
    with pytest.raises(ApiError) as caught:
        await receive(tmp_path, body, max_bytes=100)
    assert caught.value.status == status
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content_type", [b"", b"application/json", b"multipart/form-data", b"multipart/mixed; boundary=x"])
async def test_what_is_no_form(tmp_path, content_type):
    with pytest.raises(ApiError) as caught:
        await receive(tmp_path, b"{}", content_type=content_type)
    assert caught.value.status == 415


async def test_a_client_that_leaves_leaves_nothing(tmp_path):
    async def receive():
        return {"type": "http.disconnect"}

    with pytest.raises(ApiError, match="went away"):
        await Upload(TYPE, tmp_path / "incoming", 100, 5.0).receive(receive)
    assert list(tmp_path.iterdir()) == []


async def test_a_client_that_dawdles_is_cut_off(tmp_path):
    with pytest.raises(ApiError, match="too slowly"):
        await Upload(TYPE, tmp_path / "incoming", 100, 0.01).receive(asyncio.Event().wait)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("encoding", "is_taken"), [(b"binary", True), (b"8BIT", True), (b"base64", False)])
async def test_a_part_is_taken_as_it_is_or_not_at_all(tmp_path, encoding, is_taken):
    head = b'--%s\r\nContent-Disposition: form-data; name="file"; filename="x"\r\nContent-Transfer-Encoding: %s\r\n\r\n'
    body = head % (BOUNDARY, encoding) + b"e30=\r\n" + END
    if is_taken:
        assert (await receive(tmp_path, body))[1] == b"e30="
    else:
        with pytest.raises(ApiError, match="content-transfer-encoding 'base64' is not taken"):
            await receive(tmp_path, body)
