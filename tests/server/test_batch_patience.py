"""A line that cannot be prepared now is tried again, for its own tenant, and told in the end."""

from __future__ import annotations

import asyncio
import threading

import pytest
from batches_util import documents, jsonl, line
from fake_engine import FakeEngine
from served import eventually
from test_batch_lines import check
from test_batches_sdk import begin, text_of, until

from jettison.server.batches import patience
from jettison.server.compile_jobs import Compiled
from jettison.server.compiling import GrammarCompiler
from jettison.server.completions import CompletionEndpoint
from jettison.server.errors import ApiError

BUSY = ApiError(503, "Too many constraints wait to be compiled.", code="not_ready")


@pytest.fixture
def busy(monkeypatch):
    """Calls it how often the compiler of any server is to answer 503 first."""
    compiled = GrammarCompiler.compiled
    left = [0]

    async def told(self, constraint):
        left[0] -= 1
        if left[0] >= 0:
            raise BUSY
        return await compiled(self, constraint)

    monkeypatch.setattr(GrammarCompiler, "compiled", told)
    monkeypatch.setattr(patience, "AGAIN_S", 0.001)
    return left


async def test_a_check_tries_again(tmp_path, tokenizer_dir, busy, monkeypatch):
    busy[0] = 5
    verdict, bad, _ = await check(tmp_path, tokenizer_dir, jsonl(line("a", guided_regex="ab")))
    assert (verdict.num_runnable, bad, busy[0]) == (1, [], -1)
    busy[0] = 1 << 40
    monkeypatch.setattr(patience, "PATIENCE_S", 0.05)
    verdict, [error], [result] = await check(tmp_path, tokenizer_dir, jsonl(line("a", guided_regex="ab")))
    assert (verdict.num_runnable, error.code, result.line) == (0, "not_ready", 1)


async def test_what_is_wrong_is_told_at_once(tmp_path, tokenizer_dir, busy):
    busy[0] = 1
    _, [error], _ = await check(tmp_path, tokenizer_dir, jsonl(line("a", guided_regex="(a")))
    assert (error.code, busy[0]) == ("invalid_grammar", -1)


async def test_a_line_that_runs_is_tried_again(serve, batch_settings, busy):
    busy[0] = 5
    async with serve(FakeEngine(), batches=batch_settings()) as served, served.openai() as client:
        batch = await until(client, await begin(client, jsonl(line("a", guided_regex="ab"))))
        assert (batch.status, batch.request_counts.completed, busy[0]) == ("completed", 1, -1)
        [told] = documents(await text_of(client, batch.output_file_id))
        assert told["response"]["status_code"] == 200


async def test_lines_wait_for_the_compiler_as_their_tenants(serve, batch_settings):
    go, order = threading.Event(), []

    def ask(constraint):
        go.wait()
        order.append(constraint.text)
        return Compiled(grammar="start: /a/")

    async with serve(FakeEngine(), batches=batch_settings(), api_keys=("one", "two")) as served:
        compiler = served.state.grammars
        compiler._ask = ask
        one, two = served.openai(api_key="one"), served.openai(api_key="two")
        try:
            of_one = await begin(one, jsonl(line("a", guided_regex="of one")))
            await eventually(lambda: len(compiler._under_way) == 1)
            of_two = await begin(two, jsonl(line("b", guided_regex="of two")))
            await eventually(lambda: len(compiler._under_way) == 2)
            told = [(tenant, n) for waiting in compiler._under_way.values() for tenant, n in waiting.num_asking.items()]
            keys = served.state.keys
            assert told == [(keys.tenant(f"Bearer {key}".encode()), 1) for key in ("one", "two")]
            go.set()
            ended = await asyncio.gather(until(one, of_one), until(two, of_two))
            assert [batch.status for batch in ended] == ["completed", "completed"] and order == ["of one", "of two"]
        finally:
            go.set()


async def test_a_line_that_breaks_while_it_is_prepared_to_run_ends_alone(serve, batch_settings, monkeypatch):
    """The check, in a process of its own, has taken it."""
    prepare = CompletionEndpoint.prepare

    async def broken(self, document):
        if document["prompt"] == "deep":
            raise RecursionError
        return await prepare(self, document)

    monkeypatch.setattr(CompletionEndpoint, "prepare", broken)
    async with serve(FakeEngine(), batches=batch_settings()) as served, served.openai() as client:
        batch = await until(client, await begin(client, jsonl(line("a", prompt="deep"), line("b"))))
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1)
