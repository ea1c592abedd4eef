"""The parent of a server over controllers that are small programs; its rules as a table."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from cryptography import x509

from jettison.errors import LinkDownError
from jettison.report.timeline import Timeline
from jettison.server import launch
from jettison.server.parent import orders as o
from jettison.server.parent.kept import Kept
from jettison.server.parent.line import ParentLine
from jettison.server.parent.rules import (
    MOST_PAUSE_S,
    MOST_RESTARTS,
    WINDOW_S,
    Exit,
    Rules,
    ServerPhase,
    StartAgain,
    exit_code,
)
from jettison.server.parent.signing import Sign, SigningDesk, lent_authority
from jettison.server.recorder import TraceRecorder
from jettison.transport.authority import MAX_REQUEST_BYTES, Applicant
from jettison.transport.handshake import Identity
from jettison.transport.tls import Papers, TlsContexts, name_of
from waiting import PATIENCE_S

# --- rules


def rules_in(state, orphan_timeout_s=60.0):
    rules = Rules(orphan_timeout_s)
    if state is not ServerPhase.STARTING:
        rules.on_ready()
    if state is ServerPhase.COMING_BACK:
        rules.on_end(-9, 0.0)
    if state is ServerPhase.STOPPING:
        assert rules.on_signal()
    assert rules.state is state
    return rules


@pytest.mark.parametrize(("state", "orphan_timeout_s", "returncode", "then"), [
    (ServerPhase.STARTING, 60, 2, Exit(2)),
    (ServerPhase.STARTING, 60, -9, Exit(137)),
    (ServerPhase.SERVING, 60, -9, StartAgain),
    (ServerPhase.SERVING, 60, 1, StartAgain),
    (ServerPhase.SERVING, 60, 0, Exit(0)),
    (ServerPhase.SERVING, 0, -9, Exit(137)),
    (ServerPhase.SERVING, 0, 1, Exit(1)),
    (ServerPhase.COMING_BACK, 60, 2, StartAgain),
    (ServerPhase.STOPPING, 60, 0, Exit(0)),
    (ServerPhase.STOPPING, 60, -9, Exit(137)),
])  # fmt: skip
def test_what_becomes_of_a_server_when_its_controller_ends(state, orphan_timeout_s, returncode, then):
    found = rules_in(state, orphan_timeout_s).on_end(returncode, 1.0)
    assert found == then if isinstance(then, Exit) else isinstance(found, then)


def test_pauses_grow_and_too_many_ends_in_the_window_end_the_server():
    rules, pauses = rules_in(ServerPhase.SERVING), []
    for at in range(MOST_RESTARTS):
        pauses.append(rules.on_end(-9, float(at)).pause_s)
        rules.on_ready()  # that one comes back changes nothing
    assert pauses == sorted(set(pauses)) and pauses[-1] <= MOST_PAUSE_S
    assert rules.on_end(-9, 10.0) == Exit(1)
    assert isinstance(rules.on_end(-9, WINDOW_S + 20.0), StartAgain)


def test_a_signal_is_the_first_one_once():
    rules = rules_in(ServerPhase.COMING_BACK)
    assert rules.on_signal() and not rules.on_signal()
    rules.on_ready()
    assert rules.state is ServerPhase.STOPPING and rules.on_end(1, 1.0) == Exit(1)
    assert exit_code(-15) == 143


@contextlib.contextmanager
def line_of(tmp_path, weights, orphan_timeout_s=60):
    """A controller's line, and the parent's end of it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = Kept.made(tmp_path, 0, orphan_timeout_s, b"key", None)
    with ours, theirs, kept.control, kept.fronts, kept.forward:
        yield ParentLine(theirs, kept, weights, 1, b"signature"), ours


@pytest.mark.parametrize(("orphan_timeout_s", "weights", "is_ready", "is_stopped", "state", "ends_at_once"), [
    (60, None, True, False, "ready", True),
    (60, "earlier", False, False, "ready", True),
    (60, "earlier", False, False, "loading", False),
    (60, None, False, False, "ready", False),
    (60, None, True, True, "ready", False),
    (60, None, True, False, "draining", False),
    (0, None, True, False, "ready", False),
])  # fmt: skip
def test_a_controller_with_a_bug_ends_at_once_where_another_follows(
    orphan_timeout_s, weights, is_ready, is_stopped, state, ends_at_once, tmp_path, monkeypatch
):
    ends, kept = [], []
    monkeypatch.setattr(launch.os, "_exit", ends.append)
    monkeypatch.setattr(launch.signal, "setitimer", lambda *_: None)
    with line_of(tmp_path, weights, orphan_timeout_s) as (line, _):
        if is_ready:
            line.ready("weights")
        line.is_told_to_stop = is_stopped
        launch._end_for_the_next(types.SimpleNamespace(state=state), line, lambda: kept.append("kept"))
    assert ends == [1] * ends_at_once and kept == ["kept"] * ends_at_once
    rules = Rules(orphan_timeout_s)  # the parent sees it as the controller does
    if is_ready or weights is not None:
        rules.on_ready()
    if is_stopped:
        rules.on_signal()
    assert isinstance(rules.on_end(1, 0.0), StartAgain) or not ends_at_once


