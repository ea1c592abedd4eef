"""Tokenizer requests have bytes and places of their own, and no tenant takes all of them."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

import pytest
from fake_engine import FakeEngine

from jettison.errors import KeyLimitError, OverCapacityError
from jettison.server.limits import Admission
from jettison.server.settings import ServerSettings

MIB = 1 << 20


def admission(**settings):
    return Admission(FakeEngine(), ServerSettings(model_names=("fake",), **settings))


async def body_of(job, num_bytes):
    async def receive():
        return {"type": "http.request", "body": bytes(num_bytes), "more_body": False}

    return await job.read_body(receive)


async def held(admission, stack, tenants):
    """How many bodies of 4 MiB are taken of each tenant, in turns, until one is refused to each."""
    taken, refused = Counter(), {}
    while len(refused) < len(tenants):
        for tenant in tenants:
            if tenant in refused:
                continue
            job = await stack.enter_async_context(admission.side.job(tenant, reads_chats=True))
            try:
                await body_of(job, 4 * MIB)
                taken[tenant] += 1
            except OverCapacityError as error:
                refused[tenant] = type(error)
    return dict(taken), set(refused.values())


@pytest.mark.parametrize(("tenants", "taken", "why"), [
    ([""], {"": 16}, OverCapacityError),
    (["a"], {"a": 8}, KeyLimitError),
    (["a", "b"], {"a": 5, "b": 5}, KeyLimitError),
])  # fmt: skip
async def test_bytes_are_bounded_together_and_by_tenant(tenants, taken, why):
    bounds = admission()
    async with AsyncExitStack() as stack:
        assert await held(bounds, stack, tenants) == (taken, {why})
        total = 4 * MIB * sum(taken.values())
        assert (bounds._num_buffered_bytes, bounds.side.num_bytes.total()) == (total, total)
        async with bounds.side.job("newcomer", reads_chats=True) as job:
            if tenants != [""]:
                assert len(await body_of(job, 4 * MIB)) == 4 * MIB
        with bounds.arrival("a") as arrival:  # a generating request has room, whatever these hold
            assert len(await body_of(arrival, 4 * MIB)) == 4 * MIB
    assert (bounds._num_buffered_bytes, bounds.side.num_bytes, bounds.side.num_jobs) == (0, {}, {})


async def test_a_body_alone_may_have_what_a_message_may_have():
    bounds = admission(max_body_bytes=80 * MIB)
    async with bounds.side.job("a", reads_chats=True) as job:
        assert len(await body_of(job, 80 * MIB)) == 80 * MIB
        async with bounds.side.job("b") as other:
            with pytest.raises(OverCapacityError):
                await body_of(other, 1)
    assert bounds._num_buffered_bytes == bounds.num_side_jobs == 0


async def test_places_are_shared_by_tenants():
    bounds = admission(max_side_jobs=6)
    async with AsyncExitStack() as stack:
        for tenant in "aaab":
            await stack.enter_async_context(bounds.side.job(tenant))
        for tenant in "ab":
            with pytest.raises(KeyLimitError):
                await stack.enter_async_context(bounds.side.job(tenant))
        for tenant in "cd":
            await stack.enter_async_context(bounds.side.job(tenant))
        with pytest.raises(OverCapacityError, match="6 tokenizer requests"):
            await stack.enter_async_context(bounds.side.job("e"))
    assert bounds.num_side_jobs == 0


async def test_a_key_is_told_apart_over_http(serve):
    async with serve(FakeEngine(), api_keys=("one", "two"), max_side_jobs=2) as served:
        side = served.state.admission.side
        async with side.job(served.state.keys.tenant(b"Bearer one")):
            for path, body in (
                ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [65]}),
                ("/v1/messages/count_tokens", {"model": "fake", "messages": [{"role": "user", "content": "x"}]}),
            ):
                full = await served.post(path, body, headers={"authorization": "Bearer one"})
                assert (full.status_code, "this key" in full.text) == (429, True)
                assert (await served.post(path, body, headers={"authorization": "Bearer two"})).status_code == 200
