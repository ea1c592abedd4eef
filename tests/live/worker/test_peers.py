"""What a worker's links carry and whose turn it is, without a worker: ``WorkerLoop``'s own tests are about when."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from worker_fakes import FakeDevice, fresh_bytes

from jettison.core import ports
from jettison.live.wire import messages as m
from jettison.live.worker.activations import OutgoingActivation
from jettison.live.worker.failpoints import nowhere
from jettison.live.worker.peers import Peers
from jettison.transport.handshake import Identity
from jettison.transport.inproc import InProcessLink
from jettison.transport.link import FrameKind
from jettison.types import LayerRange


class OneEnd:
    """Worker 0's peers, of which there is one, worker 1; ``theirs`` is its end of the link."""

    def __init__(self, activation_slots=8, activation_bytes=1 << 10, kind=InProcessLink, device=None, **more):
        self.events: list[m.Event] = []
        self.lost: list[tuple[int, bool]] = []
        """Who, and whether the input of step 5 was there by then."""
        self.peers = Peers(
            0, device or FakeDevice(), self.events.append,
            lambda worker: self.lost.append((worker, self.peers.inbox.ready(5))),
            **{"piece_bytes": 44, "adapt_pieces": False, "coordinate": True, "shares_clock": False,
               "clock_ns": lambda: 0, "failpoint": nowhere, "wait": None, **more},
        )  # fmt: skip
        self.ours, self.theirs = InProcessLink.pair(
            0, 1, activation_slots=activation_slots, activation_bytes=activation_bytes, bulk_slots=100
        )
        self.ours.__class__ = kind
        self.peers.attach(1, self.ours, 0)

    def received(self):
        frames = []
        for frame in self.theirs.poll_frames():
            with frame:
                frames.append((frame.kind, frame.tag))
        return frames


def test_what_finds_no_room_waits_and_goes_in_order():
    end = OneEnd(activation_slots=1)
    for step_id in (1, 2, 3):
        end.peers.post(1, OutgoingActivation(step_id, fresh_bytes(step_id, 100)))
    for step_id in (1, 2, 3):
        assert end.received() == [(FrameKind.ACTIVATION, step_id)]
        assert end.peers.serve_urgent() == (step_id < 3)


def test_what_is_posted_to_nobody_is_dropped():
    end = OneEnd()
    assert 1 in end.peers and 2 not in end.peers
    end.peers.post(2, OutgoingActivation(1, fresh_bytes(1, 100)))
    assert not end.peers.serve() and end.received() == []


@pytest.mark.parametrize(("coordinate", "num_pieces"), [(True, 1), (False, 12)])
def test_a_turn_is_one_piece_or_without_coordination_all_the_link_takes(coordinate, num_pieces):
    end = OneEnd(coordinate=coordinate)
    end.peers.start_transfer(ports.SendKV(7, 0, 1, LayerRange(0, 4), (1, 2, 3), (4, 5, 6)))
    assert end.peers.run_bulk()
    assert end.received().count((FrameKind.KV_PIECE, 7)) == num_pieces


def test_without_coordination_the_end_of_a_peer_ends_the_turn():
    class Closing(FakeDevice):
        def kv_gather(self, *arguments, **options):
            end.ours.close()
            super().kv_gather(*arguments, **options)

    end = OneEnd(coordinate=False, device=Closing())
    end.peers.start_transfer(ports.SendKV(7, 0, 1, LayerRange(0, 4), (1, 2, 3), (4, 5, 6)))
    assert end.peers.run_bulk()
    assert end.peers.run_bulk() and any(isinstance(event, ports.LinkLost) for event in end.events)


class NothingQueues(InProcessLink):
    queues_bulk = False


@pytest.mark.parametrize(("kind", "is_cut"), [(InProcessLink, True), (NothingQueues, False)])
def test_pieces_are_cut_to_size_only_where_bulk_would_be_in_the_way(kind, is_cut):
    end = OneEnd(kind=kind, device=FakeDevice(kv_block_bytes=1 << 10), piece_bytes=1 << 17, adapt_pieces=True)
    end.peers.start_transfer(ports.SendKV(7, 0, 1, LayerRange(0, 4), tuple(range(16)), tuple(range(16))))
    while end.peers.run_bulk():
        pass
    assert (end.received().count((FrameKind.KV_PIECE, 7)) > 1) == is_cut


def test_a_turn_that_must_not_send_still_writes():
    end = OneEnd()
    end.theirs.send_frame(FrameKind.TRANSFER_BEGIN, 4, b"\0" * 8, 0, lambda out: None)
    end.theirs.send_frame(FrameKind.TRANSFER_END, 4, b"\1", 0, lambda out: None)
    end.peers.start_transfer(ports.SendKV(7, 0, 1, LayerRange(0, 4), (1,), (1,)))
    assert end.peers.serve(False)
    assert end.events == [ports.TransferEnded(4, True, 0, 0)] and end.received() == []