@pytest.mark.parametrize(("weights", "most_held_s", "orders", "is_held"), [
    ("earlier", 3600.0, [o.Stop()], True),
    ("earlier", 0.0, [o.Stop()], False),
    ("earlier", 3600.0, [o.Stop(), o.Force()], False),
    (None, 3600.0, [o.Stop()], False),
])  # fmt: skip
async def test_a_controller_on_its_way_back_holds_a_stop_until_it_has_the_streams(
    weights, most_held_s, orders, is_held, tmp_path
):
    with line_of(tmp_path, weights) as (line, parent):
        line.open(most_held_s)
        for order in orders:
            o.send(parent, order)
        async with asyncio.timeout(PATIENCE_S):
            while not line.is_told_to_stop or (len(orders) > 1 and not line.force.is_set()):
                await asyncio.sleep(0)
            if is_held:
                assert not line.stop.is_set()
                line.ready("weights")
            await line.stop.wait()
        line.close()


# --- the process

PROGRAM = textwrap.dedent("""
    import os, select, signal, sys, time
    from pathlib import Path
    from jettison.server.parent import orders as o
    from jettison.server.parent import process, rules

    if "rests" in sys.argv[2]:
        rules.FIRST_PAUSE_S = rules.MOST_PAUSE_S = 3600.0
    process.PING_S, process.MOST_UNANSWERED = 0.02, 100
    process.MOST_UNANSWERED_IMPORTING = 100 if "stuck" in sys.argv[2] else 1_000_000
    notes = Path(sys.argv[1])
    if sys.argv[4:]:
        from jettison.transport.handshake import Identity
    what = sys.argv[2].split(",")

    def note(*words):
        with notes.open("a") as file:
            file.write(" ".join(map(str, words)) + "\\n")

    def controller(line):
        heritage = line.heritage
        epoch = 0 if heritage is None else heritage.epoch
        note("controller", os.getpid(), epoch, line.weights)
        if heritage is not None:
            note("networks", os.pread(heritage.networks_fd, 100, 0), os.get_inheritable(heritage.networks_fd))
            os.pwrite(heritage.networks_fd, b"of-%d" % epoch, 0)
        if sys.argv[4:]:
            papers = heritage.authority.papers_for(Identity(3, epoch))
            note("papers", *(part.hex() for part in papers))
        me = what[min(max(1, epoch), len(what)) - 1]
        if me == "fails":
            return 5
        if me == "stuck":
            time.sleep(3600)
        if me == "breaks":
            raise OSError(28, "a controller's own error")
        sock = line._sock
        o.send(sock, o.Ready("weights"))
        while True:
            message = o.receive_from_parent(sock)
            if message is None:
                return 3
            if me == "mute":
                continue
            if isinstance(message, o.Ping):
                o.send(sock, o.Pong())
                continue
            note(type(message).__name__)
            if isinstance(message, o.Stop if me in ("serves", "rests") else o.Force):
                return 1 if me == "stubborn" else 0

    def prepare():
        import jettison.server.parent.line

        note("prepared", os.getpid())
        if what == ["unprepared"]:
            raise ImportError("no such library")

    parent = process.Parent(
        controller, 0, "127.0.0.1", 0, float(sys.argv[3]), prepare=prepare, spans_hosts=bool(sys.argv[4:]))
    code = parent.run()
    sys.exit(code)
""")


class Server:
    def __init__(self, folder, what, orphan_timeout_s=60.0, *more):
        self.notes = folder / "notes"
        self.notes.touch()
        environment = os.environ | {"TMPDIR": str(folder)}
        command = (sys.executable, "-c", PROGRAM, str(self.notes), what, str(orphan_timeout_s), *more)
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)

    def lines(self):
        return self.notes.read_text().splitlines()

    def controllers(self):
        return [line.split()[1:] for line in self.lines() if line.startswith("controller")]

    def until(self, condition):
        ends_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < ends_s, self.lines()
            time.sleep(0.01)

    def serving(self, number=1):
        """The process id of controller ``number``, once the parent knows that it is ready."""
        self.until(lambda: len(self.controllers()) == number)
        before = self.lines().count("Hangup")
        pid = int(self.controllers()[-1][0])

        def is_heard():
            self.process.send_signal(signal.SIGHUP)
            time.sleep(0.02)
            return self.lines().count("Hangup") > before

        self.until(is_heard)
        return pid

    def ended(self):
        self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode

    def close(self):
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def server(*arguments):
    made = Server(*arguments)
    try:
        yield made
    finally:
        made.close()


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def folders(path):
    return list(path.glob("jettison-run-*"))


