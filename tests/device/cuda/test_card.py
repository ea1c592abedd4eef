"""Streams, events, graphs and copies: of a card where there is one, else of a pretended one, as strict."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pretendedcard import PretendedCard

from jettison.device.cuda import card as card_module
from jettison.device.cuda.card import Card
from jettison.errors import ConfigError

ON_CARD = torch.cuda.is_available()
pytestmark = pytest.mark.cuda
SIZE = 1 << 20


@pytest.fixture
def card():
    card = Card() if ON_CARD else PretendedCard(polls_an_event=3)
    card.start()
    yield card
    card.synchronize()
    card.close()
    card.close()


def numbers(card) -> torch.Tensor:
    return torch.arange(SIZE, device=card.device).to(torch.uint8)


def test_an_event_is_reached_when_what_came_before_it_is_done(card):
    host, there = card.pinned(SIZE), numbers(card)
    card.copy_out(there, host)
    event = card.record()
    while not event.done():
        pass
    assert event.done(), "it stays reached"
    assert torch.equal(host, there.cpu())


def test_a_thread_waits_for_an_event_or_for_its_stream(card):
    host, there = card.pinned(SIZE), numbers(card)
    for wait in (lambda: card.record(sleeps=True).synchronize(), card.synchronize):
        host.zero_()
        card.copy_out(there, host)
        wait()
        assert torch.equal(host, there.cpu())


def test_another_thread_copies_beside_steps_behind_what_they_wrote(card):
    host, there = card.pinned(SIZE), card.empty(SIZE)
    there.copy_(numbers(card))
    written, seen = card.record(), []

    def copy() -> None:
        with card.beside():
            written.wait()
            card.copy_out(there, host)
            card.record(sleeps=True).synchronize()
            seen.append(torch.equal(host, numbers(card).cpu()))

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert seen == [True]


def test_a_graph_reads_and_writes_the_memory_of_its_capture(card):
    source, target = card.empty(SIZE).zero_(), card.empty(SIZE).zero_()
    graph = card.capture(lambda: target.copy_(source + 1))
    for value in (3, 9):
        source.fill_(value)
        graph.replay()
        card.synchronize()
        assert set(target.tolist()) == {value + 1}


@pytest.mark.skipif(ON_CARD, reason="what a pretended card alone notices")
def test_a_pretended_card_notices_what_does_not_wait(card):
    host, there = card.pinned(SIZE), numbers(card)
    host.zero_()
    card.copy_out(there, host)
    assert not host.any(), "it is not there yet"
    card.synchronize()
    card.copy_in(host, there)
    host[5] += 1
    with pytest.raises(AssertionError, match="pinned memory has changed"):
        card.synchronize()
    with pytest.raises(AssertionError, match="is not pinned"):
        card.copy_in(torch.zeros(SIZE, dtype=torch.uint8), there)


class FakeDriver(SimpleNamespace):
    """What ``copy_many`` calls of the driver's bindings."""

    def __init__(self, has_batches: bool) -> None:
        super().__init__(
            CUstream=lambda handle: ("stream", handle), CUdeviceptr=lambda address: ("at", address),
            CUmemcpyAttributes=SimpleNamespace, CUmemcpySrcAccessOrder=SimpleNamespace(
                CU_MEMCPY_SRC_ACCESS_ORDER_STREAM="in order of the stream"),
            CUmemcpyFlags=SimpleNamespace(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE=1),
        )  # fmt: skip
        self.log, self.has_batches, self.code = [], has_batches, 0

    def cuMemcpyBatchAsync(self, targets, sources, sizes, count, attributes, firsts, num_attributes, stream):
        if not self.has_batches:
            raise RuntimeError('Function "cuMemcpyBatchAsync" not found')
        assert len(targets) == len(sources) == len(sizes) == count
        assert (len(attributes), firsts, num_attributes) == (1, [0], 1)
        assert vars(attributes[0]) == {"srcAccessOrder": "in order of the stream", "flags": 1}
        self.log.append((targets, sources, sizes, stream))
        return (self.code,)

    def cuMemcpyAsync(self, target, source, size, stream):
        self.log.append((target, source, size, stream))
        return (self.code,)


@pytest.mark.parametrize("has_batches", [True, False])
def test_many_copies_are_one_call_where_the_driver_has_it(monkeypatch, has_batches):
    driver, card = FakeDriver(has_batches), Card()
    monkeypatch.setattr(card_module.importlib, "import_module", lambda name: driver)
    monkeypatch.setattr(card, "_stream_handle", lambda: 7)
    sources, targets, sizes = np.array([[32, 64], [512, 1024], [16, 48]])
    for _ in range(2):
        card.copy_many(sources, targets, sizes)
    one_by_one = [
        (("at", 512), ("at", 32), 16, ("stream", 7)), (("at", 1024), ("at", 64), 48, ("stream", 7))
    ]  # fmt: skip
    at_once = ([("at", 512), ("at", 1024)], [("at", 32), ("at", 64)], [16, 48], ("stream", 7))
    assert driver.log == (2 * [at_once] if has_batches else 2 * one_by_one)
    card.copy_many(sources[:0], targets[:0], sizes[:0])
    card.copy_many(sources[:1], targets[:1], sizes[:1])
    assert driver.log[-1] == one_by_one[0] and len(driver.log) == (3 if has_batches else 5)
    driver.code = SimpleCode(1)
    with pytest.raises(RuntimeError, match="a copy is refused: CUDA_ERROR_INVALID_VALUE"):
        card.copy_many(sources, targets, sizes)


class SimpleCode(int):
    name = "CUDA_ERROR_INVALID_VALUE"


@pytest.mark.skipif(ON_CARD, reason="there is a card")
def test_without_a_card_a_start_says_so_in_one_line():
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        Card().start()
