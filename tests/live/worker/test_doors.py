"""Workers that open links to each other when they first use them, over real sockets, in one thread."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import tempfile
from itertools import permutations

import numpy as np
import pytest
from worker_fakes import FakeDevice, fresh_bytes

from descriptors import no_descriptor_left
from jettison.core import ports
from jettison.live.wire import messages as m
from jettison.live.worker.activations import OutgoingActivation
from jettison.live.worker.doors import Doors
from jettison.live.worker.failpoints import nowhere
from jettison.live.worker.peers import DOORS, Peers
from jettison.transport import sockets
from jettison.transport.authority import Authority
from jettison.transport.dialling import PATIENCE_NS, PAUSE_NS, Dialling
from jettison.transport.handshake import Identity, Purpose
from jettison.transport.inproc import InProcessLink
from jettison.transport.shm import ShmLink
from jettison.transport.sockets import listening_socket
from jettison.transport.tcp import TcpLink
from jettison.transport.tls import Credentials, TlsContexts
from jettison.types import LayerRange
from waiting import PATIENCE_S

SECRET = b"s" * 32


class Workers:
    """``hosts``: of each worker, by id. Those of one host meet over shared memory, others over TCP."""

    def __init__(self, hosts, coordinate=True):
        self.folder = tempfile.TemporaryDirectory()
        self.now_ns = self.tick_ns = 0
        """By the doors' clock; and how far it goes each turn."""
        self.lost = [[] for _ in hosts]
        self.events = [[] for _ in hosts]
        self.devices = [FakeDevice(i) for i in range(len(hosts))]
        near = [f"unix:{self.folder.name}/{i}" for i in range(len(hosts))]
        socks = [[listening_socket(address, seqpacket=True), listening_socket("tcp:127.0.0.1:0")] for address in near]
        far = [f"tcp:127.0.0.1:{pair[1].getsockname()[1]}" for pair in socks]
        self.doors = [
            Doors(pair, Credentials(SECRET, Identity(i, 0)), bulk_bytes=1 << 16, coordinate=coordinate,
                  bytes_per_s=None, clock_ns=lambda: self.now_ns)
            for i, pair in enumerate(socks)
        ]
        self.peers = [
            Peers(
                i, self.devices[i], self.events[i].append, self.lost[i].append, piece_bytes=256, adapt_pieces=False,
                coordinate=coordinate, shares_clock=True, clock_ns=lambda: 0, failpoint=nowhere, wait=None, doors=doors,
            )
            for i, doors in enumerate(self.doors)
        ]
        for a, peers in enumerate(self.peers):
            others = [b for b in range(len(hosts)) if b != a]
            peers.know([m.PeerAddress(b, 0, near[b] if hosts[a] == hosts[b] else far[b]) for b in others])

    def turn(self, draw):
        """One of a worker drawn by lot, or only of what it dials: both may be proven before either looks who comes."""
        self.now_ns += self.tick_ns
        peers = draw.choice(self.peers)
        if draw.random() < 0.5:
            peers.serve()
        else:
            for peer in list(peers._peers.values()):
                if peer.link.is_opening:
                    peers._receive(peer)

    def turns(self, holds, seed=0):
        """Until it holds."""
        draw = random.Random(seed)
        for _ in range(200_000):
            if holds():
                return
            self.turn(draw)
        raise AssertionError("nothing happened")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for peers, doors in zip(self.peers, self.doors, strict=True):
            peers.close()
            doors.close()
        self.folder.cleanup()


def post(workers, source, target, step_id):
    workers.peers[source].post(target, OutgoingActivation(step_id, fresh_bytes(step_id, 100)))


@pytest.mark.parametrize(("hosts", "coordinate", "kind"), [
    ("aa", True, ShmLink), ("ab", True, TcpLink), ("ab", False, TcpLink),
])  # fmt: skip
def test_a_link_is_opened_by_its_first_use_as_the_pair_s_hosts_ask(hosts, coordinate, kind):
    with Workers(hosts, coordinate) as workers:
        assert all(1 - i in peers and not peers.links for i, peers in enumerate(workers.peers))
        post(workers, 1, 0, 5)
        workers.turns(lambda: workers.peers[0].inbox.ready(5))
        assert [type(peers.links[1 - i]) for i, peers in enumerate(workers.peers)] == [kind, kind]
        assert not any(peers.serve() for peers in workers.peers) and workers.lost == [[], []]


