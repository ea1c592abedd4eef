"""The OpenAI SDK drives files and batches through their whole life, against a real server."""

from __future__ import annotations

import asyncio

import openai
import pytest
from batches_util import documents, jsonl, line
from fake_engine import FakeEngine, bytes_of

from jettison.server.app import batch_service
from jettison.server.batches.settings import BatchSettings
from jettison.types import ServiceClass

FINAL = {"completed", "failed", "expired", "cancelled"}


async def until(client, batch, states=FINAL, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        while batch.status not in states:
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def begin(client, content: bytes, window="24h", endpoint="/v1/completions", **fields):
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=window, **fields)


async def text_of(client, file_id) -> bytes:
    return (await client.files.content(file_id)).content


@pytest.fixture
def batch_settings(tokenizer_dir, tmp_path):
    def settings(**changes):
        return BatchSettings(**({"folder": tmp_path / "batches", "model_dir": tokenizer_dir, "window": 4} | changes))

    return settings


async def test_the_whole_life(serve, batch_settings):
    engine = FakeEngine(bytes_of("grüße"))
    async with serve(engine, batches=batch_settings()) as served, served.openai() as client:
        content = jsonl(
            line("a"), line("b", n=2), b"", line("c", temperature=9), b"{", line("a"), line("d", prompt="x" * 500))
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (file.object, file.purpose, file.bytes, file.filename) == ("file", "batch", len(content), "in.jsonl")
        assert (await client.files.retrieve(file.id)) == file
        assert [f.id async for f in client.files.list()] == [file.id]
        assert await text_of(client, file.id) == content

        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="1h", metadata={"who": "me"})
        assert (batch.object, batch.status, batch.completion_window) == ("batch", "validating", "1h")
        assert batch.expires_at == batch.created_at + 3600
        batch = await until(client, batch)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (6, 2, 4)
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        assert batch.metadata == {"who": "me"}
        assert all(request.service_class is ServiceClass.OFFLINE and request.deadline_ns for request in engine.accepted)

        done = {d["custom_id"]: d for d in documents(await text_of(client, batch.output_file_id))}
        assert set(done) == {"a", "b"}
        assert done["a"]["response"]["status_code"] == 200
        assert done["a"]["error"] is None
        assert done["a"]["response"]["body"]["choices"][0]["text"] == "grü"
        assert len(done["b"]["response"]["body"]["choices"]) == 2
        bad = documents(await text_of(client, batch.error_file_id))
        assert [(d["custom_id"], d["error"]["line"], d["error"]["code"]) for d in bad] == [
            ("c", 4, "invalid_value"), (None, 5, "invalid_json_line"), ("a", 6, "duplicate_custom_id"),
            ("d", 7, "context_length_exceeded")]
        assert bad[0]["response"]["status_code"] == 400
        assert bad[0]["response"]["body"]["error"]["param"] == "temperature"

        assert [b.id async for b in client.batches.list()] == [batch.id]
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        assert batch_service(served.app)._window.num_held == 0