def test_a_move_to_nobody_ends_at_once():
    end = OneEnd()
    end.peers.start_transfer(ports.SendKV(7, 0, 2, LayerRange(0, 4), (1,), (1,)))
    end.peers.cancel_transfer(7)
    assert end.events == [ports.TransferEnded(7, False, 0, 0)]


@pytest.mark.parametrize("num_frames", [1, 2])
def test_who_is_lost_is_told_when_all_that_came_is_there(num_frames):
    end = OneEnd(activation_bytes=64)
    source, copied = InProcessLink.pair(1, 0, activation_bytes=64)
    OutgoingActivation(5, fresh_bytes(5, 128)).send(source)
    for frame in list(copied.poll_frames())[:num_frames]:
        fill = partial(np.copyto, src=frame.payload)
        end.theirs.send_frame(frame.kind, frame.tag, frame.aux, len(frame.payload), fill)
    end.peers.start_transfer(ports.SendKV(7, 0, 1, LayerRange(0, 4), (1,), (1,)))
    end.theirs.close()
    while end.peers.serve():
        pass
    assert end.lost == [(1, num_frames == 2)]
    assert end.events == [ports.TransferEnded(7, False, 0, 0), ports.LinkLost(0, 1, 0)] and end.peers.links == {}


def test_a_fence_closes_links_of_the_lost_life_and_of_older_ones():
    end = OneEnd()
    newer, _ = InProcessLink.pair(0, 1)
    end.peers.attach(1, newer, 2)
    assert not end.ours.is_open and end.lost == [(1, False)]
    end.peers.fence(1, 1)
    assert newer.is_open and 1 in end.peers
    end.peers.fence(1, 2)
    assert not newer.is_open and 1 not in end.peers and end.lost == [(1, False)] * 2


def closed_by_the_other_end(caplog):
    """One end whose peer has closed the link, and which has noticed."""
    caplog.set_level("INFO")
    end = OneEnd()
    end.theirs.close()
    while end.peers.serve_urgent() or end.peers.run_bulk():
        pass
    assert end.lost == [(1, False)] and end.peers.links == {}
    return end


def test_a_link_that_closes_is_noted_and_worth_a_warning_only_if_the_peer_is_lost(caplog):
    """At an orderly shutdown some worker closes its links before the others are told to stop."""
    end = closed_by_the_other_end(caplog)
    (record,) = caplog.records
    assert record.levelname == "INFO" and record.getMessage().startswith("link to worker 1 closed: ")
    end.peers.fence(1, 0)
    end.peers.fence(1, 0)
    (_, record) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage().startswith("link to worker 1 is down: ")


def test_a_new_link_ends_what_there_was_to_explain(caplog):
    end = closed_by_the_other_end(caplog)
    newer, _ = InProcessLink.pair(0, 1)
    end.peers.attach(1, newer, 1)
    caplog.clear()
    end.peers.fence(1, 0)
    assert caplog.records == [] and newer.is_open


class Opening(InProcessLink):
    """Opens when the test says so, to ``ours``."""

    is_opening = True

    def __init__(self, ours):
        super().__init__(1, None, None, 0, 0)
        self.ours = ours

    def open(self):
        self.settled = self.ours

    def send_frame(self, kind, tag, aux, nbytes, fill):
        return False

    def poll_frames(self):
        return iter(())

    def max_payload(self, kind):
        return self.ours.max_payload(kind)


class OneDoor:
    """Leads to worker 1, by as many links as are asked for."""

    wants_write = is_opening = False

    def __init__(self, opens_at_once=False):
        self.opens_at_once = opens_at_once
        self.dialled, self.ends = [], []

    def close_halves(self, is_wanted):
        pass

    def fileno(self):
        return -1

    def dial(self, peer):
        ours, theirs = InProcessLink.pair(0, 1)
        link = Opening(ours)
        if self.opens_at_once:
            link.open()
        self.dialled.append((peer, link))
        self.ends.append(theirs)
        return link


PEER, NEXT = m.PeerAddress(1, 0, "unix:/there"), m.PeerAddress(1, 1, "unix:/again")


class Dialler(OneEnd):
    """Worker 0, which knows worker 1 and has no link to it yet."""

    def __init__(self, **more):
        self.door = OneDoor(**more)
        super().__init__()
        self.peers = Peers(
            0, FakeDevice(), self.events.append, lambda worker: self.lost.append((worker, False)), piece_bytes=4096,
            adapt_pieces=False, coordinate=True, shares_clock=True, clock_ns=lambda: 0, failpoint=nowhere, wait=None,
            doors=self.door,
        )
        self.peers.know([PEER])

    def ask(self):
        self.peers.post(1, OutgoingActivation(5, fresh_bytes(5, 100)))
        self.peers.start_transfer(ports.SendKV(7, 0, 1, LayerRange(0, 4), (1,), (1,)))

    def arrived(self, index=0):
        """Kinds of all that the other end gets, sorted."""
        kinds, busy = [], True
        while busy:
            busy = self.peers.serve()
            for frame in self.door.ends[index].poll_frames():
                with frame:
                    kinds.append(frame.kind)
        return sorted(kinds)


