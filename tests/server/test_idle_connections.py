"""Which connection between two requests ends for a client without a place. Rules; ``test_pipelining`` has real ones."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.server.idle_connections import MOST_LEAVING, MOST_LOOKED_AT, IdleConnections


class Transport:
    """Over one end of a pair of sockets."""

    def __init__(self, *, is_closing: bool = False, num_unsent: int = 0, unread: bytes = b"") -> None:
        self.near, self.far = socket.socketpair()
        self.far.sendall(unread)
        self._is_closing, self._num_unsent = is_closing, num_unsent

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return self._num_unsent

    def get_extra_info(self, name: str) -> socket.socket:
        assert name == "socket"
        return self.near

    def close(self) -> None:
        self.near.close()
        self.far.close()


class Connection:
    def __init__(self, **kinds: object) -> None:
        self.transport, self.has_ended = Transport(**kinds), False  # type: ignore[arg-type]

    def end_idle(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("kinds", [{"is_closing": True}, {"num_unsent": 1}, {"unread": b"GET"}])
def test_where_something_would_be_lost_the_next_one_ends(kinds: dict[str, object]) -> None:
    idle, first, second = IdleConnections(), Connection(**kinds), Connection()
    for each in (first, second):
        idle.add(each)
    assert idle.give_way() and second.has_ended and not first.has_ended
    assert first in idle and second not in idle and idle.num_leaving == 1
    assert not idle.give_way()
    idle.lost(second)
    assert idle.num_leaving == 0
    for each in (first, second):
        each.transport.close()


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(0, 8))
def test_the_one_that_has_been_idle_longest_ends_first(moves: list[int], num_needs: int) -> None:
    """Each move: a connection has a request and is idle again."""
    idle, order = IdleConnections(), [Connection() for _ in range(5)]
    found = list(order)
    for each in order:
        idle.add(each)
    for number in moves:
        idle.discard(found[number])
        idle.add(found[number])
        order.remove(found[number])
        order.append(found[number])
    assert [idle.give_way() for _ in range(num_needs)] == [True] * min(5, num_needs) + [False] * max(0, num_needs - 5)
    assert [each.has_ended for each in order] == [True] * min(5, num_needs) + [False] * max(0, 5 - num_needs)
    for each in order:
        each.transport.close()


def test_few_leave_at_a_time_and_few_are_looked_at() -> None:
    idle, all_of_them = IdleConnections(), [Connection() for _ in range(MOST_LEAVING + 1)]
    for each in all_of_them:
        idle.add(each)
    assert all(idle.give_way() for _ in range(MOST_LEAVING)) and not idle.give_way()
    idle.lost(all_of_them[0])
    assert idle.give_way()
    stuck, behind = [Connection(num_unsent=1) for _ in range(MOST_LOOKED_AT)], Connection()
    other = IdleConnections()
    for each in (*stuck, behind):
        other.add(each)
    assert not other.give_way()
    for each in (*all_of_them, *stuck, behind):
        each.transport.close()
