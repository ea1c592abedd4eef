"""Moves under load on one card: an exchange, a restore beside decoding, a worker killed in a drop and in an exchange.

    python3 -m benchmarks gpu faults --out gpu_faults.json        # two instances of a 7B shape, under a minute
    python3 -m benchmarks gpu faults --moves-only --piece-bytes 33554432    # by the size of an exchange's pieces
    python3 -m benchmarks gpu faults --device cpu --tiny          # the same on a processor, at toy sizes

The same requests run undisturbed, through an exchange and a restore, and through two deaths; their tokens must be
equal. A worker dies of SIGKILL at a named place (``live.worker.failpoints``). Whether a dead worker's memory is back on
the card is asked of NVML while it is dead, and again when its successor serves. Figures are of one card, time-sliced,
without MPS. More places and modes: ``jettison verify --full``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from benchmarks.gpu.engine import config_for
from benchmarks.gpu.replay import PolicyEngine
from benchmarks.gpu.results import Results
from benchmarks.gpu.shapes import SHAPES, TINY, folder_of
from benchmarks.shared import quantile
from jettison.config import EngineConfig
from jettison.config.cards import Card, card_memory, visible_cards
from jettison.live.engine.assembly import assemble
from jettison.live.worker.failpoints import VARIABLE, Rule, arm
from jettison.types import Request, SamplingParams

NEVER_MS = 3_600_000
"""No drop and no restore but those that are ordered."""
DEATHS = {"a drop": (1, "before_remap", 1), "an exchange": (0, "after_piece_sent", 2)}
"""Where -> the victim, its place, and how often it comes there."""
TOLERANCE_BYTES = 512 << 20
"""Of what the card has in use beside pages: graphs and workspaces come and go."""
WAIT_S = 40.0
RELEASE_S = 5.0
"""A driver may take so long to take a dead process's memory back."""


class Used(threading.Thread):
    """The least that a card has in use while this runs."""

    def __init__(self, card: Card | None) -> None:
        super().__init__(daemon=True)
        self._card = card
        self._is_over = threading.Event()
        self.first = self.now()
        self.least = self.first

    def now(self) -> int:
        memory = None if self._card is None else card_memory(self._card)
        return 0 if memory is None else memory.used_bytes

    def run(self) -> None:
        while not self._is_over.wait(0.02):
            self.least = min(self.least, self.now())

    def end(self) -> None:
        self._is_over.set()
        self.join()


