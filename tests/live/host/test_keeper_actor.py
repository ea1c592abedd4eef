"""What Ray runs beside a keeper, without Ray."""

from __future__ import annotations

import io
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from jettison.live.host import keeper_actor
from jettison.live.host.keeper_actor import KeeperActor
from jettison.live.host.placer import KeeperActor as WhatTheDriverSends
from jettison.live.machine.identity import machine_name
from jettison.live.wire.host_orders import KeeperPost, Place
from jettison.transport.authority import Authority


def test_no_code_of_it_travels():
    assert WhatTheDriverSends is KeeperActor
    assert b"jettison.live.host.keeper_actor" in pickle.dumps(KeeperActor) and KeeperActor.__module__ != "__main__"


def test_it_starts_a_keeper_that_asks_for_a_certificate_and_sees_its_end():
    authority, actor = Authority(), KeeperActor()
    post = KeeperPost(
        number=0, life=0, address="tcp:127.0.0.1:1", token_hex="00", lease_s=2.0,
        authority_pem=authority.certificate.decode(),
    )  # fmt: skip
    request = bytes.fromhex(actor.start(msgspec.json.encode(post)).decode())
    assert authority.sign(request, post.identity).startswith(b"-----BEGIN CERTIFICATE")
    actor._process.stdin.close()  # it is given up
    actor.run()
    actor._process.stdout.close()


def test_a_keeper_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_actor, "_KEEPER_COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(OSError, match=r"could not be started \(code 3\)"):
        KeeperActor().start(b"{}")


def test_no_keeper_is_killed_first_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins it is, as Ray's processes are."""
    begun = (f"import os; open('/proc/self/oom_score_adj', 'w').write('500'); "
             f"os.execv({sys.executable!r}, {list(keeper_actor._KEEPER_COMMAND)!r})")
    monkeypatch.setattr(keeper_actor, "_KEEPER_COMMAND", (sys.executable, "-c", begun))
    authority, actor = Authority(), KeeperActor()
    post = KeeperPost(
        number=0, life=0, address="tcp:127.0.0.1:1", token_hex="00", lease_s=2.0,
        authority_pem=authority.certificate.decode(),
    )  # fmt: skip
    actor.start(msgspec.json.encode(post))
    writes = os.stat(actor._process.stdout.fileno()).st_ino
    (keeper,) = [process for process in psutil.process_iter() if process.pid != os.getpid() and _has(process, writes)]
    assert Path(f"/proc/{keeper.pid}/oom_score_adj").read_text().strip() == "0"
    actor._process.stdin.close()
    actor.run()
    actor._process.stdout.close()


def _has(process: psutil.Process, pipe: int) -> bool:
    try:
        return any(os.stat(each).st_ino == pipe for each in Path(f"/proc/{process.pid}/fd").iterdir())
    except OSError:
        return False


def place_told_by(node_id: str, monkeypatch: pytest.MonkeyPatch) -> Place:
    """What an actor on a node of Ray's tells its keeper."""
    node = SimpleNamespace(get_node_id=lambda: node_id)
    ray = SimpleNamespace(
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"), get_runtime_context=lambda: node
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    actor, told = KeeperActor(), io.BytesIO()
    actor._process = SimpleNamespace(stdin=told)
    actor.admit("-----BEGIN")
    return msgspec.json.decode(told.getvalue(), type=Place)


def test_a_machine_whose_ray_was_started_again_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (place_told_by(node, monkeypatch) for node in ("f00d", "beef"))
    assert before == after and before.host == machine_name("10.0.0.1") and before.ip == "10.0.0.1"
