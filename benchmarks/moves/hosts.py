"""Three hosts, one behind a slower link: a drop, a restore and a migration between them under load, with one of them
cut off or killed in the midst.

Hosts are namespaces of this machine: network, mounts, /tmp and /dev/shm of their own. A and B have 1 Gbit/s, C is
behind 200 Mbit/s and has no folder of the model. A process puts keepers there as Ray's actors do; no Ray runs. Every
run is an engine of its own. All tokens are compared with those of one instance alone, in float64. Exit code 1 where a
token is wrong or missing, a partner was far, no request ran when the host was struck, or one that was cut off counted
as lost only after more than 2 s. Needs root, `ip`, `tc` and `unshare`.

    python -m benchmarks moves hosts
    python -m benchmarks moves hosts --moves drop --ways cut --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.shared import REPOSITORY, keep, parse, print_block
from jettison.core.moving.merging import MergePhase
from jettison.device.model.create import create_model
from jettison.live.engine.engine import Engine
from jettison.live.engine.spawn_far import DEFAULT_LEASE_S, FarSpawner
from jettison.live.engine.spawner import Spawner
from jettison.memory.kvtransfers import MigrationKind
from jettison.types import Request, SamplingParams, WorkerId

sys.path.insert(0, str(REPOSITORY / "tests"))
sys.path.insert(0, str(REPOSITORY / "tests" / "live" / "engine"))

from far_keepers import ProcessPlacer
from host_engines import engine_of

HOSTS = ("a", "b", "c")
"""Worker 0 on the first, and so on."""
MBIT = {"a": 1000, "b": 1000, "c": 200}
FAR_HOST = 2
VICTIM: WorkerId = 1
"""An end of each move: the near partner of a drop, and where requests migrate to."""
MOST_LOST_S = 2.0
NEAR_OVER_FAR = 4.0
PATIENCE_S = 120.0
_NUMBERS = itertools.count()
MOVES, WAYS = ("drop", "restore", "migration"), ("none", "cut", "kill")


def run(*words: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run(words, check=True, capture_output=True)


class Network:
    """The hosts and a bridge between them, which is this machine's own end."""

    def __init__(self) -> None:
        number = next(_NUMBERS)  # what is taken down is gone a while later
        self.tag = f"jh{os.getpid() % 10_000}{number}"
        self.net = f"10.{100 + os.getpid() % 100}.{number % 250}"
        self.own_ip = f"{self.net}.1"

    def name(self, host: str) -> str:
        """Of its namespace, and of this end of its cable."""
        return f"{self.tag}{host}"

    def ip_of(self, host: str) -> str:
        """Its address."""
        return f"{self.net}.{HOSTS.index(host) + 2}"

    def cut(self, host: str) -> None:
        """Take its cable out."""
        run("ip", "link", "set", self.name(host), "down")

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """It is there; gone afterwards, whatever happened."""
        bridge = f"{self.tag}br"
        try:
            run("ip", "link", "add", bridge, "type", "bridge")
            run("ip", "addr", "add", f"{self.own_ip}/24", "dev", bridge)
            run("ip", "link", "set", bridge, "mtu", "9000", "up")
            for host in HOSTS:
                name = self.name(host)
                run("ip", "netns", "add", name)
                run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
                run("ip", "link", "set", name, "mtu", "9000", "master", bridge, "up")
                run("ip", "-n", name, "addr", "add", f"{self.ip_of(host)}/24", "dev", "eth0")
                run("ip", "-n", name, "link", "set", "eth0", "mtu", "9000", "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
                limit = ("root", "handle", "1:", "tbf", "rate", f"{MBIT[host]}mbit", "burst", "64kb", "latency", "50ms")
                for where, device in (((), name), (("-n", name), "eth0")):
                    run("tc", *where, "qdisc", "add", "dev", device, *limit)
                    run("tc", *where, "qdisc", "add", "dev", device, "parent", "1:", "handle", "2:", "pfifo_fast")
            yield
        finally:
            for host in HOSTS:  # the cable, too: a namespace goes when its last connection has
                subprocess.run(("ip", "link", "del", self.name(host)), check=False, capture_output=True)
                subprocess.run(("ip", "netns", "del", self.name(host)), check=False, capture_output=True)
            subprocess.run(("ip", "link", "del", bridge), check=False, capture_output=True)


def inside(network: Network, host: str, hidden: Path) -> tuple[str, ...]:
    """Before a command, for it to run on a host; ``hidden``: a folder of which the far one has nothing."""
    covers = ["/tmp", "/dev/shm", *([str(hidden)] if host == HOSTS[FAR_HOST] else [])]
    mounts = " && ".join(f"mount -t tmpfs tmpfs {folder}" for folder in covers)
    script = f'{mounts} && exec "$@"'
    return ("ip", "netns", "exec", network.name(host), "unshare", "--mount", "sh", "-c", script, "sh")


class Run:
    """One engine, its traffic, one move, and what becomes of the victim's host."""

    def __init__(self, engine: Engine, network: Network | None, placer: ProcessPlacer | None, streams: int) -> None:
        self.engine, self.network, self.placer = engine, network, placer
        rng = random.Random(7)
        self.prompts = [[rng.randrange(256) for _ in range(rng.randint(5, 20))] for _ in range(streams)]
        self.struck_s: float | None = None
        self.lost_s: float | None = None
        self.partners: set[tuple[WorkerId, ...]] = set()
        self.num_running = 0
        """When the host was struck."""

    async def answers(self, num_tokens: int) -> list[list[int]]:
        """Of all prompts at once."""
        return await asyncio.gather(*(self._answer(i, prompt, num_tokens) for i, prompt in enumerate(self.prompts)))

    async def _answer(self, index: int, prompt: list[int], num_tokens: int) -> list[int]:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        events = self.engine.submit(Request(f"q{index}", tuple(prompt), sampling, time.monotonic_ns()))
        return [token.token_id async for event in events for token in event.tokens]

    async def move(self, move: str, way: str) -> None:
        """Have it happen; the victim's host is struck in its midst."""
        core = self.engine.core
        await self._until(lambda: sum(len(g.queues.running) for g in core.groups.values()) >= len(self.prompts) // 2)
        self.engine.orders.watch(lambda: self._look(move, way))
        if move in ("drop", "restore"):
            self.engine.orders.request_drop()
            await self._until(lambda: not core.merges or self.struck_s is not None)
        if move == "restore":
            await self._until(lambda: self._asked_to_restore() or self.struck_s is not None)
        if move == "migration":
            await self._until(lambda: self._asked_to_migrate() or self.struck_s is not None)
        if way != "none":
            await self._until(lambda: self.lost_s is not None)

    def _asked_to_restore(self) -> bool:
        """Until one has ended: while the merge goes on it is refused."""
        if not self.engine.core.in_transition and self.engine.core.state.pipelines:
            self.engine.orders.request_restore()
        return self.engine.snapshot().counters["restores"] > 0

    def _asked_to_migrate(self) -> bool:
        core = self.engine.core
        here, there = (next((g for g in core.groups.values() if w in g.worker_ids), None) for w in (0, VICTIM))
        if here is not None and there is not None and core.migrations.is_idle and here.queues.running:
            self.engine.orders.request_migration(next(iter(here.queues.running)), there.group_id, MigrationKind.KV)
        return self.engine.snapshot().counters["migrations"] > 0

    def _look(self, move: str, way: str) -> None:
        """After each event of the core."""
        core = self.engine.core
        if self.struck_s is not None:
            if self.lost_s is None and not core.state.workers[VICTIM].alive:
                self.lost_s = time.monotonic()
            return
        self.partners |= {tuple(sorted(m.worker_ids)) for m in core.merges}
        midst = {
            "drop": any(m.phase is MergePhase.EXCHANGE for m in core.merges),
            "restore": bool(core.restores),
            "migration": VICTIM in core.migrations.worker_ids,
        }[move]
        if midst and way != "none":
            self._strike(way)

    def _strike(self, way: str) -> None:
        assert self.network is not None and self.placer is not None
        if way == "cut":
            self.network.cut(HOSTS[VICTIM])
        else:
            os.killpg(self.placer.processes[VICTIM, 0].pid, signal.SIGKILL)
        self.struck_s = time.monotonic()
        groups = self.engine.core.groups.values()
        self.num_running = sum(len(g.queues.running) + len(g.queues.moving) for g in groups)

    async def _until(self, holds) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.005)


def made(folder: Path, spawner: Spawner | None, instances: int) -> Engine:
    return engine_of(folder, spawner, instances=instances, worker_heartbeat_timeout=0, restore_dwell_ms=60_000,
                     exchange_piece_bytes=1 << 20)  # fmt: skip


async def expected(folder: Path, streams: int, num_tokens: int) -> list[list[int]]:
    """By one instance alone, on this machine."""
    engine = made(folder, None, 1)
    try:
        await engine.start()
        return await Run(engine, None, None, streams).answers(num_tokens)
    finally:
        await engine.close()


async def one(folder: Path, move: str, way: str, right: list[list[int]], num_tokens: int) -> dict[str, object]:
    """A row of the result; ``problems`` is empty where all is well."""
    network = Network()
    with network.up():
        placer = ProcessPlacer(
            host_of=lambda number: HOSTS[number], ip_of=network.ip_of, own_ip=network.own_ip,
            prefix=lambda host: inside(network, host, folder.parent),
        )  # fmt: skip
        placer.tells_ends = way != "cut"
        engine = made(folder, FarSpawner(placer, lease_s=DEFAULT_LEASE_S), len(HOSTS))
        try:
            await engine.start()
            now = Run(engine, network, placer, len(right))
            await now._until(lambda: len(engine.core.groups) == len(HOSTS))  # the far one has been filled
            networks = dict(engine.core.params.networks)
            moving = asyncio.create_task(now.move(move, way))
            answers = await now.answers(num_tokens)
            await moving
        finally:
            await engine.close()
    lost_after_s = None if now.lost_s is None or now.struck_s is None else now.lost_s - now.struck_s
    near = min(rate for pair, rate in networks.items() if FAR_HOST not in pair)
    far = max(rate for pair, rate in networks.items() if FAR_HOST in pair)
    problems = []
    if (wrong := sum(got != want for got, want in zip(answers, right, strict=True))) > 0:
        problems.append(f"{wrong} streams have other tokens")
    if move == "drop" and now.partners != {(0, VICTIM)}:
        problems.append(f"partners {sorted(now.partners)}: not the near ones alone")
    if near < NEAR_OVER_FAR * far:
        problems.append(f"near {8e-6 * near:.0f} Mbit/s and far {8e-6 * far:.0f} were measured")
    if way != "none" and not now.num_running:
        problems.append("no request ran when the host was struck")
    if way == "cut" and (lost_after_s is None or lost_after_s > MOST_LOST_S):
        problems.append(f"the host counted as lost after {lost_after_s} s")
    return {
        "move": move, "way": way, "streams": len(right), "tokens": sum(map(len, answers)), "wrong": wrong,
        "running_when_struck": now.num_running,
        "lost_after_s": None if lost_after_s is None else round(lost_after_s, 3),
        "near_mbit": round(8e-6 * near), "far_mbit": round(8e-6 * far), "problems": problems,
    }  # fmt: skip


async def rows(args: argparse.Namespace) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:  # the hosts' own /tmp hides what is in this one
        folder = Path(scratch) / "model"
        create_model(
            folder, arch="qwen2", layers=4, hidden=32, heads=4, kv_heads=2, max_position_embeddings=256, std=0.2
        )
        right, found = await expected(folder, args.streams, args.tokens), []
        for move in args.moves:
            for way in args.ways:
                for _ in range(args.rounds):
                    found.append(await one(folder, move, way, right, args.tokens))
                    print(json.dumps(found[-1]), flush=True)
    return found


def main() -> int:
    """The command."""
    args = parse(
        __doc__, moves=(list(MOVES), {"choices": MOVES}), ways=(list(WAYS), {"choices": WAYS}),
        rounds=(1, "of each move and way"), streams=12, tokens=(200, "of each stream"),
    )  # fmt: skip
    if os.geteuid() != 0:
        sys.exit("namespaces need root")
    logging.basicConfig(level="CRITICAL")
    found: Sequence[dict[str, object]] = asyncio.run(rows(args))
    bad = [row for row in found if row["problems"]]
    print_block("hosts", {"rows": found})
    keep(args.json, {"rows": found}, "core", "policy", "memory", "cost", "live", "device", "transport")
    print(f"{len(found)} runs, {len(bad)} with problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
