"""kill -9 of the controller behind front ends, or a bug in it: the server goes on. Streams end with exact tokens,
whole answers come, workers stay and load nothing, a batch ends each line once."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import urllib.request
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from e2e_server import MODEL, WAIT_S, eventually
from failing_core import POISON
from test_batches_live import begin, check_whole, client_of, num_done

from jettison.live.engine.api import OFTEN_LOST
from jettison.live.experiments.server_process import ServerProcess
from jettison.server.parent.rules import MOST_RESTARTS

pytestmark = pytest.mark.live

LENGTH = 300
LONG = 2000
"""Of an answer that must not end before its controller."""
NUM_STREAMS = 12
PRECISION = {"dtype": "float64"}
"""In which tokens are the same whatever is computed again, and beside what."""


@pytest.fixture(scope="module")
def fronted(serving, memory_for):
    with serving(memory=memory_for(96, **PRECISION), api_servers=2, shutdown_timeout=60, **PRECISION) as served:
        yield served


def controller_of(served) -> int:
    """By the name that it gives itself."""
    children = psutil.Process(served.pid).children(recursive=True)
    (controller,) = [child for child in children if child.name() == "jettison-serve"]
    return controller.pid


def kill(served) -> None:
    os.kill(controller_of(served), signal.SIGKILL)


async def health(served) -> dict:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        return (await http.get(f"{served.url}/health")).json()


async def is_back(served, before: int) -> None:
    """There is another controller, and it serves."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                if controller_of(served) != before and (await health(served))["status"] == "ready":
                    return
            except (ValueError, psutil.Error, httpx.HTTPError):  # there is none yet
                pass
            await asyncio.sleep(0.05)


def body(number: int, **fields) -> dict:
    """Each kind of request: greedy, drawn, with penalties, with logprobs."""
    kinds = [
        {"temperature": 0}, {"temperature": 1.0, "seed": 7 + number},
        {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"temperature": 0, "logprobs": 2},
    ]
    extra = {"ignore_eos": True, "return_token_ids": True}
    return {"model": MODEL, "prompt": [number + 1, 2, 3], "max_tokens": LENGTH, "extra_body": extra} | kinds[
        number % len(kinds)] | fields


def ids(choices) -> list[int]:
    return [token for choice in choices for token in choice.token_ids or ()]


async def streamed(client: openai.AsyncOpenAI, number: int, begun: asyncio.Semaphore) -> list[int]:
    got, reasons = [], []
    async for chunk in await client.completions.create(**body(number, stream=True)):
        got += ids(chunk.choices)
        reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        if len(got) == 3:
            begun.release()
    assert reasons == ["length"]
    return got


async def whole(client: openai.AsyncOpenAI, number: int) -> list[int]:
    answer = await client.completions.create(**body(number))
    return ids(answer.choices)


async def all_under_way(served, client, then) -> list[list[int]]:
    """Streams and whole answers, with ``then`` once every stream has begun; their tokens."""
    begun = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(streamed(client, number, begun)) for number in range(NUM_STREAMS)]
    tasks += [asyncio.create_task(whole(client, number)) for number in range(NUM_STREAMS, NUM_STREAMS + 4)]
    for _ in range(NUM_STREAMS):
        await begun.acquire()
    await then()
    return await asyncio.wait_for(asyncio.gather(*tasks), 3 * WAIT_S)


@pytest.fixture(scope="module")
def expected(fronted):
    """What an undisturbed server answers."""
    client = fronted.client(timeout=3 * WAIT_S)
    return [ids(client.completions.create(**body(number)).choices) for number in range(NUM_STREAMS + 4)]


async def test_streams_and_whole_answers_go_on_exactly_and_no_worker_loads_again(fronted, expected):
    workers, before, late = fronted.worker_pids(), controller_of(fronted), []

    async def then():
        kill(fronted)
        late.append(asyncio.create_task(whole(client.with_options(max_retries=0), 0)))  # waits for the next one

    async with fronted.async_client(timeout=3 * WAIT_S) as client:
        got = await all_under_way(fronted, client, then)
        assert got == expected and await late[0] == expected[0]
        await is_back(fronted, before)
        assert fronted.worker_pids() == workers and len(workers) == 2
    assert "2 of 2 workers are taken over" in fronted.log()
    await asyncio.to_thread(fronted.wait_idle)


async def test_a_file_of_keys_that_is_bad_by_then_ends_nothing(serving, memory_for, tmp_path, expected):
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    flags = {"memory": memory_for(96, **PRECISION), "api_servers": 1, "api_key_file": str(keys), **PRECISION}
    with serving(**flags) as served:
        before, told = controller_of(served), "the API keys stay as they were"
        keys.write_text("")
        os.kill(served.pid, signal.SIGHUP)
        await asyncio.to_thread(eventually, lambda: told in served.log(), "the file is read")

        async def then():
            kill(served)

        async with served.async_client(timeout=3 * WAIT_S, api_key="one") as client:
            assert await all_under_way(served, client, then) == expected
            await is_back(served, before)
            assert await whole(client, 0) == expected[0]
        assert served.log().count(told) == 2 and served.log().count("the controller has ended") == 1


