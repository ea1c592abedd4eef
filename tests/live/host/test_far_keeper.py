"""What a keeper on another host tells of its workers' hearts."""

from __future__ import annotations

import asyncio

from jettison.live.host.far_keeper import FarKeeper
from jettison.live.wire import host_orders as h
from jettison.live.wire.lease import LeaseTimes, Tenant, boot_clock_s

POST = h.KeeperPost(number=0, life=0, address="tcp:127.0.0.1:1", token_hex="", authority_pem="", lease_s=600.0)
PLACE = h.Place(host="here", ip="127.0.0.1", certificate_pem="")


class Loading:
    """A worker that was silent for a minute while it loaded, as far as its pipe tells."""

    def __init__(self):
        self.began_s = asyncio.get_running_loop().time() - 60.0

    def begin_beats(self, now_s):
        self.began_s = now_s

    def heart_ages_s(self, now_s, away_s):
        return now_s - self.began_s, now_s - self.began_s


async def test_the_time_in_which_a_worker_loads_is_told_in_no_beat():
    """The controller has seen the worker ready; this beat was sent before its ``BeginBeats`` came."""
    keeper, said = FarKeeper(POST, PLACE), []
    keeper._tenant, keeper._keeper, keeper._tell = Tenant(LeaseTimes.of(600.0), boot_clock_s()), object(), said.append
    keeper._children = {7: Loading(), 8: Loading()}
    beating = asyncio.create_task(keeper._beat(keeper._tenant))
    await asyncio.sleep(0)
    assert said == [h.Beat(1, [])]
    keeper._carry_out(h.BeginBeats(7))
    beating.cancel()
    (ages,) = keeper._hearts(0.0)
    assert ages.order == 7 and ages.silent_s < 60.0