class Load:
    """The same requests again and again, with the times of their tokens."""

    def __init__(self, engine: PolicyEngine, num_requests: int, longest: int) -> None:
        rng = random.Random(0)
        self._engine, self._number = engine, 0
        vocab = engine.info.vocab_size
        self._prompts = [
            tuple(rng.randrange(vocab) for _ in range(rng.randint(longest // 4, longest))) for _ in range(num_requests)
        ]
        self.tokens: list[list[int]] = []
        self.times_s: list[list[float]] = []

    async def run(self, num_output: int, midway: Callable[[], None] = lambda: None) -> list[list[int]]:
        """All at once, to their ends; ``midway`` is called when a third of the tokens is there. Their tokens."""
        self.tokens, self.times_s = [[] for _ in self._prompts], [[] for _ in self._prompts]
        asks = [
            asyncio.create_task(self._one(prompt, num_output, tokens, times_s))
            for prompt, tokens, times_s in zip(self._prompts, self.tokens, self.times_s, strict=True)
        ]
        while self._count() < len(asks) * num_output // 3 and not all(ask.done() for ask in asks):
            await asyncio.sleep(0.005)
        midway()
        await asyncio.gather(*asks)
        return self.tokens

    async def fill(self) -> None:
        """Up to three prompts at once, each as long as an instance holds: of a merged group's new blocks the last come
        to lie where dropped layers were, and those a restore has to pull."""
        rng, info, core = random.Random(1), self._engine.info, self._engine.core
        length = min(info.max_request_tokens, info.max_model_len) - 2
        free = max(group.blocks.num_free for group in core.groups.values()) * core.state.limits.block_size
        count = min(3, free // length)
        prompts = [tuple(rng.randrange(info.vocab_size) for _ in range(length)) for _ in range(count)]
        await asyncio.gather(*(self._one(prompt, 1, [], []) for prompt in prompts))

    def _count(self) -> int:
        return sum(map(len, self.tokens))

    async def _one(self, prompt: tuple[int, ...], num_output: int, tokens: list[int], times_s: list[float]) -> None:
        self._number += 1
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        async for event in self._engine.submit(Request(f"r{self._number}", prompt, params, time.monotonic_ns())):
            tokens += [token.token_id for token in event.tokens]
            times_s += [time.monotonic()] * len(event.tokens)

    def gap_ms(self, share: float, begins_s: float = 0.0, ends_s: float = float("inf")) -> float:
        """Between two tokens of a request, of those that end in that time."""
        gaps = [b - a for times in self.times_s for a, b in pairwise(times) if begins_s <= b and a <= ends_s]
        return 1e3 * quantile(gaps, share)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Raises TimeoutError that names what did not come."""
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > ends_s:
            raise TimeoutError(f"{what} did not come in {WAIT_S:g} s")
        await asyncio.sleep(0.005)


def differing(got: list[list[int]], wanted: list[list[int]]) -> int:
    """Tokens that differ or are missing."""
    pairs = list(zip(got, wanted, strict=True))
    wrong = sum(a != b for mine, right in pairs for a, b in zip(mine, right, strict=False))
    return wrong + sum(abs(len(mine) - len(right)) for mine, right in pairs)


def tell_rate(rate: float, num_cards: int, results: Results) -> None:
    """Of an exchange under load: its target is one of two cards, as processes of one card take turns at it."""
    if num_cards > 1:
        results.tell("exchange under load, GB/s", rate, 20.0, rate >= 20.0)
    else:
        results.tell("exchange under load, in turns on one card, GB/s", rate)


async def moves(engine: PolicyEngine, load: Load, wanted: list[list[int]], results: Results) -> None:
    """A drop with its exchange, and the restore beside decoding that follows at once."""
    core, before = engine.core, engine.totals()
    engine.event_log.clear()
    engine.delays.recent_activation_ns.clear()
    task = asyncio.create_task(load.run(len(wanted[0]), engine.orders.request_drop))
    await until(lambda: any(r.kind == "exchange_done" for r in engine.event_log), "the end of the exchange")
    delays_ms = [ns / 1e6 for ns in engine.delays.recent_activation_ns]
    await load.fill()
    begins_s = time.monotonic()
    engine.orders.request_restore()
    await until(lambda: any(r.kind == "restore_done" for r in engine.event_log), "the end of the restore")
    ends_s = time.monotonic()
    was_beside = not task.done()
    wrong = differing(await task, wanted)
    told = {record.kind: record.fields for record in engine.event_log}
    after = engine.totals()
    seconds = (told["exchange_done"]["ms"] - told["drop"]["decision_to_serving_ms"]) / 1e3  # type: ignore[operator]
    rate = told["exchange_done"]["bytes"] / max(seconds, 1e-9) / 1e9  # type: ignore[operator]
    results.tell("exchange and restore: tokens that differ", wrong, 0, wrong == 0)
    results.tell("drop under load, decision to serving, ms", told["drop"]["decision_to_serving_ms"])
    results.tell("exchanged, GB", told["exchange_done"]["bytes"] / 1e9)  # type: ignore[operator]
    tell_rate(rate, len(set(engine.assembly.config.devices.cards)), results)
    stalls = after["stalls"] - before["stalls"]
    results.tell("stall a request, ms", 1e3 * (after["stall_seconds"] - before["stall_seconds"]) / max(1.0, stalls))
    results.tell("longest stall, ms", core.state.counters.max_stall_ns / 1e6)
    results.tell("activations' delay during the exchange, median, ms", statistics.median(delays_ms or [0.0]))
    results.tell("activations' delay during the exchange, P99, ms", quantile(delays_ms, 0.99))
    results.tell("restore under load, ms", told["restore_done"]["ms"])
    results.tell("restore pulled, GB", told["restore_done"]["pulled_bytes"] / 1e9)  # type: ignore[operator]
    results.tell("gap between tokens beside the restore, P99, ms", load.gap_ms(0.99, begins_s, ends_s))
    results.tell("requests ran beside the whole restore", was_beside, True, was_beside)


async def death(
    engine: PolicyEngine, load: Load, wanted: list[list[int]], where: str, rules: Path, card: Card | None,
    results: Results,
) -> Used:
    """A worker dies where it is told to; the requests go on, and its memory comes back."""
    victim, name, count = DEATHS[where]
    worker = engine.core.state.workers[victim]
    life, losses = worker.life, engine.core.state.counters.num_worker_losses
    arm(rules, [Rule(victim, life, name, count, signal.SIGKILL)])
    used = Used(card)
    used.start()
    wrong = differing(await load.run(len(wanted[0]), engine.orders.request_drop), wanted)
    results.tell(f"killed in {where}: tokens that differ", wrong, 0, wrong == 0)
    died = engine.core.state.counters.num_worker_losses - losses
    results.tell(f"killed in {where}: workers that died", died, 1, died == 1)
    results.tell(f"killed in {where}: longest pause of a request, ms", load.gap_ms(1.0))
    arm(rules, [])
    wanted_bytes, ends_s = engine.assembly.worker_specs[victim].memory_bytes, time.monotonic() + RELEASE_S
    while used.first and used.first - used.least < wanted_bytes and time.monotonic() < ends_s:
        await asyncio.sleep(0.02)
    used.end()
    if used.first:
        back = (used.first - used.least) / wanted_bytes
        results.tell(f"killed in {where}: memory back on the card, of the worker's", back, 1.0, back >= 1.0)
    return used


async def successor(engine: PolicyEngine, used: Used, results: Results) -> None:
    """A worker that died is replaced, and has what it had."""
    begun, state = time.monotonic(), engine.core.state
    await until(lambda: all(w.alive for w in state.workers.values()) and not engine.core.in_transition,
                "the dead worker's successor")  # fmt: skip
    results.tell("a dead worker's successor serves after the requests' end by, s", time.monotonic() - begun)
    if used.first:
        more = used.now() - used.first
        results.tell("in use more than before the death, bytes", more, TOLERANCE_BYTES, more <= TOLERANCE_BYTES)


async def run_all(models: Path, options: argparse.Namespace, results: Results) -> None:
    """One engine for all."""
    tiny = options.tiny
    more: dict[str, object] = {
        "instances": 2, "overload": "drop", "exchange": "transfer", "memory": "24GiB", "profile": "none",
        "max_num_batched_tokens": 2048, "enable_prefix_caching": False, "restore_dwell_ms": NEVER_MS,
        "overload_min_wait_ms": NEVER_MS, "max_worker_restarts": 100, "log_level": "warning",
    }  # fmt: skip
    if tiny:
        more |= {"num_threads": 1, "page_size": 4096, "exchange_piece_bytes": 4096}
    if options.piece_bytes is not None:
        more["exchange_piece_bytes"] = options.piece_bytes
    size, num_output = ((8, 40), 400) if tiny else ((32, 1024), 480)
    config = config_for("7b", models, options, **more)
    num_blocks = size[0] * (5 * size[1] // 8 + num_output) * 11 // 160  # a survivor holds about all of it
    config = EngineConfig.resolve(**config.flat() | {"memory": assemble(config).memory_for_blocks(num_blocks)})
    card = visible_cards()[0] if options.device == "cuda" else None
    with tempfile.TemporaryDirectory(prefix="jettison-faults-") as folder:
        rules = Path(folder) / "rules"
        arm(rules, [])
        os.environ[VARIABLE] = str(rules)  # for every life of each worker
        begun = time.monotonic()
        engine = PolicyEngine(config)
        try:
            await engine.start()
            results.tell("start, s", time.monotonic() - begun)
            load = Load(engine, *size)
            await load.run(8)  # compiles, captures
            wanted = await load.run(num_output)
            results.tell("gap between tokens undisturbed, P99, ms", load.gap_ms(0.99))
            await moves(engine, load, wanted, results)
            beginning = [tokens[: num_output // 3] for tokens in wanted]
            for where in () if options.moves_only else DEATHS:
                used = await death(engine, load, beginning, where, rules, card, results)
                if where != list(DEATHS)[-1]:
                    await successor(engine, used, results)
            results.tell("seconds", time.monotonic() - begun)
        finally:
            os.environ.pop(VARIABLE, None)
            await engine.close()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_faults.json")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--moves-only", action="store_true", help="the exchange and the restore, without deaths")
    parser.add_argument("--piece-bytes", type=int, help="of the exchange (default: the device's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        models = Path(name)
        for shape, layout in (TINY if options.tiny else SHAPES).items():
            layout.write(folder_of(models, shape))
        asyncio.run(run_all(models, options, Results(options.out)))
    return 0
