"""Ray's driver from within, without a cluster: what it says of errors, and of a head that is gone."""

from __future__ import annotations

import asyncio
import os
import sys
from types import SimpleNamespace

import msgspec
import pytest

from jettison.live.host import placer
from jettison.live.host.placer import RayDriver, _in_short
from jettison.live.wire import placing as p
from waiting import PATIENCE_S

TRACE = (
    "\x1b[36mray::KeeperActor.start()\x1b[39m (pid=3, ip=10.0.0.2)\n"
    '  File "/opt/jettison/keeper_actor.py", line 32, in start\n'
    "    raise {name}({text!r})\n"
    "    ^^^^^^^^^^^^^^^^^^^^^^\n"
    "{name}: {text}\n"
)


class RayTaskErrorLike(Exception):
    """As Ray writes a task's error: where it was, its frames, and then what it was."""


@pytest.mark.parametrize(
    ("said", "in_short"),
    [
        (TRACE.format(name="OSError", text="the keeper has ended at once"),
         "ray::KeeperActor.start() (pid=3, ip=10.0.0.2); OSError: the keeper has ended at once"),
        ("The actor died because of an error raised in its creation task, " +
         TRACE.format(name="ModuleNotFoundError", text="No module named 'jettison'"),
         "The actor died because of an error raised in its creation task, ray::KeeperActor.start() (pid=3, "
         "ip=10.0.0.2); ModuleNotFoundError: No module named 'jettison'"),
        ("The actor died unexpectedly before finishing this task.\n\tclass_name: KeeperActor\n\tip: 10.0.0.2\n"
         "The actor is dead because its node has died.\n\n",
         "The actor died unexpectedly before finishing this task.; The actor is dead because its node has died."),
        ("it was given up meanwhile", "it was given up meanwhile"),
        ("\n  indented alone\n", "indented alone"),
        ("", ""),
    ],
)  # fmt: skip
def test_an_error_in_short_has_its_place_and_its_cause_and_no_colours(said: str, in_short: str) -> None:
    assert _in_short(RayTaskErrorLike(said)) == f"RayTaskErrorLike: {in_short}"


def test_ray_s_own_error_names_the_module_that_a_host_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    trace = f'Traceback (most recent call last):\n  File "actor.py", line 1, in start\n{TRACE.splitlines()[2]}\n'
    cause = ModuleNotFoundError("No module named 'jettison'")
    task = exceptions.RayTaskError(
        "start", f"{trace}ModuleNotFoundError: {cause}\n", cause, proctitle="ray::KeeperActor.start", pid=3,
        ip="10.0.0.2",
    )  # fmt: skip
    for error in (task, task.make_dual_exception_instance(), exceptions.ActorDiedError(task)):
        told = _in_short(error)
        assert "ray::KeeperActor.start() (pid=3, ip=10.0.0.2)" in told and "\x1b" not in told
        assert told.endswith("; ModuleNotFoundError: No module named 'jettison'")


async def test_that_the_head_of_its_own_has_died_is_told_before_the_driver_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end takes a while: Ray looks for that head."""
    here = SimpleNamespace(gcs_address="127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: here))
    monkeypatch.setattr(placer, "_why_away", lambda address: "refused")
    heard, said = os.pipe()
    driver = RayDriver(said)
    driver._is_ours = True
    await asyncio.wait_for(driver._attend(), PATIENCE_S)
    os.close(said)
    with os.fdopen(heard, "rb") as reader:
        assert msgspec.json.decode(reader.read() or b"null", type=p.PlacerEvent | None) == p.Head("refused")