async def test_a_worker_that_dies_with_its_controller_is_filled_by_its_peer(fronted, expected):
    workers, before = sorted(fronted.worker_pids()), controller_of(fronted)

    async def then():
        kill(fronted)
        os.kill(workers[0], signal.SIGKILL)

    async with fronted.async_client(timeout=3 * WAIT_S) as client:
        assert await all_under_way(fronted, client, then) == expected
    await is_back(fronted, before)
    assert workers[1] in fronted.worker_pids() and workers[0] not in fronted.worker_pids()
    await asyncio.to_thread(fronted.wait_idle)


async def test_a_death_while_layers_are_dropped_costs_no_token(serving, memory_for, expected):
    """Streams want several times the KV that there is, so the instances drop layers and merge; nothing restores them
    before the kill. The next controller may have to drop some again."""
    flags = PRECISION | {"restore_dwell_ms": 10_000}
    with serving(memory=memory_for(40, **flags), api_servers=2, **flags) as served:
        before, workers = controller_of(served), served.worker_pids()

        async def merged():
            async with asyncio.timeout(WAIT_S):
                while await asyncio.to_thread(served.metric, "jettison:groups") == 2:
                    await asyncio.sleep(0.01)
            kill(served)

        async with served.async_client(timeout=3 * WAIT_S) as client:
            assert await all_under_way(served, client, merged) == expected
            await is_back(served, before)
        await asyncio.to_thread(
            eventually, lambda: served.metric("jettison:groups") == 2, "each has the layers that it lacked")
        assert served.worker_pids() == workers
        assert await asyncio.to_thread(served.metric, "jettison:pulled_bytes_total") > 0  # and has them from its peer
        await asyncio.to_thread(served.wait_idle)


async def test_a_sleeper_is_awake_behind_its_controller_s_death_and_costs_no_token(serving, memory_for, expected):
    with serving(memory=memory_for(700, **PRECISION), api_servers=1, **PRECISION) as served:
        before, workers = controller_of(served), served.worker_pids()

        def states(path="is_sleeping", method="GET"):
            request = urllib.request.Request(f"{served.url}/{path}", method=method)
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return [row["state"] for row in json.load(answer)["instances"]]

        states("sleep?level=2&instance=1", "POST")
        await asyncio.to_thread(eventually, lambda: states()[1] == "asleep", "an instance sleeps")

        async def then():
            kill(served)

        async with served.async_client(timeout=3 * WAIT_S) as client:
            assert await all_under_way(served, client, then) == expected
        await is_back(served, before)
        assert served.worker_pids() == workers
        assert states() == ["awake", "awake"]


async def test_an_instance_that_came_with_the_load_is_taken_over_with_the_others(serving, memory_for, expected):
    flags = {"memory": memory_for(96, **PRECISION), "api_servers": 1, "max_instances": 3, **PRECISION}
    with serving(**flags) as served:
        before = controller_of(served)
        assert len(served.worker_pids()) == 2
        request = urllib.request.Request(f"{served.url}/wake_up?instance=2", method="POST")
        await asyncio.to_thread(urllib.request.urlopen, request, timeout=WAIT_S)
        await asyncio.to_thread(
            eventually, lambda: served.metric("jettison:instances_provisioned") == 3 and len(served.worker_pids()) == 3,
            "a third has come")
        workers = served.worker_pids()

        async def then():
            kill(served)

        async with served.async_client(timeout=3 * WAIT_S) as client:
            assert await all_under_way(served, client, then) == expected
            await is_back(served, before)
            assert served.worker_pids() == workers
            assert "3 of 3 workers are taken over" in served.log()
            assert await whole(client, 0) == expected[0]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
async def test_workers_that_ray_has_placed_are_taken_over_and_placed_again(serving, memory_for, expected):
    flags = {"memory": memory_for(96, **PRECISION), "api_servers": 1, "launcher": "ray", "lease": 30, **PRECISION}
    with serving(**flags) as served:
        workers, before = sorted(served.worker_pids()), controller_of(served)
        assert len(workers) == 2

        async def then():
            kill(served)

        async with served.async_client(timeout=3 * WAIT_S) as client:
            assert await all_under_way(served, client, then) == expected
            await is_back(served, before)
            assert sorted(served.worker_pids()) == workers
            assert "2 of 2 workers are taken over" in served.log()
            fork_server = psutil.Process(workers[0]).parent()
            fork_server.parent().kill()  # the keeper: another is placed, once Ray's driver has joined again
            await asyncio.to_thread(
                eventually, lambda: len(served.worker_pids() - {workers[0]}) == 2, "another keeper is placed")
            assert await whole(client, 0) == expected[0]


