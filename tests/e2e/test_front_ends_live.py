"""Two front ends before one controller: one is killed in the midst, and only its own connections notice."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import openai
import psutil
import pytest
from e2e_server import MODEL, WAIT_S, eventually

pytestmark = pytest.mark.live

LENGTH = 600
LONG = 2000
"""An answer of which most is still to come when a signal falls, even if this process is kept waiting before it."""
NUM_STREAMS = 12


@pytest.fixture(scope="module")
def fronted(serving, memory_for):
    with serving(memory=memory_for(700), api_servers=2, shutdown_timeout=60) as served:
        yield served


def front_pids(pid: int) -> list[int]:
    return sorted(child.pid for child in psutil.Process(pid).children() if is_front(child))


def is_front(process: psutil.Process) -> bool:
    try:
        return "jettison.server.fronts.process" in process.cmdline()
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return False


def num_clients(pid: int, port: int) -> int:
    connections = psutil.Process(pid).net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in connections)


async def opened(client: openai.AsyncOpenAI, number: int, length: int = LENGTH):
    stream = await client.completions.create(
        model=MODEL, prompt=[number, 2, 3], max_tokens=length, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True})
    return [await anext(stream)], stream


def ids(chunks) -> list[int]:
    return [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids or ()]


async def read_on(chunks, stream) -> list[int]:
    chunks += [chunk async for chunk in stream]
    return ids(chunks)


async def alone(client: openai.AsyncOpenAI, number: int) -> list[int]:
    return await read_on(*await opened(client, number))


async def test_kill_9_of_one_ends_its_own_streams_only(fronted):
    """The other's streams are exact, the killed one's get an error, and each succeeds when it is tried again; one is
    started again; nothing of the cancelled requests stays."""
    async with fronted.async_client() as client, httpx.AsyncClient() as http:
        before = front_pids(fronted.pid)
        assert len(before) == 2
        assert [psutil.Process(pid).name() for pid in before] == ["jettison-front"] * 2
        assert psutil.Process(fronted.pid).name() == "jettison-parent"
        open_streams = [await opened(client, number) for number in range(NUM_STREAMS)]
        while not all(num_clients(pid, fronted.process.port) for pid in before):
            open_streams.append(await opened(client, len(open_streams)))
        os.kill(before[0], signal.SIGKILL)
        results = await asyncio.gather(*(read_on(*each) for each in open_streams), return_exceptions=True)
        lost = [number for number, result in enumerate(results) if isinstance(result, BaseException)]
        assert lost and len(lost) < len(results)
        assert all(isinstance(results[number], openai.APIError | httpx.TransportError) for number in lost)
        await asyncio.to_thread(
            eventually, lambda: before[0] not in front_pids(fronted.pid) and len(front_pids(fronted.pid)) == 2, "begun")
        # The retries, and for the others what they should have got: none goes to the one that does not serve yet.
        once = client.with_options(max_retries=0)
        again = await asyncio.gather(*(alone(once, number) for number in range(len(results))))
        assert {len(tokens) for tokens in again} == {LENGTH}
        assert all(result == again[number] for number, result in enumerate(results) if number not in lost)
        assert before[0] not in front_pids(fronted.pid) and before[1] in front_pids(fronted.pid)
        async with asyncio.timeout(WAIT_S):
            while (await http.get(f"{fronted.url}/health")).json()["front_ends"] != {"alive": 2, "total": 2}:
                await asyncio.sleep(0.05)
    await asyncio.to_thread(fronted.wait_idle)


async def test_metrics_of_any_are_the_sum_of_all_and_lose_nothing_with_one(fronted):
    name = "vllm:request_success_total"
    async with fronted.async_client() as client:
        start = await asyncio.to_thread(fronted.metric, name)
        await asyncio.gather(*(alone(client, number) for number in range(8)))  # a connection each
        assert await asyncio.to_thread(fronted.metric, name) == start + 8
        victim = front_pids(fronted.pid)[-1]
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(
            eventually, lambda: victim not in front_pids(fronted.pid) and len(front_pids(fronted.pid)) == 2, "again")
        assert await asyncio.to_thread(fronted.metric, name) == start + 8
        await alone(client, 1)


async def test_the_first_signal_lets_streams_of_both_end_and_then_every_process(serving, memory_for):
    with serving(memory=memory_for(700), api_servers=2, shutdown_timeout=60) as served:
        pids = served.pids()
        async with served.async_client() as client:
            open_streams = [await opened(client, number) for number in range(4)]
            os.kill(served.pid, signal.SIGTERM)
            for pid in front_pids(served.pid):
                os.kill(pid, signal.SIGTERM)  # as a service manager does
            results = await asyncio.gather(*(read_on(*each) for each in open_streams))
            assert [len(result) for result in results] == [LENGTH] * 4
        assert await asyncio.to_thread(served.process._process.wait, WAIT_S) == 0
        eventually(lambda: not any(map(psutil.pid_exists, pids)), "no process is left")


async def test_front_ends_end_with_a_controller_that_is_killed(serving, memory_for):
    with serving(memory=memory_for(700), api_servers=2) as served:
        fronts = front_pids(served.pid)
        async with served.async_client() as client:
            chunks, stream = await opened(client, 1, LONG)
            os.kill(served.pid, signal.SIGKILL)
            with pytest.raises((openai.APIError, httpx.TransportError)):
                await read_on(chunks, stream)
        eventually(lambda: not any(map(psutil.pid_exists, fronts)), "no front end is left")
