"""Rows of ``jettison verify --full`` in which a worker process dies: where, and what came of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from jettison.live.engine.assembly import assemble
from jettison.live.verify.fault_rounds import (
    DEFAULT_LOAD,
    MAX_PROMPT,
    TABLE_LOAD,
    FaultRounds,
    RoundReport,
    make_config,
)
from jettison.live.verify.fault_schedules import MOVES, Schedule, source_for
from jettison.live.verify.scenarios import Outcome, Setting
from jettison.live.worker.failpoints import ALONE, LIVE_ONLY, NAMES, OFFLINE_NAMES
from jettison.memory.kvtransfers import ExchangeMode
from jettison.types import WorkerId

SLOWEST_BYTES_PER_S = 1 << 24
"""At which parameters travel at least: a large model's moves have so much longer to meet their places."""


def kills(
    setting: Setting, failpoints: Sequence[str], on_row: Callable[[str, Outcome], None], **flags: object
) -> None:
    """Rows for a table like ``jettison verify``'s: a worker process dies at each of these places of a move.

    Each place is tried with one worker after the other, because not every move passes every place at all of them.
    ``on_row`` is told of each when it is over. ``flags`` of the engine: its number of instances, its mode of exchange.
    Raises what the engine's start does.
    """
    base: dict[str, object] = {
        "dtype": setting.dtype, "max_model_len": setting.max_model_len, "kernels": setting.kernels,
        "device": setting.device, "page_size": setting.page_bytes,
    }  # fmt: skip
    # What has been freed comes back between two moves.
    load = DEFAULT_LOAD if set(failpoints) <= set(OFFLINE_NAMES) else TABLE_LOAD
    assembly = assemble(make_config(setting.model_dir, load, base | flags))
    load = load._replace(
        num_tokens=min(load.num_tokens, assembly.limits.max_model_len - MAX_PROMPT),
        force_s=load.force_s + assembly.shape.parameter_bytes / SLOWEST_BYTES_PER_S,
    )

    async def run(names: list[str]) -> None:
        """Until a round has a problem: what comes after it on this engine would prove nothing."""
        async with FaultRounds.running(setting.model_dir, load, **base | flags) as rounds:
            while names:
                for victim in range(len(rounds.engine.core.state.workers)):
                    report = await rounds.run(schedule_of(names[0], victim, setting.seed))
                    if report.reached or report.problems:
                        break
                on_row(names.pop(0), _outcome(report))
                if report.problems:
                    return

    left = list(failpoints)
    while left:
        asyncio.run(run(left))


def _outcome(report: RoundReport) -> Outcome:
    evidence = f"worker {report.schedule.victim} killed, longest pause {report.longest_pause_ms:.0f} ms"
    if report.problems:
        evidence = "; ".join(report.problems)
    return Outcome(report.requests, report.reached and not report.problems, evidence)


def schedule_of(place: str, victim: WorkerId, seed: int) -> Schedule:
    """A worker dies when it reaches the place for the first time."""
    return Schedule(seed, victim, place, 1, signal.SIGKILL, source=source_for(place))


def is_alone(place: str) -> bool:
    """It is reached without a pipeline, too."""
    return place in (*ALONE, *MOVES) or place in OFFLINE_NAMES


def death_name(place: str, mode: ExchangeMode, instances: int) -> str:
    """Of the row."""
    exchange = f" ({mode})" if place in NAMES else ""
    return f"kill -9 {place}{exchange}, {instances} instances"


def death_plan(index: int, num_models: int) -> list[tuple[ExchangeMode, int, list[str]]]:
    """Deaths that one of the architectures goes through: (mode, instances, places), each on an engine of its own.

    All together: every failpoint of a drop and a restore in every mode with two instances, and once with three and with
    four; and once with two instances every place of migrations, sleep and waking, and of offline work.
    """
    plan = []
    for shift, mode in enumerate(ExchangeMode):
        places = [n for n in NAMES if n not in LIVE_ONLY or mode is ExchangeMode.LIVE]
        plan.append((mode, 2, places[(index + shift) % num_models :: num_models]))
    for instances in (3, 4):
        plan.append((ExchangeMode.LIVE, instances, list(NAMES[(index + instances) % num_models :: num_models])))
    plan += [(ExchangeMode.LIVE, 2, list(names[index % num_models :: num_models])) for names in (MOVES, OFFLINE_NAMES)]
    return [entry for entry in plan if entry[2]]