async def test_all_counts_begin_again_together(fronted):
    """Front ends live on, but what the controller had added to their counts is gone."""
    names = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:e2e_request_latency_seconds_count")
    async with fronted.async_client() as client:
        for _ in range(2):  # killed under the same front ends
            before = controller_of(fronted)
            await whole(client, 0)
            await whole(client, 0)
            told = [await asyncio.to_thread(fronted.metric, name) for name in names]
            assert min(told) >= 2
            kill(fronted)
            await is_back(fronted, before)
            await whole(client, 0)
            assert [await asyncio.to_thread(fronted.metric, name) for name in names] == [1, len(body(0)["prompt"]), 1]


def test_a_batch_goes_on_and_ends_each_line_once(serving, memory_for, tmp_path):
    flags = {"instances": 1, "api_servers": 1, "batch_dir": tmp_path / "batches", "batch_window": 24}
    with serving(memory=memory_for(96, instances=1), **flags) as served:
        client = client_of(served.process)
        batch_id = begin(client, 80)
        eventually(lambda: num_done(client, batch_id) > 10, "some lines are done")
        kill(served)

        def is_completed():
            try:
                return client.batches.retrieve(batch_id).status == "completed"
            except openai.APIError:
                return False

        eventually(is_completed, "the batch ends", 5 * WAIT_S)
        batch = client.batches.retrieve(batch_id)
        texts = (client.files.content(file_id).text for file_id in (batch.output_file_id, batch.error_file_id))
        check_whole(*([json.loads(line) for line in text.splitlines()] for text in texts), 80)


async def test_without_a_time_for_orphans_all_ends_with_the_controller(serving, memory_for):
    with serving(memory=memory_for(400), api_servers=1, orphan_timeout=0) as served:
        pids = served.pids()
        async with served.async_client() as client:
            stream = await client.completions.create(**body(0, stream=True, max_tokens=LONG))
            await anext(aiter(stream))
            kill(served)
            with pytest.raises((openai.APIError, httpx.TransportError)):
                async for _ in stream:
                    pass
        assert await asyncio.to_thread(served.process._process.wait, WAIT_S) == 137
        eventually(lambda: not any(map(psutil.pid_exists, pids)), "no process is left")


async def test_a_signal_to_end_that_comes_while_streams_are_on_their_way_back_lets_them_end(
    serving, memory_for, expected
):
    with serving(memory=memory_for(96, **PRECISION), api_servers=2, shutdown_timeout=60, **PRECISION) as served:

        async def then():
            kill(served)
            await asyncio.to_thread(eventually, lambda: "the controller has ended (-9)" in served.log(), "it is seen")
            os.kill(served.pid, signal.SIGTERM)

        async with served.async_client(timeout=3 * WAIT_S) as client:
            assert await all_under_way(served, client, then) == expected
        assert await asyncio.to_thread(served.process._process.wait, WAIT_S) == 0


@pytest.fixture
def breaks(monkeypatch, tmp_path):
    """The file at which the core of a server that starts now meets a bug: see ``failing_core``."""
    path, command_of = tmp_path / "breaks", ServerProcess._command

    def command(process):
        (python, _, _, *arguments), environment = command_of(process)  # python -m jettison
        return [python, str(Path(__file__).with_name("failing_core.py")), str(path), *arguments], environment

    monkeypatch.setattr(ServerProcess, "_command", command)
    return path


async def test_a_bug_of_the_controller_costs_no_token_until_controllers_meet_it_too_often(
    serving, memory_for, expected, breaks, tmp_path
):
    line = tmp_path / "line.json"
    with serving(memory=memory_for(96, **PRECISION), api_servers=2, timeline=line, **PRECISION) as served:
        workers, before = served.worker_pids(), controller_of(served)

        async def then():
            breaks.touch()

        async with served.async_client(timeout=3 * WAIT_S) as client:
            assert await all_under_way(served, client, then) == expected
            await is_back(served, before)
            with pytest.raises(openai.APIError, match=OFTEN_LOST):
                await client.completions.create(**body(0, prompt=[POISON, 1]))
            assert await whole(client, 0) == expected[0]
            assert served.worker_pids() == workers and len(workers) == 2
            ends = re.findall(r"the controller has ended \((-?\d+)\)", served.log())
            assert ends == ["1"] * MOST_RESTARTS, "one by the file, four by the request"
            told = json.loads((tmp_path / "line-1.json").read_text())["traceEvents"]
            assert any(each.get("cat") == "step" for each in told), "what the first one has done"
            with pytest.raises((openai.APIError, httpx.TransportError)):  # one too many: no other controller comes
                await all_under_way(served, client, then)
        assert await asyncio.to_thread(served.process._process.wait, WAIT_S) == 1
        assert "RuntimeError: a bug" in served.log()


def test_the_log_tells_each_end_once(fronted):
    """Of the module's kills."""
    ends = re.findall(r"the controller has ended \((-?\d+)\)", fronted.log())
    assert ends and set(ends) == {"-9"}
