"""The configuration's words, as the policies' numbers."""

from __future__ import annotations

import pytest

from jettison.config import EngineConfig
from jettison.core.configured import cluster_params
from jettison.core.ladder.lists import overload_name
from jettison.core.params import ClusterParams
from jettison.errors import ConfigError
from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.batchworth import BatchPrices
from jettison.policy.movekinds import Fit, MoveParams
from jettison.policy.offline import OfflineParams
from jettison.policy.overload import OverloadParams, Trigger
from jettison.policy.packing.params import Gather, PackParams
from jettison.policy.packing.types import Priorities


def test_what_nobody_has_set_is_as_the_policy_has_it() -> None:
    assert cluster_params(EngineConfig.resolve(model="m"), num_host_slots=0).overload == OverloadParams()


def test_waits_are_set_one_by_one() -> None:
    config = EngineConfig.resolve(model="m", overload_min_wait_ms=7, overload_trigger="pressure")
    overload = cluster_params(config, num_host_slots=0).overload
    assert (overload.min_blocked_s, overload.trigger) == (0.007, Trigger.PRESSURE)


def test_offline_work_that_nobody_has_set_is_as_the_policy_has_it() -> None:
    assert cluster_params(EngineConfig.resolve(model="m"), num_host_slots=0).offline == OfflineParams()


def test_a_step_that_evicted_is_filled_where_it_is_asked_for() -> None:
    config = EngineConfig.resolve(model="m", fill_after_eviction=True)
    assert cluster_params(config, num_host_slots=0).offline == OfflineParams(fills_after_eviction=True)


def test_what_a_batch_is_worth_is_as_it_is_set_and_nothing_by_default() -> None:
    config = EngineConfig.resolve(model="m", price_batch_token=0.5, price_device_second=2, batch_floor=100)
    prices = cluster_params(config, num_host_slots=0).awake.prices
    assert prices == BatchPrices(device_second=2.0, batch_token=0.5, floor_tokens_per_s=100.0)
    unpriced = cluster_params(EngineConfig.resolve(model="m"), num_host_slots=0).awake.prices
    assert unpriced == BatchPrices() and not unpriced.are_there


def test_migrations_that_are_adaptive_have_no_kind_of_their_own() -> None:
    def params(**flags: object) -> ClusterParams:
        return cluster_params(EngineConfig.resolve(model="m", **flags), num_host_slots=0)  # type: ignore[arg-type]

    assert params().migration.kind is MigrationKind.KV and params().moves == MoveParams()
    assert params(migration_kind="tokens").migration.kind is MigrationKind.TOKENS
    assert params(migration_kind="adaptive").migration.kind is None
    assert params(migration_stop_ms=50).moves == MoveParams(stop_s=0.05)


def test_packing_is_a_rung_that_comes_with_its_flag() -> None:
    plain = cluster_params(EngineConfig.resolve(model="m"), num_host_slots=0)
    assert plain.packing is None and "pack" not in plain.rungs
    config = EngineConfig.resolve(
        model="m", packing="mell", packing_epoch_s=0.5, packing_head_room=0.2, packing_moves="kv",
        packing_weight_distance=3, packing_fill=0.9, packing_gather="close", packing_saves="idle",
    )
    params = cluster_params(config, num_host_slots=0)
    assert params.packing == PackParams(
        epoch_s=0.5, head_room=0.2, kinds=frozenset({MigrationKind.KV}), priorities=Priorities(distance=3.0), fill=0.9,
        gather=Gather.CLOSE, saves_idle=True,
    )
    assert {*params.rungs} - {*plain.rungs} == {"pack"}
    assert overload_name(params.rungs, static_pipeline=False) == config.overload.policy


def test_the_division_of_moves_and_the_map_of_machines_are_as_they_are_set() -> None:
    config = EngineConfig.resolve(model="m", migration_fit="first-fit", machines="0,0,1")
    params = cluster_params(config, num_host_slots=0, machine_of={0: 5})
    assert params.moves == MoveParams(fit=Fit.FIRST)
    assert params.machine_of == params.card_of == {0: 0, 1: 0, 2: 1}, "what is told has the last word"
    placed = cluster_params(EngineConfig.resolve(model="m", migration_fit="best-fit"), num_host_slots=0,
                            machine_of={0: 0, 1: 0})  # fmt: skip
    assert placed.moves.fit is Fit.BEST and placed.card_of == {0: 0, 1: 0}


@pytest.mark.parametrize("machines", ["0,x", "0,-1", 3])
def test_a_map_of_machines_is_numbers(machines: object) -> None:
    with pytest.raises(ConfigError, match="machines"):
        EngineConfig.resolve(model="m", machines=machines)
