"""The OpenAI SDK drives files and batches through their whole life, against a real server."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections import Counter

import openai
import pytest
from batches_util import documents, jsonl, line
from fake_engine import FakeEngine, bytes_of
from served import eventually

from jettison.server.app import batch_service
from jettison.server.batches import compute, uploads
from jettison.types import ServiceClass
from waiting import PATIENCE_S

FINAL = {"completed", "failed", "expired", "cancelled"}


async def until(client, batch, states=FINAL, timeout_s=PATIENCE_S):
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


async def test_the_whole_life(serve, batch_settings):
    engine = FakeEngine(bytes_of("grüße"))
    async with serve(engine, batches=batch_settings()) as served, served.openai() as client:
        content = jsonl(
            line("a"), line("b", n=2), b"", line("c", temperature=9), b"{", line("a"), line("d", prompt="x" * 500))
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (file.object, file.purpose, file.bytes, file.filename) == ("file", "batch", len(content), "in.jsonl")
        assert (await client.files.retrieve(file.id)) == file
        assert [f.id async for f in client.files.list()] == [file.id]
        assert [f.id async for f in client.files.list(after="")] == [file.id], "an empty cursor is none"
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
        assert len({request.deadline_ns for request in engine.accepted}) == 1, "so they are served as they stand"

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
        assert [b.id async for b in client.batches.list(after="")] == [batch.id]
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        assert batch_service(served.app)._window.num_held == 0


async def test_chat(serve, batch_settings):
    url = "/v1/chat/completions"
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    async with serve(FakeEngine(bytes_of("ok ")), batches=batch_settings()) as served, served.openai() as client:
        content = jsonl({"custom_id": "a", "method": "POST", "url": url, "body": body})
        batch = await until(client, await begin(client, content, endpoint=url))
        (answer,) = documents(await text_of(client, batch.output_file_id))
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == "ok "
        assert batch.error_file_id is None


async def test_fields_of_vllms_in_a_line(serve, batch_settings):
    engine = FakeEngine(bytes_of("abcd"))
    async with serve(engine, batches=batch_settings()) as served, served.openai() as client:
        stops = {"stop": "c", "include_stop_str_in_output": 1}
        fields = stops | {"bad_words": ["q"], "prompt_logprobs": 0, "max_tokens": 4.0}
        batch = await begin(client, jsonl(line("a", **fields)), metadata={"run": 7, "ok": True, "x": "y"})
        assert batch.metadata == {"run": "7", "ok": "true", "x": "y"}
        batch = await until(client, batch)
        (answer,) = documents(await text_of(client, batch.output_file_id))
        (choice,) = answer["response"]["body"]["choices"]
        assert choice["text"] == "abc"
        assert [entry and list(entry) for entry in choice["prompt_logprobs"]] == [None, ["105"]]
    assert engine.accepted[0].params.bad_words == ((113,),)


async def test_a_bounded_window_is_in_the_engine(serve, batch_settings):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, batches=batch_settings(window=3)) as served, served.openai() as client:
        batch = await begin(client, jsonl(*(line(f"r{n}") for n in range(20))))
        await until(client, batch, {"in_progress"})
        while len(engine.running) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(engine.running) == 3
        engine.release()
        batch = await until(client, batch)
        assert batch.request_counts.completed == 20
        assert len(engine.accepted) == 20


async def test_the_engine_is_told_of_lines_that_wait_for_a_place(serve, batch_settings):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, batches=batch_settings(window=3)) as served, served.openai() as client:
        batch = await begin(client, jsonl(*(line(f"r{n}") for n in range(20)), b"{"))
        await until(client, batch, {"in_progress"})
        while not engine.stored or len(engine.running) < 3:
            await asyncio.sleep(0.01)
        (work,) = engine.stored
        assert work.num_requests == 20, "those in the engine and those that are not there yet"
        assert work.num_prompt_tokens > 0 and work.max_output_tokens > 0
        assert {r.deadline_ns for r in engine.accepted} == {work.deadline_ns}
        engine.release()
        await until(client, batch)
        while engine.stored:
            await asyncio.sleep(0.01)


async def test_cancelling_keeps_what_is_done(serve, batch_settings):
    engine = FakeEngine(delay_s=0.02)
    async with serve(engine, batches=batch_settings(window=2)) as served, served.openai() as client:
        batch = await begin(client, jsonl(*(line(f"r{n}") for n in range(60)), b"{"))
        while batch.request_counts.completed < 2:
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
        cancelling = await client.batches.cancel(batch.id)
        assert cancelling.status in ("cancelling", "cancelled")
        batch = await until(client, batch)
        assert batch.status == "cancelled"
        assert batch.cancelling_at <= batch.cancelled_at
        output = documents(await text_of(client, batch.output_file_id))
        errors = documents(await text_of(client, batch.error_file_id))
        assert 2 <= len(output) < 60
        assert Counter(d["custom_id"] for d in (*output, *errors)) == Counter([None, *(f"r{n}" for n in range(60))])
        assert Counter(d["error"]["code"] for d in errors) == {
            "batch_cancelled": 60 - len(output), "invalid_json_line": 1}
        assert (batch.request_counts.completed, batch.request_counts.failed) == (len(output), len(errors))
        assert not engine.running
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await client.batches.cancel(batch.id)


async def test_what_is_not_done_in_time_expires(serve, batch_settings):
    engine = FakeEngine(delay_s=0.5)
    async with serve(engine, batches=batch_settings(window=1)) as served, served.openai() as client:
        batch = await until(client, await begin(client, jsonl(*(line(f"r{n}") for n in range(30))), window="12s"))
        assert batch.status == "expired"
        assert batch.expired_at >= batch.expires_at
        output = documents(await text_of(client, batch.output_file_id))
        errors = documents(await text_of(client, batch.error_file_id))
        assert output
        assert {d["error"]["code"] for d in errors} == {"batch_expired"}
        assert sorted(d["custom_id"] for d in (*output, *errors)) == sorted(f"r{n}" for n in range(30))
        assert not engine.running


async def test_what_cannot_be_done_in_time_is_refused_with_the_time_that_is_enough(serve, batch_settings, caplog):
    caplog.set_level(logging.INFO)
    async with serve(FakeEngine(), batches=batch_settings()) as served, served.openai() as client:
        forecast = batch_service(served.app)._forecast
        content = jsonl(*(line(f"r{n}") for n in range(100)))
        assert (await until(client, await begin(client, content, window="1h"))).status == "completed"  # nothing known
        forecast.note_work(5 * 120, 120.0)
        batch = await until(client, await begin(client, content, window="30s"))
        assert batch.status == "failed"
        (error,) = batch.errors.data
        assert (error.code, error.param) == ("completion_window_infeasible", "completion_window")
        assert f"{batch.id} is failed: {error.message}" in caplog.text  # its owner may never look
        assert "earliest feasible time is 20" in error.message
        assert batch.output_file_id is None


async def test_the_engine_is_told_what_is_due_for_whom(serve, batch_settings):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, batches=batch_settings()) as served, served.openai() as client:
        batch = await until(client, await begin(client, jsonl(*(line(f"r{n}") for n in range(9)))), {"in_progress"})
        async with asyncio.timeout(PATIENCE_S):
            while not engine.stored:
                await asyncio.sleep(0.02)
        (work,) = engine.stored
        assert (work.name, work.num_requests) == (batch.id, 9)
        assert {request.tenant for request in engine.accepted} <= {work.tenant}
        assert {request.deadline_ns for request in engine.accepted} <= {work.deadline_ns}
        engine.release()
        await until(client, batch)


async def test_a_live_estimate(serve, batch_settings):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, batches=batch_settings()) as served, served.openai() as client:
        forecast = batch_service(served.app)._forecast
        forecast.note_work(1000, 10.0)
        forecast.note_answer(4)
        batch = await begin(client, jsonl(*(line(f"r{n}") for n in range(9))))
        assert batch.estimated_completion_at is None
        batch = await until(client, batch, {"in_progress"})
        assert batch.estimated_completion_at > batch.created_at
        engine.release()
        assert (await until(client, batch)).estimated_completion_at is None


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (b"\n", ["empty_file"]),
        (jsonl(b"{", line("a", n=0)), ["no_valid_lines", "invalid_json_line", "invalid_value"]),
        (jsonl(*(line(f"r{n}") for n in range(9))), ["too_many_lines"]),
    ],
)
async def test_a_file_of_nothing_that_runs_fails(serve, batch_settings, content, codes):
    async with serve(FakeEngine(), batches=batch_settings(max_lines=5)) as served, served.openai() as client:
        batch = await until(client, await begin(client, content))
        assert batch.status == "failed"
        assert batch.failed_at
        assert [error.code for error in batch.errors.data] == codes
        assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_a_server_that_ends_as_a_check_does_leaves_no_process(serve, batch_settings, monkeypatch):
    """The batch is told to be over while the process that has checked its lines still ends."""
    made, is_ending, may_end = [], asyncio.Event(), asyncio.Event()
    create = asyncio.create_subprocess_exec

    async def slow_to_end(*arguments, **options):
        process = await create(*arguments, **options)
        communicate = process.communicate

        async def slowly():
            is_ending.set()
            await may_end.wait()
            return await communicate()

        process.communicate = slowly
        made.append(process)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow_to_end)
    async with serve(FakeEngine(), batches=batch_settings(max_lines=5)) as served, served.openai() as client:
        await until(client, await begin(client, b"no line of a batch"))
        await is_ending.wait()
        closing = asyncio.create_task(batch_service(served.app).close())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done()
        may_end.set()
        await closing
        assert [process.returncode is not None for process in made] == [True]


async def test_a_line_that_the_engine_fails_is_tried_again_and_then_told(serve, batch_settings, monkeypatch):
    monkeypatch.setattr(compute, "AGAIN_S", 0.01)
    engine = FakeEngine()
    engine.fail_after = 2
    async with serve(engine, batches=batch_settings()) as served, served.openai() as client:
        batch = await until(client, await begin(client, jsonl(line("a"))))
        assert batch.status == "completed"
        (error,) = documents(await text_of(client, batch.error_file_id))
        assert (error["error"]["code"], error["response"]["status_code"]) == ("engine_error", 500)
        assert len(engine.accepted) == 3


async def test_an_outage_fails_no_line(serve, batch_settings, monkeypatch):
    monkeypatch.setattr(compute, "AGAIN_S", 0.01)
    engine = FakeEngine()
    engine.fail_after, engine.has_groups = 2, False
    async with serve(engine, batches=batch_settings()) as served, served.openai() as client:
        batch = await begin(client, jsonl(line("a")))
        while len(engine.accepted) < 8:
            await asyncio.sleep(0.01)
        engine.fail_after, engine.has_groups = None, True
        batch = await until(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 1)


async def test_a_drained_server_leaves_the_rest_and_the_next_one_ends_it(serve, batch_settings, caplog):
    caplog.set_level(logging.INFO)
    engine = FakeEngine(delay_s=0.02)
    async with serve(engine, batches=batch_settings(window=2)) as served, served.openai() as client:
        batch = await begin(client, jsonl(*(line(f"r{n}") for n in range(30))))
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 3:
            await asyncio.sleep(0.02)
    assert not engine.running
    async with serve(FakeEngine(), batches=batch_settings(window=2)) as served, served.openai() as client:
        batch = await until(client, batch)
        assert f"going on with {batch.id}: in_progress, " in caplog.text
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)
        output = documents(await text_of(client, batch.output_file_id))
        assert [d["custom_id"] for d in output] == [f"r{n}" for n in range(30)]


async def test_cancelled_while_the_model_loads_nothing_more_runs(serve, batch_settings):
    async with serve(FakeEngine(delay_s=None), batches=batch_settings()) as served, served.openai() as client:
        running = await begin(client, jsonl(*(line(f"r{n}") for n in range(9))))
        await until(client, running, {"in_progress"})
    engine = FakeEngine()
    engine.engine_state = "loading"
    async with serve(engine, batches=batch_settings()) as served, served.openai() as client:
        fresh = await begin(client, jsonl(line("a")))
        for batch in (running, fresh):
            assert (await client.batches.cancel(batch.id)).status == "cancelling"
        engine.engine_state = "ready"
        running, fresh = await until(client, running), await until(client, fresh)
        assert (running.status, fresh.status) == ("cancelled", "cancelled")
        assert running.request_counts.failed == 9
        assert fresh.error_file_id is None
        assert engine.accepted == []


# --- whose it is


async def test_another_key_finds_nothing(serve, batch_settings):
    keys = ("mine", "theirs")
    engine = FakeEngine()
    async with (
        serve(engine, batches=batch_settings(), api_keys=keys) as served,
        served.openai(api_key="mine") as mine, served.openai(api_key="theirs") as theirs,
        served.openai(api_key="none") as stranger,
    ):
        batch = await until(mine, await begin(mine, jsonl(line("a"))))
        assert {request.tenant for request in engine.accepted} != {""}
        for find in (
            lambda: theirs.files.retrieve(batch.input_file_id), lambda: theirs.files.content(batch.output_file_id),
            lambda: theirs.files.delete(batch.input_file_id), lambda: theirs.batches.retrieve(batch.id),
            lambda: theirs.batches.cancel(batch.id), lambda: theirs.batches.list(after=batch.id),
            lambda: theirs.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await find()
        assert [b.id async for b in theirs.batches.list()] == []
        assert [f.id async for f in theirs.files.list()] == []
        assert [b.id async for b in mine.batches.list()] == [batch.id]
        with pytest.raises(openai.AuthenticationError):
            await stranger.files.list()


async def test_a_key_stays_the_owner_when_others_come(serve, batch_settings):
    serving = serve(FakeEngine(), batches=batch_settings(), api_keys=("mine",))
    async with serving as served, served.openai(api_key="mine") as mine:
        file = await mine.files.create(file=("in.jsonl", b"x"), purpose="batch")
    serving = serve(FakeEngine(), batches=batch_settings(), api_keys=("new", "mine"))
    async with serving as served, served.openai(api_key="mine") as mine, served.openai(api_key="new") as new:
        assert (await mine.files.retrieve(file.id)).id == file.id
        with pytest.raises(openai.NotFoundError):
            await new.files.retrieve(file.id)


# --- bounds and refusals


async def test_pages(serve, batch_settings):
    async with serve(FakeEngine(), batches=batch_settings()) as served, served.openai() as client:
        file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
        made = []
        for _ in range(5):
            made.append((await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")).id)
        page = await client.batches.list(limit=2)
        assert ([b.id for b in page.data], page.has_more) == (made[:2:-1], True)
        assert [b.id async for b in client.batches.list(limit=2)] == made[::-1]
        for limit in (0, 101, "x"):
            with pytest.raises(openai.BadRequestError, match="limit"):
                await client.batches.list(limit=limit)
        files = await client.files.list(limit=1, order="asc", purpose="batch")
        assert files.data[0].id == file.id


async def test_a_file_that_is_read_stays(serve, batch_settings):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, batches=batch_settings()) as served, served.openai() as client:
        batch = await begin(client, jsonl(line("a")))
        with pytest.raises(openai.BadRequestError) as caught:
            await client.files.delete(batch.input_file_id)
        assert caught.value.code == "file_in_use"
        engine.release()
        await until(client, batch)
        assert (await client.files.delete(batch.input_file_id)).deleted


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint", "unsupported_endpoint"),
        ({"completion_window": "soon"}, "completion_window", "invalid_value"),
        ({"completion_window": None}, "completion_window", "missing_required_parameter"),
        ({"input_file_id": None}, "input_file_id", "missing_required_parameter"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
        ({"metadata": {"k": [5]}}, "metadata", "invalid_type"),
    ],
)
async def test_a_batch_that_is_refused(serve, batch_settings, fields, param, code):
    async with serve(FakeEngine(), batches=batch_settings()) as served, served.openai() as client:
        file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
        asked = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"} | fields
        with pytest.raises(openai.BadRequestError) as caught:
            await client.batches.create(**asked)
        assert caught.value.code == code
        assert caught.value.param.startswith(param)


async def test_limits_of_a_key(serve, batch_settings):
    limits = {"max_file_bytes": 1000, "max_stored_bytes": 1500, "max_files": 3, "max_open_batches": 1}
    engine = FakeEngine(delay_s=None)
    settings = {"batches": batch_settings(**limits), "max_upload_bytes": 1000 + 65536}
    async with serve(engine, **settings) as served, served.openai() as client:
        upload = client.files.create
        with pytest.raises(openai.APIStatusError) as caught:
            await upload(file=("in.jsonl", b"x" * 1001), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
        batch = await begin(client, jsonl(line("a")) + b" " * 600)
        with pytest.raises(openai.APIStatusError) as caught:
            await upload(file=("in.jsonl", b"x" * 900), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (413, "storage_limit_reached")
        with pytest.raises(openai.RateLimitError) as caught:
            await client.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
        assert caught.value.code == "too_many_batches"
        await upload(file=("in.jsonl", b"x"), purpose="batch")
        await upload(file=("in.jsonl", b"x"), purpose="batch")
        with pytest.raises(openai.RateLimitError) as caught:
            await upload(file=("in.jsonl", b"x"), purpose="batch")
        assert caught.value.code == "too_many_files"
        assert list((batch_service(served.app).store.folder / "incoming").iterdir()) == []
        engine.release()


async def test_few_files_are_uploaded_at_a_time_however_busy_the_store_is(serve, batch_settings):
    goes_on = threading.Event()
    async with serve(FakeEngine(), batches=batch_settings()) as served:
        blocked = asyncio.create_task(batch_service(served.app).call(goes_on.wait, PATIENCE_S))
        posts = [asyncio.create_task(post_file(served)) for _ in range(8)]
        try:
            await eventually(lambda: sum(post.done() for post in posts) == 4, timeout_s=20)
        finally:
            goes_on.set()
        codes = Counter((answer.status_code, answer.json().get("error", {}).get("code")) for answer in
                        await asyncio.gather(*posts))  # fmt: skip
        assert codes == {(200, None): 4, (429, "too_many_uploads"): 4}
        assert (await post_file(served)).status_code == 200, "all places are free again"
        await blocked


async def post_file(served):
    return await served.http.post(
        f"{served.url}/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"x" * 100)})


@pytest.mark.parametrize(
    ("limits", "refused"),
    [({"max_files": 2}, (429, "too_many_files")), ({"max_stored_bytes": 250}, (413, "storage_limit_reached"))])
async def test_files_that_are_uploaded_side_by_side_have_the_limits_of_a_key_together(
    serve, batch_settings, monkeypatch, limits, refused
):
    begun, receive = asyncio.Barrier(3), uploads.Upload.receive

    async def receive_together(self, messages):
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        await receive(self, messages)

    monkeypatch.setattr(uploads.Upload, "receive", receive_together)
    async with serve(FakeEngine(), batches=batch_settings(**limits)) as served:
        answers = await asyncio.gather(*(post_file(served) for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, refused[0]]
        (told,) = (answer.json()["error"]["code"] for answer in answers if answer.status_code != 200)
        assert told == refused[1]
        store = batch_service(served.app).store
        assert list((store.folder / "incoming").iterdir()) == []
        assert len(list((store.folder / "files").iterdir())) == 2


async def test_a_full_disk_is_told(serve, batch_settings, monkeypatch):
    async with serve(FakeEngine(), batches=batch_settings()) as served, served.openai() as client:
        store = batch_service(served.app).store
        file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")

        def fail(*_):
            raise OSError(errno.ENOSPC, "no space")

        with monkeypatch.context() as patch:
            patch.setattr(uploads, "_sync", fail)
            with pytest.raises(openai.APIStatusError) as caught:
                await client.files.create(file=("in.jsonl", b"x"), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
        with monkeypatch.context() as patch:
            patch.setattr(store, "add_batch", fail)
            with pytest.raises(openai.APIStatusError) as caught:
                await client.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
        assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
        assert list((store.folder / "incoming").iterdir()) == []


async def test_a_folder_of_its_own_is_made_when_it_is_needed(serve, batch_settings):
    settings = batch_settings(is_made_at_once=False)
    async with serve(FakeEngine(), batches=settings) as served, served.openai() as client:
        assert [b.id async for b in client.batches.list()] == []
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve("batch_1")
        assert not settings.folder.exists()
        batch = await begin(client, jsonl(line("a")))
        assert settings.folder.exists()
        assert (await until(client, batch)).status == "completed"


async def test_a_flexible_request_is_offline(serve):
    engine = FakeEngine()
    engine.max_waiting = 0  # its queue keeps no online request waiting
    async with serve(engine) as served:
        for asked in ({}, {"service_tier": "default"}, {"user": "flex"}):
            assert (await served.completion(**asked)).status_code == 429
        answer = await served.completion(service_tier="flex")
        engine.max_waiting = None
        assert answer.json()["service_tier"] == "flex"
        assert engine.accepted[0].service_class is ServiceClass.OFFLINE
        assert (await served.completion(service_tier="default")).json()["service_tier"] == "default"
        assert engine.accepted[1].service_class is ServiceClass.ONLINE
        text = (await served.http.get(f"{served.url}/metrics")).text
        assert 'vllm:time_to_first_token_seconds_count{model_name="fake"} 1.0' in text


async def test_offline_work_is_refused_where_it_is_not_served_and_what_is_there_waits(serve, batch_settings, caplog):
    held = FakeEngine(bytes_of("x"), delay_s=None)
    async with serve(held, batches=batch_settings()) as served, served.openai() as client:
        batches = [await begin(client, jsonl(line("a"))) for _ in range(2)]
        for batch in batches:
            await until(client, batch, {"in_progress"})
    engine = FakeEngine(bytes_of("x"))
    async with serve(engine, batches=batch_settings(), serves_offline=False) as served, served.openai() as client:
        assert "2 batches in" in caplog.text and "--offline is none" in caplog.text
        answer = await served.completion(service_tier="flex")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "offline_disabled", "service_tier")
        with pytest.raises(openai.BadRequestError) as refused:
            await begin(client, jsonl(line("a")))
        assert refused.value.code == "offline_disabled"
        assert (await served.completion()).status_code == 200
        waits, cancelled = batches
        await client.batches.cancel(cancelled.id)
        assert (await until(client, cancelled)).status == "cancelled"
        kept = await client.batches.retrieve(waits.id)
        assert kept.status == "in_progress" and kept.to_dict()["estimated_completion_at"] is None
        assert len(engine.accepted) == 1, "the online one"
    async with serve(engine, batches=batch_settings()) as served, served.openai() as client:
        assert (await until(client, waits)).status == "completed"
