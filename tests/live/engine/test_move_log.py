"""Moves as lines of the server's log."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from jettison.core.ports import Record
from jettison.live.engine.move_log import log_move

FIELDS = {"worker": 3, "workers": (3, 4), "group": 5, "reason": "so it is", "level": "kv", "requests": 2, "ms": 12.5}
CORE = SimpleNamespace(merges=[], restores=[])


@pytest.mark.parametrize(("kind", "level", "line"), [
    ("drop_failed", logging.WARNING, "drop failed: workers (3, 4) serve on apart; reason: so it is"),
    ("recovery_stuck", logging.ERROR, "worker 3 stays down: so it is"),
    ("came_home", logging.INFO, "worker 3, which a restore had left over, holds all layers"),
    ("falling_asleep", logging.INFO,
     "worker 3 is put to sleep (level kv): 2 requests go elsewhere or end first; reason: so it is"),
    ("wake_decided", logging.INFO, "workers (3, 4) are woken; reason: so it is"),
    ("stays_awake", logging.INFO, "worker 3 does not go to sleep; reason: so it is"),
    ("asleep", logging.INFO, "worker 3 sleeps, after 12 ms"),
    ("woken", logging.INFO, "worker 3 is awake again, after 12 ms"),
    ("instance_asked", logging.INFO, "a process for worker 3 is asked for"),
    ("instance_waits", logging.WARNING, "worker 3 waits for its process: so it is"),
    ("instance_given_up", logging.INFO, "worker 3 gives its process back: so it is"),
    ("instance_released", logging.INFO, "worker 3 gives its process back: so it is"),
    ("restore_turned", logging.INFO, "restore called off: group 5 stays merged; reason: so it is"),
])  # fmt: skip
def test_a_decision_is_one_line(kind, level, line, caplog):
    caplog.set_level(logging.INFO)
    log_move(Record(kind, 0, FIELDS), CORE)
    assert [(each.levelno, each.getMessage()) for each in caplog.records] == [(level, line)]


@pytest.mark.parametrize("kind", ["recovered", "came_home"])
def test_a_worker_that_was_given_up_serves_again(kind, caplog):
    log_move(Record(kind, 0, FIELDS | {"was_stuck": True}), CORE)
    assert [each.getMessage() for each in caplog.records] == ["worker 3 serves again"]


def test_all_other_records_are_no_line(caplog):
    caplog.set_level(logging.INFO)
    for kind in ("recovered", "step", "scale_out_over"):
        log_move(Record(kind, 0, FIELDS), CORE)
    assert not caplog.records