def is_ready(doors, wait_s=0.0):
    poll = select.poll()
    poll.register(doors.fileno(), select.POLLIN)
    return bool(poll.poll(1e3 * wait_s))


def test_a_connection_that_waits_for_a_descriptor_is_looked_at_now_and_then_and_not_all_the_time(tmp_path):
    tmp_path.chmod(0o700)
    own = Credentials(SECRET, Identity(0, 0))
    sock = listening_socket(f"unix:{tmp_path}/0", seqpacket=True)
    doors = Doors([sock], own, bulk_bytes=1 << 16, coordinate=True, bytes_per_s=None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.connect(f"{tmp_path}/0")
        with no_descriptor_left():
            for _ in range(2):
                assert is_ready(doors, PATIENCE_S) and not doors.accept(lambda _: True)
                assert not is_ready(doors), "the worker would turn without end"
        assert is_ready(doors, PATIENCE_S) and not doors.accept(lambda _: True) and doors.is_opening
        assert not is_ready(doors)
    assert is_ready(doors, PATIENCE_S), "the caller has gone"
    doors.close()


def test_peers_of_the_same_host_are_not_paced(tmp_path):
    tmp_path.chmod(0o700)
    sock, authority, me = listening_socket(f"unix:{tmp_path}/0", seqpacket=True), Authority(), Identity(0, 0)
    doors = Doors([sock], Credentials(SECRET, me, TlsContexts(authority.papers_for(me))), bulk_bytes=1 << 16,
                  coordinate=True, bytes_per_s=None, clock_ns=lambda: 0)  # fmt: skip
    with contextlib.ExitStack() as callers:
        for _ in range(sockets._BURST + 2):
            callers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)).connect(f"{tmp_path}/0")
        assert doors.accept(lambda _: True) == [] and doors.is_opening
        assert len(doors._acceptors[0].filenos()) == sockets._BURST + 3
        callers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)).connect(f"{tmp_path}/0")
        assert is_ready(doors, PATIENCE_S) and doors.accept(lambda _: True) == []
        assert len(doors._acceptors[0].filenos()) == sockets._BURST + 4 and doors._acceptors[0].pause_s == 0
    doors.close()


def test_strangers_without_a_pause_do_not_keep_a_worker_awake(monkeypatch):
    now_ns, sock = [0], listening_socket("tcp:127.0.0.1:0")
    authority, me = Authority(), Identity(0, 0)
    doors = Doors([sock], Credentials(SECRET, me, TlsContexts(authority.papers_for(me))), bulk_bytes=1 << 16,
                  coordinate=True, bytes_per_s=None, clock_ns=lambda: now_ns[0])  # fmt: skip
    monkeypatch.setattr(sockets, "_PAUSE_S", 1e6)
    with contextlib.ExitStack() as strangers:
        for _ in range(sockets._BURST + 2):
            strangers.enter_context(socket.create_connection(sock.getsockname()))
        while len(doors._acceptors[0].filenos()) <= sockets._BURST:
            assert is_ready(doors, PATIENCE_S) and not doors.accept(lambda _: True)
        assert not is_ready(doors), "two wait, and the worker sleeps"
        now_ns[0] += 2 * 10**15
        monkeypatch.setattr(sockets, "_PAUSE_S", 1e-3)
        doors.accept(lambda _: True)
        assert len(doors._acceptors[0].filenos()) == 3, "those whose time was over are gone, and the two taken"
        monkeypatch.setattr(sockets, "_BURST", 1)
        for _ in range(2):
            strangers.enter_context(socket.create_connection(sock.getsockname()))
        while len(doors._acceptors[0].filenos()) < 5:
            assert is_ready(doors, PATIENCE_S), "the end of a pause wakes it"
            now_ns[0] += 10**6
            doors.accept(lambda _: True)
    doors.close()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("seed", range(24))