def what_is_told(why):
    """Of what was asked, where the peer will not hear of it."""
    return [ports.StepFailed(5, f"no link to worker 1: {why}", 1), ports.TransferEnded(7, False, 0, 0)]


WHAT_WAS_ASKED = [FrameKind.ACTIVATION, FrameKind.TRANSFER_BEGIN, FrameKind.KV_PIECE, FrameKind.TRANSFER_END]


@pytest.mark.parametrize("opens_at_once", [False, True])
def test_a_link_is_opened_when_it_is_first_used_and_what_is_meant_for_it_waits(opens_at_once):
    end = Dialler(opens_at_once=opens_at_once)
    assert 1 in end.peers and end.door.dialled == [] and not end.peers.serve()
    end.ask()
    end.ask()
    assert [peer for peer, _ in end.door.dialled] == [PEER]
    if not opens_at_once:
        assert end.arrived() == []
        end.door.dialled[0][1].open()
    assert end.arrived() == sorted(2 * WHAT_WAS_ASKED) and end.lost == [] and end.events == []


def test_what_is_called_off_before_its_link_is_open_has_ended():
    end = Dialler()
    end.ask()
    end.peers.cancel_transfer(7)
    assert end.events == [ports.TransferEnded(7, False, 0, 0)]
    end.door.dialled[0][1].open()
    assert end.arrived() == [FrameKind.ACTIVATION] and len(end.events) == 1


def test_a_peer_s_own_connection_takes_the_place_of_the_one_that_is_opening():
    end = Dialler()
    end.ask()
    ours, theirs = InProcessLink.pair(0, 1)
    end.door.ends = [theirs]
    end.peers.attach(1, ours, 0)
    assert end.arrived() == sorted(WHAT_WAS_ASKED) and end.lost == []
    assert not end.door.dialled[0][1].is_open and end.peers.links == {1: ours}


@pytest.mark.parametrize(("me", "state", "wanted"), [
    (0, "known", True), (2, "known", True), (0, "opening", False), (2, "opening", True), (0, "open", False),
    (2, "open", False), (0, "over", False), (2, "over", False),
])  # fmt: skip
def test_which_of_two_connections_stays(me, state, wanted):
    end = Dialler(opens_at_once=state == "open")
    end.peers._worker_id = me
    if state == "over":
        end.peers.forget(1, 0)
    elif state != "known":
        end.ask()
    assert end.peers._is_wanted(Identity(1, 0)) == wanted
    assert end.peers._is_wanted(Identity(1, 1)), "a newer life always is"


def test_the_end_of_a_peer_is_learnt_from_the_controller_where_there_is_no_link():
    end = Dialler()
    end.peers.forget(1, 0)
    assert end.lost == [(1, False)] and 1 not in end.peers
    end.peers.know([PEER])
    assert 1 not in end.peers, "what is over stays so"
    end.ask()
    assert end.events == [ports.TransferEnded(7, False, 0, 0)] and end.door.dialled == []


def test_the_end_of_a_peer_is_learnt_from_the_controller_while_its_link_is_opening():
    end = Dialler()
    end.ask()
    end.peers.forget(1, 0)
    assert end.lost == [(1, False)] and 1 not in end.peers and end.events == what_is_told("closed")


def test_the_end_of_a_peer_with_a_link_is_learnt_from_the_link():
    end = Dialler(opens_at_once=True)
    end.ask()
    end.peers.forget(1, 0)
    assert end.lost == [] and 1 in end.peers
    end.door.ends[0].close()
    while end.peers.serve():
        pass
    assert end.lost == [(1, False)] and 1 not in end.peers


@pytest.mark.parametrize("how", ["cut", "fenced"])
def test_a_link_that_is_gone_is_not_opened_again_but_to_the_next_life(how):
    end = Dialler(opens_at_once=True)
    end.ask()
    if how == "cut":
        end.door.ends[0].close()
        while end.peers.serve():
            pass
    else:
        end.peers.fence(1, 0)
    end.peers.know([PEER])
    end.ask()
    assert len(end.door.dialled) == 1 and 1 not in end.peers
    end.peers.know([NEXT])
    end.ask()
    assert [peer for peer, _ in end.door.dialled] == [PEER, NEXT]


def test_a_peer_s_next_life_ends_the_link_to_the_one_before():
    end = Dialler(opens_at_once=True)
    end.ask()
    end.peers.know([NEXT])
    assert end.lost == [(1, False)] and end.peers.links == {}
    end.ask()
    end.peers.forget(1, 0)
    assert len(end.door.dialled) == 2 and 1 in end.peers


def test_delays_are_as_measured_with_one_clock_and_beyond_the_fastest_with_two():
    transits_ns = [-700, -900, -400]
    assert [OneEnd(shares_clock=True).peers.delay_ns(1, ns) for ns in transits_ns] == transits_ns
    end = OneEnd()
    assert [end.peers.delay_ns(1, ns) for ns in transits_ns] == [0, 0, 500]
    assert end.peers.delay_ns(2, 30) == 30
