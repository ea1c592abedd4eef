"""Lives of peers: the newest one that is not over is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jettison.live.wire.messages import PeerAddress
from jettison.live.worker.known import KnownPeers
from jettison.transport.handshake import Identity

lives = st.integers(0, 5)


@given(st.lists(st.tuples(st.booleans(), lives)))
def test_what_is_over_stays_so_whatever_comes_late(history):
    known, over = KnownPeers(), -1
    present = None
    for is_end, life in history:
        if is_end:
            known.end(1, life)
            over = max(over, life)
            present = None if present is not None and present <= over else present
        else:
            known.add([PeerAddress(1, life, f"unix:/{life}")])
            present = life if life > over else present
        assert [known.is_over(Identity(1, n)) for n in range(6)] == [n <= over for n in range(6)]
        found = known.find(1)
        assert (None if found is None else found.life) == present and (1 in known) == (present is not None)
    assert 2 not in known and not known.is_over(Identity(2, 0))