def test_workers_that_dial_each_other_at_once_end_up_with_one_link_and_lose_nothing(hosts, seed):
    with Workers(hosts) as workers:
        draw = random.Random(seed)
        workers.tick_ns = draw.choice([0, PAUSE_NS // 4, PAUSE_NS])  # in pauses that are over they dial again
        for _ in range(draw.randrange(4)):
            workers.turn(draw)
        first, second = draw.sample([0, 1], 2)
        post(workers, first, second, 10 + first)
        for _ in range(draw.randrange(6)):
            workers.turn(draw)
        post(workers, second, first, 10 + second)
        workers.peers[0].start_transfer(ports.SendKV(7, 0, 1, LayerRange(0, 4), (1, 2, 3), (4, 5, 6)))
        workers.turns(lambda: workers.peers[0].inbox.ready(11) and workers.peers[1].inbox.ready(10), seed)
        workers.turns(lambda: workers.events[1], seed)
        assert workers.events == [[], [ports.TransferEnded(7, True, 3 * 4 * 40, 0)]]
        assert (workers.devices[1].kv[:, 4:7] == workers.devices[0].kv[:, 1:4]).all()
        assert all(len(peers.links) == 1 for peers in workers.peers) and workers.lost == [[], []]


def test_three_workers_on_two_hosts_that_all_dial_each_other():
    with Workers("aab") as workers:
        for a, b in permutations(range(3), 2):
            post(workers, a, b, 10 * a + b)
        inboxes = [peers.inbox for peers in workers.peers]
        workers.turns(lambda: all(inboxes[b].ready(10 * a + b) for a, b in permutations(range(3), 2)))
        kinds = {(a, b): type(link) for a, peers in enumerate(workers.peers) for b, link in peers.links.items()}
        assert kinds == {(a, b): ShmLink if {a, b} == {0, 1} else TcpLink for a, b in permutations(range(3), 2)}


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_peer_whose_life_is_over_is_not_let_in(hosts):
    with Workers(hosts) as workers:
        workers.peers[0].fence(1, 0)
        post(workers, 1, 0, 5)
        workers.turns(lambda: workers.peers[1].links[0]._resumes_ns is not None)
        assert workers.peers[0].links == {} and not workers.peers[0].inbox.ready(5)
        workers.peers[1].forget(0, 0)
        assert workers.peers[1].links == {} and workers.lost[1] == [0]


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("me", [0, 1])
@pytest.mark.parametrize("how", ["not there", "refuses"])
def test_what_waits_for_a_link_ends_with_the_peer_that_could_not_be_reached(hosts, me, how):
    them = 1 - me
    with Workers(hosts) as workers:
        if how == "not there":
            workers.doors[them].close()
            workers.peers[them]._readiness.forget(DOORS)
        else:
            workers.peers[them].fence(me, 0)
        workers.tick_ns = PAUSE_NS // 4
        post(workers, me, them, 5)
        workers.peers[me].start_transfer(ports.SendKV(7, me, them, LayerRange(0, 4), (1,), (4,)))
        workers.turns(lambda: workers.events[me])
        failed, ended, lost = workers.events[me]
        assert lost == ports.LinkLost(me, them, 0)
        assert isinstance(failed, ports.StepFailed) and (failed.step_id, failed.lost_worker) == (5, them)
        assert ended == ports.TransferEnded(7, False, 0, 0) and workers.lost[me] == [them]
        assert workers.now_ns > PATIENCE_NS // 2, "not before it was tried for a while"
        assert them not in workers.peers[me], "it is not dialled again in the same life"


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("me", [0, 1])
def test_a_peer_that_was_out_of_reach_for_a_moment_is_reached_and_nothing_is_lost(hosts, me):
    them = 1 - me
    with Workers(hosts) as workers:
        where = workers.peers[me]._known.find(them)
        nowhere_yet = f"unix:{workers.folder.name}/later" if hosts == "aa" else "tcp:127.0.0.1:1"
        workers.peers[me].know([m.PeerAddress(them, 0, nowhere_yet)])
        post(workers, me, them, 5)
        link = workers.peers[me].links[them]
        workers.turns(lambda: link._resumes_ns is not None)
        link._address = where.address
        if hosts == "ab":
            host, port = where.address.removeprefix("tcp:").split(":")
            assert (host, int(port)) == ("127.0.0.1", workers.doors[them]._acceptors[1]._sock.getsockname()[1])
        workers.tick_ns = PAUSE_NS // 4
        workers.turns(lambda: workers.peers[them].inbox.ready(5))
        assert workers.events == [[], []] and workers.lost == [[], []]


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_links_are_opened_between_the_layers_of_steps_that_have_nothing_else_to_serve_there(hosts):
    with Workers(hosts) as workers:
        for peers in workers.peers:
            peers.attention.is_live = False
        assert not any(peers.is_opening for peers in workers.peers)
        post(workers, 1, 0, 5)
        assert workers.peers[1].is_opening
        workers.peers[0]._look()  # between two steps: there it learns that a peer comes
        for _ in range(100_000):
            for peers in workers.peers:
                peers.attention.poll()
            if not any(peers.is_opening for peers in workers.peers):
                break
            workers.peers[0]._look()
        workers.turns(lambda: workers.peers[0].inbox.ready(5))


@pytest.mark.parametrize("how", ["forgotten", "fenced", "linked"])
def test_half_a_pair_is_closed_when_it_is_replaced_hung_up_or_not_wanted_any_more(how):
    with Workers("ab") as workers:
        door = workers.doors[0]
        address = workers.peers[1]._known.find(0).address

        def come(purpose):
            dial = Dialling(address, Credentials(SECRET, Identity(1, 0)), purpose)
            for _ in range(100_000):
                if (connection := dial.advance()) is not None:
                    break
                assert door.accept(lambda them: True) == []
            return connection.sock

        def is_closed(sock):
            try:
                return sock.recv(1) == b""
            except BlockingIOError:
                return False
            except ConnectionError:
                return True

        def wait_for(holds):
            for _ in range(100_000):
                assert door.accept(lambda them: True) == []
                if holds():
                    return
            raise AssertionError("nothing happened")

        first = come(Purpose.LINK)
        wait_for(lambda: len(door._halves) == 1)
        second = come(Purpose.LINK)
        wait_for(lambda: is_closed(first))
        second.close()
        third = come(Purpose.URGENT)  # it must not be matched with what the peer has hung up
        wait_for(lambda: {purpose for _, purpose in door._halves} == {Purpose.URGENT})
        assert not workers.peers[0].serve_urgent() and door._halves
        if how == "linked":
            workers.peers[0].attach(1, InProcessLink.pair(0, 1)[0], 0)
        else:
            (workers.peers[0].fence if how == "fenced" else workers.peers[0].forget)(1, 0)
        workers.peers[0].serve_urgent()
        assert is_closed(third) and not door._halves
        for sock in (first, third):
            sock.close()


def test_a_link_that_cannot_be_made_of_what_came_is_closed_and_the_peer_dials_again(monkeypatch):
    with Workers("aa") as workers:
        failures = [OSError("too many open files")]
        make = workers.doors[0]._make

        def make_or_fail(*connections):
            if failures:
                raise failures.pop()
            return make(*connections)

        monkeypatch.setattr(workers.doors[0], "_make", make_or_fail)
        workers.tick_ns = PAUSE_NS // 4
        post(workers, 1, 0, 5)
        workers.turns(lambda: workers.peers[0].inbox.ready(5))
        assert not failures and workers.lost == [[], []]


def test_a_transfer_whose_beginning_is_lost_with_its_link_is_over_when_both_ends_have_told_of_that():
    """As where a connection fails that has taken it, and the other end never hears of it."""
    with Workers("ab") as workers:
        post(workers, 0, 1, 5)
        workers.turns(lambda: workers.peers[1].inbox.ready(5))
        workers.peers[0].start_transfer(ports.SendKV(7, 0, 1, LayerRange(0, 4), (1,), (4,)))
        assert workers.peers[0].run_bulk() and not workers.peers[0]._peers[1].transfers
        workers.peers[1].links[0].close()
        workers.turns(lambda: all(workers.events))
        assert workers.events == [[ports.LinkLost(0, 1, 0)], [ports.LinkLost(1, 0, 0)]]


def test_an_opened_link_wakes_its_owner_only_for_something_new():
    with Workers("aa") as workers:
        post(workers, 0, 1, 5)
        workers.turns(lambda: workers.peers[1].inbox.ready(5))
        while any(peers.serve() for peers in workers.peers):
            pass
        assert [peers._readiness.look() for peers in workers.peers] == [set(), set()]
        post(workers, 1, 0, 6)
        assert workers.peers[0]._readiness.look() == {1}
        assert workers.peers[0].serve() and workers.peers[0].inbox.ready(6)
        assert np.array_equal(workers.peers[0].inbox.take(6).data, fresh_bytes(6, 100))


def test_a_stranger_s_connection_costs_nothing_but_itself():
    with Workers("aa") as workers:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(f"{workers.folder.name}/0")
        stranger.send(b"?" * 82)
        assert not workers.peers[0].serve()
        post(workers, 1, 0, 5)
        workers.turns(lambda: workers.peers[0].inbox.ready(5))
        stranger.close()
