"""A pass of the packing looks at what has changed alone, and decides what a look at everybody would."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from fakes import BLOCK_SIZE, FakeCluster, Faults
from hypothesis import given
from hypothesis import strategies as st

import jettison.core.ladder.packing.pack as pack
from jettison.core.ladder.packing.desired import Desired, Owed
from jettison.core.ladder.packing.growing import Growths
from jettison.core.ladder.packing.seats import Pool, Seat, Seats
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.packing.closing import plan_closing
from jettison.policy.packing.mell import Packing
from jettison.policy.packing.named import PACKERS
from jettison.policy.packing.params import PackParams
from jettison.policy.packing.types import Arrive, Grip, PackingParams
from jettison.types import Request, SamplingParams
from longrun import part_of


def rung_of(cluster: FakeCluster) -> pack.PackRung:
    rung = cluster.core.ladder.rung("pack")
    assert isinstance(rung, pack.PackRung)
    return rung


class FullWalk(Desired):
    """Looks at everybody in every pass, in the order in which groups have them: what a pass is judged by."""

    def refresh(self, now_ns: int) -> None:
        self._stirred.update(self._cluster.requests, self._seats.by_id)
        super().refresh(now_ns)

    def owed(self) -> Iterator[Owed]:
        self._seats.astray.update(self._seats.by_id)
        return super().owed()

    def _in_turn(
        self, pool: Pool, group: Group, states: list[RequestState], growth: int = 0
    ) -> list[RequestState]:
        wanted = {state.request_id for state in states}
        return [state for state in group.queues.online_requests() if state.request_id in wanted]


def schedule(seed: int) -> list[tuple[object, int, list[object]]]:
    """Every event of some bursts with what was answered: deaths, failures, drops, prefixes, all packers."""
    rng = random.Random(seed)
    num_workers, full_blocks = rng.randint(2, 5), rng.randint(16, 60)
    faults = Faults(apply=0.1, load=0.1, move=0.1, step=0.002, budget=6) if rng.random() < 0.5 else Faults()
    cluster = FakeCluster(
        num_workers=num_workers, full_blocks=full_blocks, seed=seed, policy=rng.choice(["drop", "recompute", "swap"]),
        max_seqs=rng.choice([4, 16]), prefix_caching=rng.random() < 0.5, faults=faults, eager=rng.random() < 0.5,
        migration_kind=rng.choice(["kv", "tokens"]),
        offline=OfflineParams(slo=SloParams(ttft_s=rng.choice([None, 0.01]))),
        packing=PackParams(packer=rng.choice([*PACKERS, "mell"]), epoch_s=0.03, retry_s=0.01),
    )
    cluster.recording, cluster.check_every_event = [], False
    prefix, room, at_ms = [rng.randrange(1, 60) for _ in range(16)], full_blocks * BLOCK_SIZE, 0.0
    for number in range(rng.randint(8, 12 * num_workers)):
        at_ms += rng.expovariate(num_workers / rng.choice([1.0, 20.0]))
        prompt = prefix[: rng.choice([0, 0, 8, 16])] + [rng.randrange(1, 60) for _ in range(rng.randint(1, 60))]
        prompt = prompt[: room - 4]
        cluster.submit(f"r{number}", prompt, min(rng.randint(1, 120), room - len(prompt)), at_ms)
        if rng.random() < 0.1:
            cluster.cancel(f"r{number}", at_ms + rng.uniform(0, 200))
    for order in rng.sample(["drop", "restore"], rng.randint(0, 2)):
        cluster.order_at(order, rng.uniform(0, at_ms))
    if rng.random() < 0.4:
        cluster.kill_at(0, rng.uniform(0, at_ms))
        cluster.restart_at(0, at_ms + 500.0)
    cluster.run()
    rung_of(cluster).desired.check()
    return cluster.recording


@pytest.mark.parametrize("seed", part_of(range(12), range(6)))
def test_a_pass_decides_what_a_look_at_everybody_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = schedule(seed)
    monkeypatch.setattr(pack, "Desired", FullWalk)
    assert found == schedule(seed)


def test_who_decodes_and_has_its_reserve_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(
        policy="recompute", num_workers=3, full_blocks=4000, max_tokens=256, prefix_caching=False,
        packing=PackParams(packer="mell", epoch_s=0.2),
    )
    for number in range(12):
        cluster.submit(f"r{number}", [1 + number] * 30, 3000, ignore_eos=True)
    states, desired = cluster.core.state.requests, rung_of(cluster).desired
    cluster.run(stop=lambda: len(states) == 12 and all(s.num_output > 60 for s in states.values()))
    desired.refresh(cluster.now)  # who has come is looked at
    desired.refresh(cluster.now)
    looked: list[str] = []
    belongs = desired._belongs
    monkeypatch.setattr(desired, "_belongs", lambda s, pool: looked.append(s.request_id) or belongs(s, pool))
    some = states["r3"]
    before = some.num_output
    cluster.run(stop=lambda: some.num_output >= before + 3)
    desired.refresh(cluster.now)
    assert not looked, "they have got three tokens each"
    cluster.core.state.touch(some)
    desired.refresh(cluster.now)
    assert looked == ["r3"]


def test_nobody_is_noted_where_nothing_is_packed() -> None:
    plain = FakeCluster(policy="recompute")
    plain.submit("a", [1] * 8, 4)
    plain.run()
    assert plain.core.state.changes.stirred is None and not plain.core.state.changes.ended
    packed = FakeCluster(policy="recompute", packing=PackParams())
    packed.submit("a", [1] * 8, 40, ignore_eos=True)
    packed.run(stop=lambda: "a" in packed.core.state.requests)
    assert packed.core.state.changes.stirred == {"a"}
    packed.core.ladder.change([n for n in packed.core.params.rungs if n != "pack"])
    assert packed.core.state.changes.stirred is None


CAPACITY = 50


@given(
    steps=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), max_size=60),
    tokens=st.integers(1, 100), more=st.integers(0, 12),
)
def test_who_may_have_outgrown_its_reserve_is_found_before_it_has(
    steps: list[tuple[bool, bool, int]], tokens: int, more: int
) -> None:
    """``steps``: whether it brings the request a token, whether another is in flight then, blocks to be spared."""
    group = FakeCluster(num_workers=1).core.groups[0]
    state = RequestState(Request("a", (1,) * tokens, SamplingParams(max_tokens=1000), 0), 0)
    seats = Seats()
    growths = Growths(seats)
    pool = Pool(Packing(PackingParams(capacity=CAPACITY)), CAPACITY, 0)
    seat = seats.take(Arrive("a", -(-tokens // BLOCK_SIZE) + more), pool, group.group_id)
    growths.arm([seat], [state], group)
    for brings, is_ahead, spare in steps:
        group.counters.num_steps += 1
        group.in_flight = {1: None} if is_ahead else {}  # type: ignore[dict-item]
        group.counters.num_steps += is_ahead
        if brings:
            state.add_token(7)
        held = -(-state.num_tokens // BLOCK_SIZE)
        found = growths.due(group, spare)
        if held + spare > seat.num_blocks and seat.num_blocks < CAPACITY:
            assert found == [seat]
        if found:
            growths.arm([seat], [state], group)
        group.counters.num_steps -= is_ahead
        group.in_flight = {}


def test_a_heap_forgets_what_is_out_of_date() -> None:
    group = FakeCluster(num_workers=1).core.groups[0]
    state = RequestState(Request("a", (1,) * 20, SamplingParams(max_tokens=1000), 0), 0)
    seats = Seats()
    growths, pool = Growths(seats), Pool(Packing(PackingParams(capacity=CAPACITY)), CAPACITY, 0)
    seat: Seat = seats.take(Arrive("a", CAPACITY), pool, group.group_id)
    for _ in range(1000):
        growths.arm([seat], [state], group)
    assert len(growths._heaps[group.group_id]) < 100


def test_no_group_is_emptied_that_an_overfull_one_needs() -> None:
    """Groups of 64 blocks: one holds 70, and another one's requests fit elsewhere. The packing would take that one into
    use again at once, and it would be emptied again, without end."""
    held = {0: (39, 31), 1: (48,), 2: (26, 14), 3: (20, 16)}
    seats, pool = Seats(), Pool(Packing(PackingParams(capacity=64), held), 64, 0, closes=True)
    for device, sizes in held.items():
        for size in sizes:
            arrive = Arrive(f"{device} {size}", size, device, here=device)
            pool.batch.append(arrive)
            seats.grip(seats.take(arrive, pool, device), Grip.HELD, lasts=True)
    seats.apply(pool)
    for request_id in seats.by_id:
        pool.packer.pin(request_id, Grip.HELD)
    desired = Desired.__new__(Desired)
    desired._seats = seats
    sizes = {device: pool.packer.requests_on(device) for device in held}
    assert pool.packer.outgrown == (0,) and plan_closing(sizes, 64)
    rounds = iter(range(9))
    pool.packer.apply = lambda batch, apply=pool.packer.apply: next(rounds) >= 0 and apply(batch)  # type: ignore
    desired._close_some(pool)
    assert {device: pool.packer.requests_on(device) for device in held} == sizes
