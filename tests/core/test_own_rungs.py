"""What a rung of one's own is asked, as the project's are."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from fakes import FakeCluster

from jettison.core.ladder.hooks import Refusal, check_hooks
from jettison.core.ladder.rung import Rung
from jettison.core.ports import Action
from jettison.errors import ConfigError
from jettison.types import WorkerId


class OwnRung(Rung):
    """Refuses one tenant, has asked for three instances, and notes for whom it gave way."""

    name = "own"
    rank = 5

    gave_way_to: tuple[Rung | None, ...] = ()

    def why_refuse(self, tenant: str, limit: int | None, num_coming: int, now_ns: int) -> Refusal | None:
        return Refusal("not you", 7_000) if tenant == "noisy" else None

    def num_scale_outs(self) -> int:
        return 3

    def missing_bytes(self) -> int:
        return 0

    def lag_blocks(self) -> int:
        return 4

    def give_way(self, worker_ids: Collection[WorkerId], by: Rung | None, why: str, now_ns: int) -> list[Action]:
        self.gave_way_to += (by,)
        return []


def with_own_rung() -> tuple[FakeCluster, OwnRung]:
    cluster = FakeCluster()
    ladder = cluster.core.ladder
    own = OwnRung(ladder.rung("drop").means)
    ladder._set_rungs((own, *ladder.rungs))
    return cluster, own


def test_it_may_refuse_on_arrival() -> None:
    core = with_own_rung()[0].core
    assert core.ladder.why_refuse("noisy", None, 0, 0) == ("not you", 7_000)
    assert core.ladder.why_refuse("quiet", None, 0, 0) is None
    refusal = core.ladder.why_refuse("quiet", 1, 1, 0)
    assert refusal is not None and refusal.message != "not you", "the others are asked, too"


def test_what_it_has_asked_for_and_lags_behind_is_counted() -> None:
    core = with_own_rung()[0].core
    assert core.ladder.num_scale_outs == 3 and core.ladder.lag_blocks == 4
    core.ladder.rung("scale").on_unmet(0, 1, "", 0)
    assert core.ladder.num_scale_outs == 4


def test_half_a_hook_or_a_hook_that_is_no_method_is_refused() -> None:
    class Half(Rung):
        name = "half"

        def place(self, state: object) -> None:
            return None

    class Property(Rung):
        name = "property"

        worker_ids: Collection[WorkerId] = (0,)

    check_hooks(OwnRung)
    for rung, why in ((Half, "has place without closed"), (Property, "worker_ids has to be a method")):
        with pytest.raises(ConfigError, match=why):
            check_hooks(rung)


def test_it_is_told_who_asks_for_way() -> None:
    cluster, own = with_own_rung()
    drop = cluster.core.ladder.rung("drop")
    own.means.ask_way(drop, (0,), "memory", 0)
    cluster.order("drop")
    assert own.gave_way_to == (drop, None), "an administrator is no rung"
