"""What may be wrong with a line, and what a batch is told of it."""

from __future__ import annotations

import json

import pytest
from batches_util import jsonl, line

from jettison.server.batches.check import Job, check_file, endpoint_for
from jettison.server.batches.lines import custom_id_in, read_lines
from jettison.server.completions import CompletionEndpoint

MAX_LINE_BYTES = 2000


async def check(tmp_path, tokenizer_dir, content: bytes, endpoint="/v1/completions", **changes):
    """The last verdict, all bad lines and all results."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    job = Job(**({
        "path": str(path), "endpoint": endpoint, "tokenizer_dir": str(tokenizer_dir), "model_names": ("fake", "alias"),
        "max_model_len": 400, "max_request_tokens": 300, "vocab_size": 300, "eos_token_ids": (257,),
        "max_line_bytes": MAX_LINE_BYTES, "max_lines": 500, "default_chat_max_tokens": None,
        "default_completion_max_tokens": 16, "max_choices": 1024, "max_stops": 4, "max_logprobs": 20,
    } | changes))  # fmt: skip
    bad, results, verdict = [], [], None
    async for verdict in check_file(job, endpoint_for(job)):
        bad += verdict.bad_lines
        results += verdict.results
    assert verdict.is_last
    return verdict, bad, results


async def test_what_a_line_breaks_is_told_of_that_line_alone(tmp_path, tokenizer_dir, monkeypatch):
    prepare = CompletionEndpoint.prepare

    async def broken(self, document):
        if document["prompt"] == "deep":
            raise RecursionError
        if document["prompt"] == "odd":
            raise ZeroDivisionError
        return await prepare(self, document)

    monkeypatch.setattr(CompletionEndpoint, "prepare", broken)
    content = jsonl(line("a"), line("b", prompt="deep"), line("c", prompt="odd"), line("d"))
    verdict, bad, results = await check(tmp_path, tokenizer_dir, content)
    assert (verdict.num_runnable, [error.line for error in bad]) == (2, [2, 3])
    assert [error.code for error in bad] == ["invalid_json", "internal_error"] and len(results) == 2


LONG_ID = "x" * 513
BAD_LINES = [
    (b"{", "invalid_json_line", None, None),
    (b"[1]", "invalid_json_line", None, None),
    (b"null", "invalid_json_line", None, None),
    (b"\xff\xfe", "invalid_json_line", None, None),
    (b"[" * 1500, "invalid_json_line", None, None),
    (b'"' + b"x" * MAX_LINE_BYTES + b'"', "line_too_large", None, None),
    ({"method": "POST"}, "missing_required_parameter", "custom_id", None),
    (line("") | {"custom_id": 5}, "invalid_custom_id", "custom_id", None),
    (line(""), "invalid_custom_id", "custom_id", None),
    (line(LONG_ID), "invalid_custom_id", "custom_id", None),
    (line("a") | {"method": "GET"}, "invalid_method", "method", "a"),
    (line("a") | {"method": None}, "invalid_method", "method", "a"),
    (line("a", url="/v1/chat/completions"), "invalid_url", "url", "a"),
    (line("a", url="/v1/embeddings"), "invalid_url", "url", "a"),
    (line("a", url="http://10.0.0.1/v1/completions"), "invalid_url", "url", "a"),
    (line("a") | {"body": None}, "invalid_body", "body", "a"),
    (line("a") | {"body": "x"}, "invalid_body", "body", "a"),
    (line("a", model=None), "missing_required_parameter", "body.model", "a"),
    (line("a", model="gpt-9"), "model_not_found", "model", "a"),
    (line("a", stream=True), "unsupported_parameter", "body.stream", "a"),
    (line("a", temperature=9), "invalid_value", "temperature", "a"),
    (line("a", n="two"), "invalid_type", "n", "a"),
    (line("a", tools=[{"type": "function"}]), "unsupported_parameter", "tools", "a"),
    (line("a", response_format={"type": "json_schema"}), "invalid_value", "response_format.json_schema", "a"),
    (line("a", guided_regex="(a"), "invalid_grammar", "guided_regex", "a"),
    (line("a", prompt=None), "missing_required_parameter", "prompt", "a"),
    (line("a", prompt=""), "invalid_value", "prompt", "a"),
    (line("a", prompt=[300]), "invalid_value", "prompt", "a"),
    (line("a", prompt="x" * 299), "context_length_exceeded", "max_tokens", "a"),
    (line("a", max_tokens=500), "context_length_exceeded", "max_tokens", "a"),
]


@pytest.mark.parametrize(("bad", "code", "param", "custom_id"), BAD_LINES)
async def test_a_bad_line_is_told_and_the_others_run(tmp_path, tokenizer_dir, bad, code, param, custom_id):
    content = jsonl(line("first"), bad, line("last"))
    verdict, errors, results = await check(tmp_path, tokenizer_dir, content)
    assert verdict.failure is None
    assert (verdict.num_lines, verdict.num_runnable) == (3, 2)
    (error,) = errors
    assert (error.code, error.param, error.line) == (code, param, 2)
    (result,) = results
    assert (result.line, result.is_error) == (2, True)
    told = json.loads(result.body)
    assert (told["custom_id"], told["error"]["code"], told["error"]["line"]) == (custom_id, code, 2)
    assert told["error"]["message"]
    if told["response"] is not None:
        assert 400 <= told["response"]["status_code"] < 500
        assert told["response"]["body"]["error"]["code"] == code


async def test_what_runs_is_counted(tmp_path, tokenizer_dir):
    content = jsonl(line("a", prompt="four", max_tokens=5), b"  ", line("b", prompt=["x", "y"], n=2, max_tokens=3))
    verdict, errors, _ = await check(tmp_path, tokenizer_dir, b"\xef\xbb\xbf" + content.rstrip())
    assert not errors
    assert (verdict.num_lines, verdict.num_runnable) == (2, 2)
    assert (verdict.num_prompt_tokens, verdict.max_output_tokens) == (6, 17)


async def test_fields_of_a_line_are_taken_as_those_of_a_request(tmp_path, tokenizer_dir):
    """Numbers as clients write them, neutral values, what vLLM's requests may say; and the server's own limits."""
    good = [
        {"max_tokens": 4.0, "n": "1", "stream": "false", "metadata": {"a": 1}}, {"tools": [], "store": False},
        {"bad_words": ["x"], "allowed_token_ids": [97], "prompt_logprobs": 1}, {"best_of": 2, "n": 2},
        {"prompt": "x" * 500, "truncate_prompt_tokens": -1}, {"stop": list("123456")}, {"logprobs": 25},
    ]  # fmt: skip
    bad = [({"grammar": "x"}, "grammar"), ({"bad_words": [""]}, "bad_words"), ({"stop": list("1234567")}, "stop")]
    lines = [line(f"good{at}", **body) for at, body in enumerate(good)]
    lines += [line(f"bad{at}", **body) for at, (body, _) in enumerate(bad)]
    verdict, errors, _ = await check(tmp_path, tokenizer_dir, jsonl(*lines), max_stops=6, max_logprobs=25)
    assert [error.param for error in errors] == [param for _, param in bad]
    assert verdict.num_runnable == len(good)


async def test_of_equal_ids_the_first_runs(tmp_path, tokenizer_dir):
    content = jsonl(line("a"), line("b"), line("a"), line("c", url="/x"), line("c"))
    verdict, errors, _ = await check(tmp_path, tokenizer_dir, content)
    assert [(e.line, e.code) for e in errors] == [
        (3, "duplicate_custom_id"), (4, "invalid_url"), (5, "duplicate_custom_id")]
    assert "line 1" in errors[0].message
    assert verdict.num_runnable == 2


async def test_chat_lines(tmp_path, tokenizer_dir):
    def chat(custom_id, **body):
        body = {"model": "alias", "messages": [{"role": "user", "content": "hi"}]} | body
        return line(custom_id, url="/v1/chat/completions", **body) | {"body": body}

    content = jsonl(chat("a"), chat("b", messages=[]), chat("c", max_tokens=4), line("d"))
    verdict, errors, _ = await check(tmp_path, tokenizer_dir, content, "/v1/chat/completions")
    assert [(e.line, e.param) for e in errors] == [(2, "messages"), (4, "url")]
    assert verdict.num_runnable == 2


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n  \n\n", "empty_file"),
        (jsonl(b"{", line("a", temperature=9)), "no_valid_lines"),
        (jsonl(*(line(f"r{n}") for n in range(11))), "too_many_lines"),
    ],
)
async def test_a_file_that_cannot_run(tmp_path, tokenizer_dir, content, code):
    verdict, _, _ = await check(tmp_path, tokenizer_dir, content, max_lines=10)
    assert verdict.failure.code == code


def test_lines_are_numbered_as_editors_count(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"a\r\n\n b \n" + b"c" * 11 + b"\n" + b"d" * 10 + b"\n" + b"e" * 300_000 + b"\nlast")
    assert list(read_lines(path, 10)) == [(1, b"a"), (3, b"b"), (4, None), (5, b"d" * 10), (6, None), (7, b"last")]


@pytest.mark.parametrize(
    ("raw", "custom_id"),
    [(b'{"custom_id": "a"}', "a"), (b"{", None), (None, None), (b"[]", None), (b'{"custom_id": 1}', None)],
)
def test_the_id_of_a_line_that_never_ran(raw, custom_id):
    assert custom_id_in(raw) == custom_id
