"""Files of requests that are no plain lines of JSON: taken where they say what they are, else named by their cause."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from pathlib import Path

import pytest
from batches_util import line
from fake_engine import FakeEngine
from test_batch_lines import check
from test_batches_sdk import begin, until

from jettison.errors import UserError
from jettison.server.batches.alone import _copy_lines, _endpoint_of, input_kind
from jettison.server.batches.inputs import lines_of, whole_cause
from jettison.server.batches.settings import BatchSettings
from jettison.server.batches.values import json_values

REQUESTS = [line(name, prompt='é, \u2028 [ { \\" ]},\n') for name in "abc"]
LINES = "\n".join(json.dumps(each, ensure_ascii=False) for each in REQUESTS)
ASCII = "\n".join(map(json.dumps, REQUESTS)).encode() + b"\n"
PRETTY = "\n".join(json.dumps(each, indent=2, ensure_ascii=False) for each in REQUESTS)
ARRAY = json.dumps(REQUESTS).encode()

TAKEN = {
    "plain": (ASCII, None),
    "BOM": (b"\xef\xbb\xbf" + ASCII, None),
    "BOM of each of two files": (b"\xef\xbb\xbf" + ASCII.replace(b"\n", b"\n\xef\xbb\xbf", 1), None),
    "CRLF": (ASCII.replace(b"\n", b"\r\n"), None),
    "NUL tail": (ASCII + b"\0" * 500, None),
    "UTF-16 with BOM": (LINES.encode("utf-16"), "UTF-16, read as that"),
    "UTF-16LE": (LINES.encode("utf-16-le"), "UTF-16-LE"),
    "UTF-16BE": (LINES.encode("utf-16-be"), "UTF-16-BE"),
    "UTF-32": (LINES.encode("utf-32"), "UTF-32"),
    "gzip": (gzip.compress(ASCII), "gzip, unpacked"),
    "bzip2": (bz2.compress(ASCII), "bzip2, unpacked"),
    "xz": (lzma.compress(ASCII), "xz, unpacked"),
    "gzip of UTF-16 of pretty": (gzip.compress(PRETTY.encode("utf-16")), "gzip, unpacked; UTF-16, read as that; JSON"),
    "pretty": (PRETTY.encode(), "JSON objects that are no lines"),
    "pretty with commas": (PRETTY.replace("\n}", "\n},").encode(), "JSON objects that are no lines"),
    "lines with commas": (ASCII.replace(b"\n", b",\n"), "JSON objects that are no lines"),
    "array": (ARRAY, "a JSON array"),
    "array with BOM": (b"\xef\xbb\xbf" + ARRAY, "a JSON array"),
    "pretty array": (json.dumps(REQUESTS, indent=1).encode(), "a JSON array"),
    "array, one a line": (b"[\n" + b",\n".join(map(str.encode, map(json.dumps, REQUESTS))) + b"\n]\n", "a JSON array"),
    "array, comma behind the last": (ARRAY[:-1] + b",\n]", "a JSON array"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_says_what_it_is_is_taken(tmp_path: Path, name: str) -> None:
    content, note = TAKEN[name]
    path, copy = tmp_path / "in", tmp_path / "copy"
    path.write_bytes(content)
    kind = input_kind(path)
    assert (kind.note is None) if note is None else (kind.note or "").startswith(note)
    assert _endpoint_of(path, kind) == "/v1/completions"
    _copy_lines(path, kind, copy)
    lines = [each for each in copy.read_bytes().split(b"\n") if each.strip(b"\0\r")]
    assert [json.loads(each.decode("utf-8-sig")) for each in lines] == REQUESTS
    assert kind.is_plain == (note is None) and (not kind.is_plain or copy.read_bytes() == content)


def zipped() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("in.jsonl", ASCII)
    return packed.getvalue()


def tarred() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("in.jsonl")
        member.size = len(ASCII)
        archive.addfile(member, io.BytesIO(ASCII))
    return packed.getvalue()


NAMED = {
    "empty": (b"", "is empty"),
    "blank": (b"\n \r\n", "is empty"),
    "NUL": (b"\0" * 500, "nothing but NUL bytes"),
    "latin-1": ("\n".join(LINES.replace("\u2028", "").split("\n")).encode("latin-1"), "line 1 is not UTF-8 (byte 0xE9"),
    "latin-1 array": ('[{"custom_id": "é"}]'.encode("latin-1"), "not UTF-8 (byte 0xE9): it may be Latin-1"),
    "zip": (zipped(), "is a zip archive: unpack it"),
    "tar": (gzip.compress(tarred()), "is a tar archive: unpack it"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\n", "is a Git LFS pointer"),
    "gzip of text": (gzip.compress(b"Once upon a time"), "line 1 is not JSON: it begins with 'Once upon a time'"),
    "pretty, NaN": (b'{\n "url": NaN\n}', "line 1 is not JSON: it has NaN in it"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\x58", "is a zstd file"),
    "Parquet": (b"PAR1\x15\x04", "is a Parquet file"),
    "gzip, cut off": (gzip.compress(random.Random(1).randbytes(5000))[:-9], "gzip, and damaged"),
    "xz, cut off": (lzma.compress(ASCII)[:-9], "xz, and damaged"),
    "bzip2, damaged": (bz2.compress(ASCII)[:20] + b"\0" * 20, "bzip2, and damaged"),
    "UTF-16, cut off": (LINES.replace("url", "uri").encode("utf-16")[:-1], "cut off, or not all in UTF-16"),
    "CSV": (b"custom_id,prompt,max_tokens\na,hi,3\n", "looks like a table (CSV)"),
    "CSV, semicolons": (b"custom_id;prompt;max_tokens\n", "looks like a table (CSV)"),
    "HTML": (b"\n<!DOCTYPE html><html>", "is HTML or XML"),
    "text": (b"Once upon a time", "line 1 is not JSON: it begins with 'Once upon a time'"),
    "single quotes": (repr(REQUESTS[0]).encode(), "single quotes"),
    "two in a line": (b'{"a": 1}{"b": 2}', "more than one JSON value: another begins at character 8"),
    "cut off": (ASCII[:40], "line 1 does not end"),
    "array, cut off": (ARRAY[:40], "it has no end: the file is cut off"),
    "array, cut off between": (b'[{"url": 1}, ', "the JSON array has no end"),
    "array, broken": (b'[{"url": 1},\n{"url": x}]', "begins in line 2: not JSON: Expecting value"),
    "array, and more": (b'[{"url": 1}] 5', "something follows the JSON array"),
    "array of nothing": (b"[]", "the file has no lines"),
    "numbers": (b"5\n6\n", "line 1 is no JSON object"),
    "fine-tuning": (b'{"messages": []}', "line 1 has no url, but 'messages'"),
    "another endpoint": (json.dumps(line("a", url="/v1/embeddings")).encode(), "line 1 has the url '/v1/embeddings'"),
    "a whole URL": (b'{"url": "https://a.b/v1/completions"}', "are served, written like that"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_what_cannot_be_taken_is_named(tmp_path: Path, name: str) -> None:
    """Each of these was "no line has a url" once."""
    content, told = NAMED[name]
    path = tmp_path / "in"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        _endpoint_of(path, input_kind(path))
    assert told in str(caught.value) and str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_folders_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a folder, where a file of requests is expected"):
        input_kind(tmp_path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        input_kind(tmp_path / "none")


def test_values_are_read_in_pieces_wherever_these_end(tmp_path: Path) -> None:
    """Strings, numbers and escapes are cut anywhere; of any value only its own text is kept."""

    class Drip(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            return super().read(random.Random(self.tell()).randrange(1, 9))

    text = json.dumps([*REQUESTS, {"n": 1234567890.5, "t": "\\\\\\\""}, 12345, "x"], indent=1)
    assert [json.loads(value) for value in json_values(tmp_path, Drip(text), is_array=True)] == json.loads(text)
    values = PRETTY + ",\n12\n, 345"
    read = [json.loads(value) for value in json_values(tmp_path, Drip(values), is_array=False)]
    assert read == [*REQUESTS, 12, 345]


def test_a_broken_value_is_not_waited_for(tmp_path: Path) -> None:
    class Endless(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            return '{"a": oops}' + " " * 200

    with pytest.raises(UserError, match="not JSON: Expecting value"):
        list(json_values(tmp_path, Endless(), is_array=False))


LINES_NAMED = [
    (json.dumps(line("é"), ensure_ascii=False).encode("latin-1"), "The line is not UTF-8 (byte 0xE9 at 15)"),
    (b"\0\0\0", "NUL bytes: the file was cut off"), (json.dumps(line("a")).encode() + b"\0\0", "ends in NUL bytes"),
    (b"\0\0" + json.dumps(line("a")).encode(), "begins with NUL bytes"),
    (b'{"a": 1},', "ends in a comma"), (b'{"a": 1} {"b": 2}', "more than one JSON value"),
    (b"{'a': 1}", "single quotes"),
    (b'{"a":', "does not end"), (b'[{"a": 1}]', "a JSON array: each of its elements must be a line"),
    (b"hello", "begins with 'hello'"), (b'{"a": nope}', "is not valid JSON"),
    (b'{"a": [1, NaN]}', "it has NaN in it"), (b'{"a": -Infinity}\t', "it has -Infinity in it"),
    (b'{"a": "\\ud800"}', "is not valid JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "told"), LINES_NAMED)
async def test_a_line_says_what_is_wrong_with_it_and_the_others_run(tmp_path, tokenizer_dir, raw, told) -> None:
    content = b"\n".join([json.dumps(line("first")).encode(), raw, json.dumps(line("last")).encode()])
    verdict, [error], _ = await check(tmp_path, tokenizer_dir, content)
    assert (verdict.failure, verdict.num_runnable) == (None, 2)
    assert (error.code, error.line) == ("invalid_json_line", 2) and told in error.message


async def test_joined_files_bring_their_marks_along(tmp_path, tokenizer_dir) -> None:
    verdict, errors, _ = await check(tmp_path, tokenizer_dir, ASCII.replace(b"\n", b"\n\xef\xbb\xbf", 2))
    assert verdict.num_runnable == 3 and not errors


@pytest.mark.parametrize("name", ["gzip", "UTF-16 with BOM", "pretty", "array", "lines with commas"])
async def test_a_batch_names_the_cause_of_a_whole_file(tmp_path, tokenizer_dir, name) -> None:
    verdict, _, _ = await check(tmp_path, tokenizer_dir, TAKEN[name][0])
    assert (verdict.failure.code, verdict.failure.line) == ("invalid_file", 1)
    assert "one JSON object a line, in UTF-8." in verdict.failure.message


def test_files_of_lines_have_no_cause_as_a_whole(tmp_path: Path) -> None:
    for content in (ASCII, b'{\n{"a": 1}\n', b"[1]\n[2]\n", LINES.encode("cp1252", "ignore"), b'{"a": ' * 9):
        (tmp_path / "in").write_bytes(content)
        assert whole_cause(tmp_path / "in") is None


async def test_the_api_tells_it_in_the_batchs_errors(serve, tokenizer_dir, tmp_path) -> None:
    settings = BatchSettings(folder=tmp_path / "batches", tokenizer_dir=tokenizer_dir, window=4)
    async with serve(FakeEngine(), batches=settings) as served, served.openai() as client:
        batch = await until(client, await begin(client, gzip.compress(ASCII)))
        [error] = batch.errors.data
        assert batch.status == "failed" and (error.code, error.line) == ("invalid_file", 1)
        assert error.message.startswith("The file is compressed (gzip)")


def test_lines_are_read_without_the_whole(tmp_path: Path) -> None:
    """Of a packed file no more is read than is asked for."""
    path = tmp_path / "in"
    path.write_bytes(gzip.compress(ASCII * 20_000)[:-9])  # its end is damaged
    assert json.loads(next(lines_of(path, input_kind(path)))) == REQUESTS[0]
