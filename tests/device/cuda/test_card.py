"""Streams, events, graphs and copies: of a card where there is one, else of a pretended one, as strict."""

from __future__ import annotations

import threading

import pytest
import torch
from pretendedcard import PretendedCard

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


def test_time_passes_between_timed_events(card):
    first = card.record(is_timed=True)
    numbers(card)
    second = card.record(is_timed=True)
    second.synchronize()
    assert second.ns_since(first) > 0


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


@pytest.mark.skipif(ON_CARD, reason="there is a card")
def test_without_a_card_a_start_says_so_in_one_line():
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        Card().start()
