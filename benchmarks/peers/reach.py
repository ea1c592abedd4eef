"""How many instances one controller holds: the real engine, core, encoder, control channels and hub, over workers that
pretend and a front end that only swallows (``pretending``).

    python -m benchmarks peers reach [--instances 10 20 30 40] [--rows 64] [--step-ms 25] [--profile FILE]

Steps, tokens and requests a second; the controller's share of a core, and its CPU for a step and for a token; the time
between a step's end and the begin of the instance's next one (P50, P99), which is what a device waits for. Three
processes need a core each, so on two cores the gaps have what they take from each other; CPU hardly depends on that.
"""

from __future__ import annotations

import asyncio
import cProfile
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop

from benchmarks.peers.pretending import Child, Load, PretendingSpawner, Window
from benchmarks.shared import REPOSITORY, SERVING, Row, in_turn, keep, machine, median, parse, print_rows, settings_of
from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.live.engine.engine import Engine
from jettison.live.machine.garbage import settle_garbage_collector
from jettison.server.app import create_app, server_state
from jettison.server.fronts.desk import FrontDesk
from jettison.server.settings import ServerSettings
from jettison.server.tokenizer import Tokenizer

CHILD = "--as-controller"
BLOCK_SIZE = 16
COLUMNS = ("step_ahead", "instances", "code", "steps_a_s", "tokens_a_s", "requests_a_s", "controller_share",
           "us_a_step", "us_a_token", "gap_p50_ms", "gap_p99_ms")  # fmt: skip


async def control(load: Load) -> Row:
    """The controller's process: what it carried in the window."""
    blocks_a_row = -(-(load.prompt_tokens + load.output_tokens * 3 // 2) // BLOCK_SIZE) + 1
    spawner = PretendingSpawner(load.step_s, load.rows * blocks_a_row)
    config = EngineConfig.resolve(
        model=load.model, instances=load.instances, memory="64MiB", max_num_seqs=load.rows, block_size=BLOCK_SIZE,
        step_ahead=load.step_ahead, num_threads=1,
        max_num_queued_reqs=load.rows * load.instances)
    engine = Engine(config, spawner)
    await engine.start()
    app = create_app(engine, Tokenizer.from_dir(Path(load.model)), ServerSettings(("pretend",)))
    desk = FrontDesk(server_state(app), engine, lambda front, why: None)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        front = Child("swallow", msgspec.json.encode(load).decode(), str(theirs.fileno()), pass_fds=[theirs.fileno()])
    try:
        await desk.hub.add(0, ours)
        settle_garbage_collector()
        while len(desk.hub.fronts[0].streams) < load.rows * load.instances:
            await asyncio.sleep(0.1)
        await asyncio.sleep(load.settle_s)
        return await _measure(load, spawner.child, front)
    finally:
        await desk.hub.close()
        spawner.let_go()
        await engine.close()
        front.end()


async def _measure(load: Load, workers: Child, front: Child) -> Row:
    profile = cProfile.Profile() if load.profile else None
    beside = workers.cpu_s(), front.cpu_s()
    began_s, cpu_s = time.monotonic(), time.process_time()
    if profile is not None:
        profile.enable()
    await asyncio.sleep(load.seconds)
    if profile is not None:
        profile.disable()
        profile.dump_stats(load.profile)
    window, cpu_s = Window(began_s, time.monotonic()), time.process_time() - cpu_s
    took_s = window.to_s - window.from_s
    row: Row = {
        "instances": load.instances, "controller_share": cpu_s / took_s,
        "workers_share": (workers.cpu_s() - beside[0]) / took_s, "front_share": (front.cpu_s() - beside[1]) / took_s}
    for child in (workers, front):
        child.tell(window)
        row |= await child.answer()
    return row | {
        "steps_a_s": row["steps"] / took_s, "tokens_a_s": row["tokens"] / took_s,
        "requests_a_s": row["requests"] / took_s, "us_a_step": 1e6 * cpu_s / max(1, row["steps"]),
        "us_a_token": 1e6 * cpu_s / max(1, row["tokens"])}


def run(load: Load, tree: Path) -> Row:
    """One controller, in a process of its own, of this checkout or another one."""
    command = [sys.executable, "-m", "benchmarks.peers.reach", CHILD, msgspec.json.encode(load).decode()]
    done = subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE,
                          env=os.environ | {"PYTHONPATH": str(tree / "src")})  # fmt: skip
    row: Row = msgspec.json.decode(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Rounds interleave the numbers of instances and the checkouts, so that a disturbance meets all of them."""
    options = parse(
        __doc__, instances=([10, 20, 30, 40], "of which each holds one whole model"),
        rows=(64, "open streams for each instance"), step_ms=(25.0, "that a step takes on its device"),
        prompt_tokens=64, output_tokens=(256, "on average"), seconds=(10.0, "measured in each run"),
        settle=(4.0, "seconds before"),
        step_ahead=(["auto", "on"], "as in jettison serve: by itself a host plans none, a card does"),
        temperature=(1.0, "of all requests"), rounds=1,
        beside=(Path, "another checkout with this benchmark, measured in turns"),
        profile=("", "file for cProfile of the controller: one run, whose CPU then counts the profiler's"))
    trees = {"this": REPOSITORY} | ({} if options.beside is None else {"beside": options.beside.absolute()})
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "pretend"
        create_model(folder, arch="qwen3", layers=28, hidden=32, heads=2, kv_heads=1, seed=1)
        for number in range(options.rounds):
            for instances, ahead in itertools.product(options.instances, options.step_ahead):
                load = Load(
                    instances=instances, rows=options.rows, step_s=options.step_ms / 1e3,
                    prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens,
                    seconds=options.seconds, settle_s=options.settle, step_ahead=ahead,
                    temperature=options.temperature, model=str(folder), profile=options.profile)
                for name, tree in in_turn(list(trees.items()), number):
                    rows.append({"code": name, "step_ahead": ahead} | run(load, tree))
                    print_rows(rows[-1:], COLUMNS)
    medians = []
    for key in dict.fromkeys((row["step_ahead"], row["instances"], row["code"]) for row in rows):
        same = [row for row in rows if (row["step_ahead"], row["instances"], row["code"]) == key]
        medians.append(dict(zip(COLUMNS, key)) | {name: median(row[name] for row in same) for name in COLUMNS[3:]})
    print_rows(medians, COLUMNS, "medians")
    keep(options.json, {"settings": settings_of(options), "machine": machine(), "rows": medians, "rounds": rows},
         *SERVING)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == CHILD:
        print(msgspec.json.encode(uvloop.run(control(msgspec.json.decode(sys.argv[2], type=Load)))).decode())
    else:
        main()
