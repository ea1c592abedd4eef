"""Named places at which a test may kill or stop a worker. Without the variable nothing is looked at or kept.

    JETTISON_TEST_KILL_AT=<path of a file>; in it: <worker>.<life>:<name>:<count>[:<signal>],...

says: that life of that worker sends itself the signal (KILL, or STOP) when it reaches the place for the ``count``-th
time since the file was written. A worker looks at the file wherever it reaches a place, so one that serves can be armed
(``arm``). Only tests and ``python -m benchmarks moves deaths`` set it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jettison.memory.layout import LayoutSpec
from jettison.types import WorkerId

VARIABLE = "JETTISON_TEST_KILL_AT"

NAMES = (
    "before_drop", "after_drop",  # a layout without shards that it has is offered / has been offered
    "before_remap", "after_remap",  # any layout is applied
    "before_restore", "after_restore",  # a layout that maps dropped shards is applied
    "before_split", "after_split",  # a layout that gives pages to layers without KV is applied
    "before_piece_sent", "after_piece_sent",
    "before_piece_written", "after_piece_written",
    "before_attention", "after_attention",  # a peer's queries over KV that is still here are answered (live exchange)
    "before_stage", "after_stage",  # a stage that is not the last computes; its hidden states are sent after that
    "before_sample", "after_sample",  # the last stage computes and samples
    "before_flush", "after_flush",  # the step's tokens go to the controller, which sends them to clients
)  # fmt: skip

ALONE = ("before_sample", "after_sample", "before_flush", "after_flush")
"""Reached by an instance that serves without a pipeline, too."""

LIVE_ONLY = ("before_attention", "after_attention")
"""Reached only where requests run while their KV moves."""

PULL_NAMES = ("before_shard_sent", "after_shard_sent", "before_shard_written", "after_shard_written")
"""Of a piece of parameters (beside those of any piece): sure to be reached only in a drop that has to pull."""

SLEEP_NAMES = ("before_sleep", "after_sleep", "before_wake", "after_wake")
"""The layout of a worker that goes to sleep is emptied; that of one that is woken is mapped."""

FILL_NAMES = (
    "before_keep", "after_keep",  # a piece of a shard is written to the machine's copy
    "before_load", "after_load",  # a piece of a shard is read from the machine's copy, or from the model folder
    "before_check", "after_check",  # all of a shard has come, and is compared with what is served
)  # fmt: skip
"""Of parameters that leave a worker and come back: a worker reaches them when it goes to sleep or is woken."""

OFFLINE_NAMES = (
    "before_checkpoint", "after_checkpoint",  # a copy to the host pool is under way / has ended and has been told of
    "before_prefetch", "after_prefetch",  # a copy back likewise
    "before_abandon", "after_abandon",  # a first stage has given a step up / an instance has told of it
)  # fmt: skip
"""Reached only with offline work."""

ALL_NAMES = (*NAMES, *PULL_NAMES, *SLEEP_NAMES, *FILL_NAMES, *OFFLINE_NAMES)

Failpoint = Callable[[str], None]


class Rule(NamedTuple):
    """One death to come."""

    worker_id: WorkerId
    life: int
    name: str
    num_times: int
    signal: signal.Signals

    def __str__(self) -> str:
        return f"{self.worker_id}.{self.life}:{self.name}:{self.num_times}:{self.signal.name.removeprefix('SIG')}"


def parse(text: str) -> list[Rule]:
    """Rules of the variable's value. Raises ValueError."""
    rules: list[Rule] = []
    for part in filter(None, text.split(",")):
        who, name, count, *how = part.split(":")
        worker, _, life = who.partition(".")
        if name not in ALL_NAMES:
            raise ValueError(f"{name} is no failpoint")
        kind = signal.Signals[f"SIG{how[0]}"] if how else signal.SIGKILL
        rules.append(Rule(int(worker), int(life or 0), name, int(count), kind))
    return rules


def nowhere(name: str) -> None:
    """The failpoint of a worker that no test is after."""


def layout_change(before: LayoutSpec | None, after: LayoutSpec) -> str:
    """The move to which a new layout belongs: sleep, wake, drop, restore, split, or none (give_back). ``before``: the
    one in force; None: there is none yet."""
    if len(after.kv_layers) == 0:
        return "sleep"
    if before is not None and len(before.kv_layers) == 0:
        return "wake"
    if before is None or after.shards < before.shards:
        return "drop"
    if after.shards > before.shards:
        return "restore"
    return "split" if len(after.kv_layers) > len(before.kv_layers) else "give_back"


def arm(file: Path, rules: Sequence[Rule]) -> None:
    """From now on these rules hold, and no others."""
    _mark(file).unlink(missing_ok=True)
    new = file.with_suffix(".new")
    new.write_text(",".join(map(str, rules)))
    os.replace(new, file)


def is_met(file: Path) -> bool:
    """Whether a worker has come to the place of a rule since the file was armed."""
    return _mark(file).exists()


def _mark(file: Path) -> Path:
    return file.with_suffix(".met")


def from_environment(worker_id: WorkerId, life: int, environ: Mapping[str, str] = os.environ) -> Failpoint:
    """What one life of one worker does at its failpoints."""
    file = environ.get(VARIABLE)
    if not file:
        return nowhere
    left: dict[Rule, int] = {}
    version: tuple[int, int] | None = None

    def reach(name: str) -> None:
        nonlocal left, version
        now = os.stat(file)
        if (now.st_ino, now.st_mtime_ns) != version:
            version = now.st_ino, now.st_mtime_ns
            rules = parse(Path(file).read_text())
            left = {rule: rule.num_times for rule in rules if (rule.worker_id, rule.life) == (worker_id, life)}
        for rule in left:
            if rule.name == name:
                left[rule] -= 1
                if left[rule] == 0:
                    _mark(Path(file)).touch()
                    os.kill(os.getpid(), rule.signal)

    return reach
