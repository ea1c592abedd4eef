"""Content codings of request bodies, as pure functions: whatever comes in, bounded pieces come out."""

from __future__ import annotations

import contextlib
import gzip
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.server.codings import PIECE_BYTES, TAKEN, BrokenCodingError, decoder_of, named_coding, zstd

TEXT = b'{"prompt": "' + bytes(random.Random(0).choices(b"abcdefgh ", k=3 * PIECE_BYTES)) + b'"}'


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


ENCODE = {"gzip": gzip.compress, "deflate": zlib.compress, "bare deflate": raw_deflate, "x-gzip": gzip.compress}
if zstd is not None:
    ENCODE["zstd"] = zstd.compress


def decode(encoding: str, *parts: bytes) -> tuple[bytes, bool]:
    decoder = decoder_of(named_coding(encoding.removeprefix("bare ")))
    pieces = [piece for part in parts for piece in decoder.feed(part)]
    assert all(0 < len(piece) <= PIECE_BYTES for piece in pieces)
    return b"".join(pieces), decoder.is_complete


@pytest.mark.parametrize("encoding", ENCODE)
def test_what_was_encoded_comes_out_however_it_is_cut(encoding):
    data = ENCODE[encoding](TEXT)
    for size in (1, 7, 1000, len(data)):
        text, is_complete = decode(encoding, *(data[at : at + size] for at in range(0, len(data), size)))
        assert (text, is_complete) == (TEXT, True)
    assert decode(encoding, data[:-1])[1] is False
    assert decode(encoding) == (b"", True), "nothing at all is an empty body"


@pytest.mark.parametrize("encoding", ENCODE)
def test_members_behind_each_other_are_one_body(encoding):
    data = ENCODE[encoding](b"one ") + ENCODE[encoding](b"two")
    assert decode(encoding, data) == (b"one two", True)
    assert decode(encoding, *(data[at : at + 1] for at in range(len(data)))) == (b"one two", True)


@pytest.mark.parametrize("encoding", ENCODE)
def test_what_is_none_is_told(encoding):
    data = ENCODE[encoding](TEXT)
    for broken in (b'{"prompt": "plain"}', data + b"garbage behind it", b"\xff" * 50):
        with pytest.raises(BrokenCodingError):
            decode(encoding, broken)
    middle = len(data) // 2
    flipped = data[:middle] + bytes(byte ^ 0xFF for byte in data[middle : middle + 40]) + data[middle + 40 :]
    with contextlib.suppress(BrokenCodingError):
        assert decode(encoding, flipped)[0] != TEXT, "bare deflate and zstd have no checksum here"


@pytest.mark.parametrize("encoding", ENCODE)
def test_members_that_cost_more_than_they_hold_are_not_taken(encoding):
    with pytest.raises(BrokenCodingError, match="too many members"):
        decode(encoding, ENCODE[encoding](b"") * 1000)


@given(st.sampled_from(sorted(ENCODE)), st.binary(max_size=200))
def test_no_bytes_do_harm(encoding, data):
    with contextlib.suppress(BrokenCodingError):
        decode(encoding, data)


def test_names_are_those_of_the_standard():
    names = {
        "gzip": "gzip", "GZIP": "gzip", " x-gzip ": "gzip", "identity": "", "": "", "gzip, identity": "gzip",
        " , deflate": "deflate",
    }  # fmt: skip
    assert {name: named_coding(name) for name in names} == names
    for name in ("br", "aws-chunked", "gzip, br", "gzip;q=1", "gzip, gzip", "deflate ,gzip", "utf-8"):
        assert named_coding(name) not in TAKEN
    assert TAKEN[:2] == ("gzip", "deflate")