def test_a_controller_that_cannot_start_ends_the_server_as_if_there_were_no_parent(tmp_path):
    with server(tmp_path, "fails") as made:
        assert made.ended() == 5
        assert len(made.controllers()) == 1 and not folders(tmp_path)


def test_a_killed_controller_is_followed_by_one_of_a_higher_epoch_that_serves_the_same_weights(tmp_path):
    with server(tmp_path, "serves") as made:
        first = made.serving()
        os.kill(first, signal.SIGKILL)
        second = made.serving(2)
        assert [each[1:] for each in made.controllers()] == [["1", "None"], ["2", "weights"]]
        made.process.send_signal(signal.SIGTERM)
        assert made.ended() == 0 and is_gone(second) and not folders(tmp_path)


def test_each_controller_finds_what_the_one_before_has_left_of_networks(tmp_path):
    with server(tmp_path, "serves") as made:
        for epoch in (1, 2):
            os.kill(made.serving(epoch), signal.SIGKILL)
        made.serving(3)
        found = [line.split()[1:] for line in made.lines() if line.startswith("networks")]
        assert found == [["b''", "False"], ["b'of-1'", "False"], ["b'of-2'", "False"]]


def test_one_that_fails_on_its_way_back_is_followed_by_another(tmp_path):
    with server(tmp_path, "serves,fails,serves") as made:
        os.kill(made.serving(), signal.SIGKILL)
        made.serving(3)


def test_without_a_time_for_orphans_the_server_ends_with_its_controller(tmp_path):
    with server(tmp_path, "serves", 0.0) as made:
        os.kill(made.serving(), signal.SIGKILL)
        assert made.ended() == 137 and len(made.controllers()) == 1


def test_a_signal_in_the_pause_between_two_controllers_has_the_next_one_end_in_order(tmp_path):
    with server(tmp_path, "serves,rests") as made:
        os.kill(made.serving(), signal.SIGKILL)
        assert b"the controller has ended (-9)" in made.process.stderr.readline()
        made.process.send_signal(signal.SIGTERM)
        assert made.ended() == 0 and len(made.controllers()) == 2 and made.lines()[-1] == "Stop"


def test_a_second_signal_forces_the_end(tmp_path):
    with server(tmp_path, "stubborn") as made:
        made.serving()
        made.process.send_signal(signal.SIGTERM)
        made.until(lambda: "Stop" in made.lines())
        made.process.send_signal(signal.SIGINT)
        assert made.ended() == 1 and "Force" in made.lines()


def test_a_controller_that_hangs_is_killed_and_followed(tmp_path):
    with server(tmp_path, "mute,serves") as made:
        made.until(lambda: len(made.controllers()) == 2)
        assert is_gone(int(made.controllers()[0][0]))
        made.serving(2)


def test_one_that_hangs_on_its_way_back_is_killed_and_followed(tmp_path):
    with server(tmp_path, "serves,stuck,serves") as made:
        os.kill(made.serving(), signal.SIGKILL)
        made.serving(3)
        assert is_gone(int(made.controllers()[1][0]))


def prepared(made):
    return [int(line.split()[1]) for line in made.lines() if line.startswith("prepared")]


def test_what_a_controller_imports_is_imported_once_and_again_where_that_process_dies(tmp_path):
    with server(tmp_path, "serves") as made:
        os.kill(made.serving(), signal.SIGKILL)
        second = made.serving(2)
        (starter,) = prepared(made)
        os.kill(starter, signal.SIGKILL)
        made.serving(3)
        assert is_gone(second) and len(prepared(made)) == 2
        made.process.send_signal(signal.SIGTERM)
        assert made.ended() == 0 and all(map(is_gone, prepared(made)))


def test_what_a_controller_of_a_later_starter_raises_is_its_own_error(tmp_path):
    with server(tmp_path, "serves,breaks,serves") as made:
        made.serving()
        os.kill(prepared(made)[0], signal.SIGKILL)
        made.serving(3)
        made.process.send_signal(signal.SIGTERM)
        _, told = made.process.communicate(timeout=PATIENCE_S)
        assert made.process.returncode == 0 and b"a controller's own error" in told
        assert b"the controller has ended (1)" in told and b"no controller could be started" not in told


