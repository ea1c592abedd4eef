"""Who waits for the compiler of constraints, in whose turn, and how long."""

from __future__ import annotations

import asyncio
import threading

import pytest
from fake_engine import FakeEngine
from served import eventually

from jettison.server import compiling
from jettison.server.compile_jobs import Compiled
from jettison.server.compiling import RECEIVE, TENANT, GrammarCompiler
from jettison.server.errors import ApiError
from jettison.server.structured import Constraint


class Asked:
    """A compiler without its child: what it compiles it notes, and holds until ``go`` is set."""

    def __init__(self) -> None:
        self.compiler = GrammarCompiler({})
        self.compiler._ask = self._ask
        self.order: list[str] = []
        self.go = threading.Event()

    def _ask(self, constraint):
        self.go.wait(30)
        self.order.append(constraint.text)
        return Compiled(grammar="start: " + constraint.text)

    def ask(self, tenant, text, receive=None):
        """A request of this tenant; it waits as soon as the loop turns."""

        async def asking():
            TENANT.set(tenant)
            RECEIVE.set(receive)
            return await self.compiler.compiled(Constraint("regex", text))

        return asyncio.create_task(asking())

    @property
    def queued(self):
        return {tenant: [one.constraint.text for one in queue] for tenant, queue in self.compiler._queues.items()}


@pytest.fixture
def asked():
    asked = Asked()
    yield asked
    asked.go.set()
    asked.compiler.close()


async def turns():
    for _ in range(4):
        await asyncio.sleep(0)


async def test_a_constraint_of_two_tenants_goes_with_the_first_turn_of_either(asked):
    tasks = [asked.ask("a", f"a{at}") for at in range(4)] + [asked.ask("a", "both")]
    await turns()
    tasks += [asked.ask("b", "both"), asked.ask("b", "b1"), asked.ask("a", "both")]
    await turns()
    assert asked.queued == {"a": ["a1", "a2", "a3", "both"], "b": ["both", "b1"]}
    asked.go.set()
    await asyncio.gather(*tasks)
    assert asked.order == ["a0", "a1", "both", "a2", "b1", "a3"]
    assert not asked.queued and not asked.compiler._under_way


async def test_what_is_joined_counts_for_the_joiners_bound(asked, monkeypatch):
    monkeypatch.setattr(compiling, "MAX_OF_A_TENANT", 2)
    tasks = [asked.ask("a", text) for text in ("a0", "x", "y")] + [asked.ask("b", text) for text in ("b0", "b1")]
    await turns()
    with pytest.raises(ApiError, match="Too many constraints") as caught:
        await asked.ask("b", "x")
    assert caught.value.status == 503
    tasks += [asked.ask("b", "b1"), asked.ask("b", "a0")]  # its own, and the one that is being compiled
    await turns()
    asked.go.set()
    await asyncio.gather(*tasks)


async def test_what_no_request_waits_for_any_more_is_not_compiled(asked):
    held = asked.ask("a", "a0")
    await turns()
    left, shared, joined = asked.ask("a", "left"), asked.ask("a", "shared"), asked.ask("b", "shared")
    await turns()
    left.cancel()
    shared.cancel()
    await turns()
    assert asked.queued == {"b": ["shared"]} and len(asked.compiler._under_way) == 2
    again = asked.ask("c", "left")  # it does not join what was dropped
    await turns()
    asked.go.set()
    assert await asyncio.gather(held, joined, again) == ["start: a0", "start: shared", "start: left"]
    assert asked.order == ["a0", "shared", "left"]
    assert left.cancelled() and shared.cancelled()


async def test_a_request_whose_client_leaves_waits_no_longer(asked):
    gone = asyncio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    held = asked.ask("a", "a0")
    await turns()
    leaving = asked.ask("a", "a1", receive)
    staying = asked.ask("a", "a2", receive=asyncio.Event().wait)
    await turns()
    gone.set()
    with pytest.raises(ApiError) as caught:
        await leaving
    assert caught.value.status == 499
    asked.go.set()
    assert await asyncio.gather(held, staying) == ["start: a0", "start: a2"]
    assert asked.order == ["a0", "a2"]


async def test_a_client_that_leaves_the_server_leaves_the_queue(serve):
    go, order = threading.Event(), []

    def ask(constraint):
        go.wait(30)
        order.append(constraint.text)
        return Compiled(grammar="start: /a/")

    engine = FakeEngine()
    async with serve(engine, api_keys=("one", "two")) as served:
        compiler = served.state.grammars
        compiler._ask = ask
        try:
            body = {"model": "fake", "prompt": "hi"}
            ask_for = [asyncio.create_task(
                served.post("/v1/completions", body | {"guided_regex": text}, headers={"authorization": "Bearer one"}))
                for text in ("a", "b", "c")]  # fmt: skip
            await eventually(lambda: len(compiler._under_way) == 3)
            (tenant,) = compiler._queues
            assert tenant and [one.constraint.text for one in compiler._queues[tenant]] == ["b", "c"]
            ask_for[1].cancel()
            await eventually(lambda: len(compiler._under_way) == 2)
            go.set()
            answers = await asyncio.gather(ask_for[0], ask_for[2])
            assert [answer.status_code for answer in answers] == [200, 200] and order == ["a", "c"]
            assert served.state.admission.num_active == 0
        finally:
            go.set()
