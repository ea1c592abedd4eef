"""MELL's Fig. 9: two sources migrate through one network card. What an epoch begins there, with the card as one port
and with a pair of workers as one link. In virtual time; table and JSON.

    python -m benchmarks packing card [--json OUT]

Two machines with eight RTX 4090 each and one card of 10 Gbit/s (``mell-4090`` with ``link: {card_per_node: true}``).
Sixteen requests of 600 tokens decode on two instances of the first and are wanted on two of the other, all at once.
Every epoch of a second divides those that are left (as KV only). An epoch is overrun where what is under way then takes
the card longer than the epoch, beyond the one move that may reach into the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.servers import greedy
from benchmarks.shared import VIRTUAL, keep, parse, print_block
from jettison.core import ports
from jettison.memory.kvtransfers import MigrationKind
from jettison.sim.cluster import SimulatedCluster
from jettison.simulate.machines import cluster_setup, resolve_machine
from jettison.simulate.spec import parse_spec
from jettison.types import NANOSECONDS, Request

SPEC = {
    "cluster": {"preset": "mell-4090", "instances": 16, "link": {"within_node": False, "card_per_node": True}},
    "workload": {"arrivals": {"process": "poisson", "rate_per_s": 1, "duration_s": 1}, "lengths": {
        "input": {"median": 10, "sigma": 0.1, "cap": 100}, "output": {"median": 10, "sigma": 0.1, "cap": 100}}},
    "settings": {"enable_prefix_caching": False}, "variants": [{"name": "one", "policy": "recompute"}],
}  # fmt: skip
SOURCES, DESTINATIONS = (0, 1), (8, 9)
EPOCHS = 20


@dataclass(frozen=True)
class Epoch:
    """One of a run."""

    num_begun: int
    queued_bytes: int
    """Through the card, with what it has begun."""
    bound_bytes: float
    largest_bytes: float
    """Of its moves."""

    @property
    def load(self) -> float:
        """What is queued over what the card carries in an epoch."""
        return self.queued_bytes / self.bound_bytes

    @property
    def is_overrun(self) -> bool:
        """By more than the last move that it begins."""
        return self.num_begun > 0 and self.queued_bytes > self.bound_bytes + 1.05 * self.largest_bytes


@dataclass(frozen=True)
class Result:
    """A run."""

    epochs: list[Epoch]
    arrived_s: float
    """When the last of the moves had arrived, from the first epoch on."""
    stop_max_ms: float
    """The longest that a request stood still."""


def run(*, knows_cards: bool, num_each: int = 8, num_tokens: int = 600) -> Result:
    """``knows_cards``: the core divides by what machines share; else by pairs of workers."""
    spec = parse_spec(SPEC)
    setup = replace(cluster_setup(resolve_machine(spec.cluster, {}), spec, spec.variants[0], 0), compress=False)
    records: list[ports.Record] = []
    cluster = SimulatedCluster(setup, on_record=records.append)
    core = cluster.core
    if not knows_cards:
        core.reconfigure(replace(core.params, card_of={}))
    card_bytes = setup.topology.between.bytes_per_s * core.params.moves.epoch_s
    homes = {}
    for number in range(len(SOURCES) * num_each):
        homes[f"r{number}"] = DESTINATIONS[number % len(DESTINATIONS)]
        cluster.submit(Request(f"r{number}", (1,) * num_tokens, greedy(4_000), 0), 0)
    states = core.state.requests
    cluster.run(is_over=lambda: len(states) == len(homes) and all(s.num_output > 8 for s in states.values()))
    for index, state in enumerate(list(states.values())):  # they begin where Fig. 9 has them
        source = SOURCES[index % len(SOURCES)]
        if state.group_id != source:
            cluster.request_migration(state.request_id, source, MigrationKind.KV)
    cluster.run(is_over=lambda: core.migrations.is_idle)
    records.clear()
    began_ns, epochs = cluster.loop.now_ns, []
    for _ in range(EPOCHS):
        left = {r: home for r, home in homes.items() if r in states and states[r].group_id != home}
        if not left:
            break
        before = {m.state.request_id for m in core.migrations.under_way}
        cluster.request_migrations({r: home for r, home in left.items() if r not in before}, [MigrationKind.KV])
        begun = [m for m in core.migrations.under_way if m.state.request_id not in before]
        token_bytes = core.state.shape.num_layers * core.state.shape.kv_bytes_per_token_layer
        num_bytes = [m.state.num_tokens * token_bytes for m in begun]
        queued = sum(p.num_bytes for p in core.state.book.transfers.values() if p.ends[0] in SOURCES)
        epochs.append(Epoch(len(begun), queued, card_bytes, max(num_bytes, default=0)))
        cluster.run(until_ns=began_ns + len(epochs) * NANOSECONDS)
    moved = [r for r in records if r.kind == "migrated"]
    stops = [float(str(r.fields["stop_ms"])) for r in moved]
    return Result(epochs, (max(r.time_ns for r in moved) - began_ns) / NANOSECONDS, max(stops))


def main() -> None:
    args = parse(__doc__)
    rows = []
    for knows_cards in (False, True):
        found = run(knows_cards=knows_cards)
        name = "cards" if knows_cards else "pairs of workers"
        begun, loads = [e.num_begun for e in found.epochs], [round(e.load, 2) for e in found.epochs]
        overrun = sum(e.is_overrun for e in found.epochs)
        rows.append({
            "bins": name, "begun": begun, "card_load": loads, "epochs_overrun": overrun, "arrived_s": found.arrived_s,
            "stop_max_ms": found.stop_max_ms,
        })  # fmt: skip
    print_block("shared_card", {"rows": rows})
    keep(args.json, {"rows": rows}, *VIRTUAL)