def test_a_starter_that_stands_still_is_killed_once_its_controller_has_ended(tmp_path):
    with server(tmp_path, "serves") as made:
        first = made.serving()
        (starter,) = prepared(made)
        os.kill(starter, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        made.serving(2)
        assert is_gone(starter) and len(prepared(made)) == 2


def test_what_cannot_be_imported_ends_the_server(tmp_path):
    with server(tmp_path, "unprepared") as made:
        assert made.ended() == 1 and not made.controllers() and not folders(tmp_path)


def test_a_stopped_controller_is_killed_and_followed(tmp_path):
    with server(tmp_path, "serves") as made:
        first = made.serving()
        os.kill(first, signal.SIGSTOP)
        made.serving(2)
        assert is_gone(first)


def test_the_parent_signs_for_every_controller_with_one_key_that_none_of_them_has(tmp_path):
    with server(tmp_path, "serves", 60.0, "spans-hosts") as made:
        os.kill(made.serving(), signal.SIGKILL)
        made.serving(2)
        papers = [Papers(*map(bytes.fromhex, line.split()[1:])) for line in made.lines() if line.startswith("papers")]
    first, second = papers
    assert first.authority == second.authority and first.certificate != second.certificate
    for epoch, each in enumerate(papers, 1):
        assert x509.load_pem_x509_certificate(each.certificate).subject.rfc4514_string() == (
            f"CN={name_of(Identity(3, epoch))}")  # fmt: skip
        TlsContexts(each)  # they go together


def test_a_controller_ends_with_its_parent_and_the_folder_goes(tmp_path):
    with server(tmp_path, "serves") as made:
        controller = made.serving()
        made.process.kill()
        made.until(lambda: is_gone(controller))
        made.until(lambda: not folders(tmp_path))


def test_what_cannot_be_signed_is_refused_and_the_desk_lives_on():
    desk = SigningDesk()
    ours = desk.open()
    authority = lent_authority(ours, desk.certificate)
    with ThreadPoolExecutor(1) as pool:

        def asked(call, *arguments):
            asking = pool.submit(call, *arguments)
            while not asking.done():
                desk.answer()
                time.sleep(0.001)
            return asking.result()

        with pytest.raises(LinkDownError, match="no signing request"):
            asked(authority.sign, b"no request", Identity(1, 0))
        with pytest.raises(LinkDownError, match="bytes"):
            authority.sign(bytes(MAX_REQUEST_BYTES + 1), Identity(1, 0))
        TlsContexts(asked(authority.papers_for, Identity(1, 0)))
        ours.send(msgspec.msgpack.encode(Sign(-1, Applicant(Identity(1, 0)).request, Identity(1, 0))))
        TlsContexts(asked(authority.papers_for, Identity(2, 0)))  # the answer to that is passed over
        ours.send(b"no question")
        desk.answer()
    with pytest.raises(LinkDownError, match="the parent does not sign"):
        authority.papers_for(Identity(1, 0))
    ours.close()


def test_what_controllers_are_forked_from_has_one_thread():
    program = """if True:
        import os
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        import jettison.server.launch
        print(len(os.listdir("/proc/self/task")))
    """
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "1"


def test_the_parent_is_small():
    """It has one thread when it forks, and nothing that a controller needs."""
    program = """if True:
        import os, sys
        import jettison.cli.main, jettison.server.parent.process
        print(sorted({"torch", "uvloop", "uvicorn", "starlette", "tokenizers"} & sys.modules.keys()))
        print(len(os.listdir("/proc/self/task")))
    """
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.split("\n")[:2] == ["[]", "1"]


def ends_with_a_bug(keep):
    """The code with which a controller's process ends that keeps its records so."""
    engine, line = types.SimpleNamespace(state="ready"), types.SimpleNamespace(is_followed=True)
    pid = os.fork()
    if pid == 0:
        try:
            launch._end_for_the_next(engine, line, keep)
        finally:
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_controller_with_a_bug_keeps_its_records_and_ends_whatever_becomes_of_that(tmp_path, monkeypatch):
    path = tmp_path / "line.json.gz"
    config = types.SimpleNamespace(server=types.SimpleNamespace(timeline=str(path)))
    own = launch._own_timeline(config, types.SimpleNamespace(heritage=types.SimpleNamespace(epoch=2)))
    engine = types.SimpleNamespace(timeline=Timeline())

    def keep():
        recorder = TraceRecorder(tmp_path / "trace.csv", 1 << 20)
        recorder.start()
        recorder.record(0, 3, 4, 0, False)
        launch._keep_records(engine, recorder, own)

    assert ends_with_a_bug(keep) == 1
    assert (tmp_path / "trace.csv").read_text().splitlines()[-1].endswith("3,4,0,online")
    assert own.name == "line-2.json.gz" and own.exists() and not path.exists()
    assert ends_with_a_bug(lambda: 1 / 0) == 1
    monkeypatch.setattr(launch, "LAST_WORDS_S", 0.05)
    assert ends_with_a_bug(threading.Event().wait) == -signal.SIGALRM
