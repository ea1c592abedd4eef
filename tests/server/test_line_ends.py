"""Answers that hold U+2028, U+2029 or U+0085 reach clients that split at every line end of Unicode in one piece."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from batches_util import jsonl, line
from fake_engine import FakeEngine, bytes_of
from test_batches_sdk import begin, text_of, until

from jettison.server import batches
from jettison.server.batches.settings import BatchSettings

TEXT = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1eé“"
NUM_TOKENS = len(TEXT.encode())
ASK = {"model": "fake", "max_tokens": NUM_TOKENS}


def events_of(body: str) -> list[dict]:
    """As a client reads that splits with ``str.splitlines()``."""
    lines = [line for line in body.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def text_of_chunk(event: dict) -> str:
    choice = event["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"]["content"]


@pytest.mark.parametrize(("path", "asked"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"prompt": "x", "logprobs": 1}),
    ("/v1/completions", {"prompt": TEXT, "echo": True}),
])  # fmt: skip
async def test_streams_and_whole_answers(serve, path, asked) -> None:
    async with serve(FakeEngine(bytes_of(TEXT))) as served:
        before = TEXT if asked.get("echo") else ""
        answer = await served.http.post(served.url + path, json=ASK | asked | {"stream": True})
        events = events_of(answer.content.decode())
        assert "".join(map(text_of_chunk, events)) == before + TEXT
        async with served.http.stream("POST", served.url + path, json=ASK | asked | {"stream": True}) as stream:
            lines = [line async for line in stream.aiter_lines() if line]  # httpx splits with splitlines()
        assert "".join(text_of_chunk(event) for event in events_of("\n".join(lines))) == before + TEXT
        whole = await served.http.post(served.url + path, json=ASK | asked)
        assert len(whole.text.splitlines()) == 1 and TEXT in json.dumps(whole.json(), ensure_ascii=False).replace(
            "\\u000b\\f\\u001c\\u001d\\u001e", "\x0b\x0c\x1c\x1d\x1e")


async def test_the_sdk_reads_the_same(serve) -> None:
    async with serve(FakeEngine(bytes_of(TEXT))) as served, served.openai() as client:
        stream = await client.chat.completions.create(
            **ASK, messages=[{"role": "user", "content": "x"}], stream=True)  # fmt: skip
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT


async def test_errors_that_repeat_what_was_sent(serve) -> None:
    async with serve(FakeEngine()) as served:
        answer = await served.http.post(served.url + "/v1/completions", json=ASK | {"prompt": "x", "model": TEXT})
        assert answer.status_code == 404 and len(answer.text.splitlines()) == 1


async def test_result_files_of_batches(serve, tokenizer_dir, tmp_path) -> None:
    settings = BatchSettings(folder=tmp_path / "batches", tokenizer_dir=tokenizer_dir, window=4)
    async with serve(FakeEngine(bytes_of(TEXT)), batches=settings) as served, served.openai() as client:
        content = jsonl(line(TEXT, max_tokens=NUM_TOKENS), line("\u2028", temperature=9), line("b", model="\x85"))
        batch = await until(client, await begin(client, content))
        output = (await text_of(client, batch.output_file_id)).decode()
        errors = (await text_of(client, batch.error_file_id)).decode()
        [good] = [json.loads(line) for line in output.splitlines()]
        assert good["custom_id"] == TEXT and good["response"]["body"]["choices"][0]["text"] == TEXT
        assert [json.loads(line)["custom_id"] for line in errors.splitlines()] == ["\u2028", "b"]


ENCODES = re.compile(r"msgspec\.json\.(encode|Encoder)|json\.dumps\(.*ensure_ascii=False")
INSIDE = {"json_out.py", "batches/run.py", "batches/check_process.py", "batches/store.py"}
"""The encoder itself; processes of our own and the database, which msgspec reads again."""


NOT_TOLD = {
    "conversation.py", "fronts/start.py", "fronts/beside.py", "parent/orders.py", "template_sandbox.py", "compiling.py",
    "compile_process.py", "forced_calls.py", "grammar_texts.py", "parsers/written.py", "structured.py",
}  # fmt: skip
"""They write JSON that a model or a process of ours reads, or that is a text within an answer."""


def test_the_server_has_one_encoder() -> None:
    folder = Path(batches.__path__[0]).parent
    sources = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
    assert sources.keys() >= INSIDE
    assert {name for name, source in sources.items() if ENCODES.search(source)} - NOT_TOLD == INSIDE
