"""Real worker processes with fake devices: they start, talk, fail, and never outlive their controller."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from worker_fakes import expected_token, make_step, tokens_of

import jettison
from jettison.core import ports
from jettison.device.model.hf_config import parse_config
from jettison.device.model.jsonfile import JsonObject
from jettison.errors import JettisonError, UserError, WorkerLostError
from jettison.live.engine.crew import Crew
from jettison.live.engine.spawn_local import LocalSpawner
from jettison.live.machine.run_folder import remove_abandoned
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.wire.heartbeat import Patience
from jettison.live.wire.worker_config import WorkerSpec
from jettison.types import LayerRange
from waiting import PATIENCE_S

pytestmark = pytest.mark.live

HERE = Path(__file__).parent
SOURCES = Path(jettison.__file__).parent.parent
MODEL = parse_config(JsonObject(HERE / "config.json", {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 16, "max_position_embeddings": 64,
}))
"""Fake devices never look at it."""
CHILD = (sys.executable, str(HERE / "worker_child.py"))


def spec(worker_id, what=""):
    return WorkerSpec(
        worker_id=worker_id, model_dir=what, model=MODEL, dtype="float32", memory_bytes=1, block_size=16,
        page_bytes=4096, max_num_tokens=64, max_num_seqs=4, kernels="auto", num_threads=1, piece_bytes=256,
    )


class Apart(LocalSpawner):
    """Each worker stands for a host, with TCP on loopback between them."""

    def hosts(self):
        return ["0", "1"]

    def host_of(self, worker):
        return str(worker)


class TwoHosts(LocalSpawner):
    """Workers 0 and 1 are on one host, worker 2 is on another."""

    def hosts(self):
        return ["left", "right"]

    def host_of(self, worker):
        return "left" if worker < 2 else "right"


SPAWNERS = {"shm": LocalSpawner, "tcp": Apart, "mixed": TwoHosts}


class Cluster:
    """A crew and what its workers said."""

    def __init__(self, num_workers=2, what="", link_kind="shm", **more):
        self.events: list[m.Event] = []
        self.told: list[tuple[int, m.Event]] = []
        """The same, with the workers that told."""
        self.exits: list[tuple[int, int]] = []
        self.changed = asyncio.Event()
        self.spawner = SPAWNERS[link_kind](worker_command=CHILD)
        self.crew = Crew(
            [spec(i, what) for i in range(num_workers)], self.spawner, self._on_event, self._on_exit, **more
        )

    def _on_event(self, worker_id, event):
        self.events.append(event)
        self.told.append((worker_id, event))
        self.changed.set()

    def _on_exit(self, worker_id, returncode):
        self.exits.append((worker_id, returncode))
        self.changed.set()

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def __aenter__(self):
        self.ready = await self.crew.start()
        return self

    async def __aexit__(self, *exc):
        pids = list(self.crew.pids.values())
        await self.crew.close(5.0)
        assert self.crew.pids == {} and not any(is_alive(pid) for pid in pids)
        assert not self.spawner.folder.path.exists()


def read(path):
    return Path(path).read_bytes()


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def pipeline_step(step_id, tokens):
    yield 0, codec.step_command(make_step(step_id, tokens, (0, 2), None, 1))
    yield 1, codec.step_command(make_step(step_id, tokens, (2, 4), 0, None))


@pytest.mark.parametrize("link_kind", ["shm", "tcp"])
async def test_steps_and_moves_between_processes(link_kind):
    async with Cluster(link_kind=link_kind) as cluster:
        assert [event.worker_id for event in cluster.ready] == [0, 1]
        assert {event.worker_id: event.pid for event in cluster.ready} == cluster.crew.pids
        assert all(event.memory["objects_out_of_the_collector_s_sight"] > 1000 for event in cluster.ready)
        big = list(range(7000))
        for step_id, tokens in enumerate([[5], [6, 7], big]):
            for worker, command in pipeline_step(step_id, tokens):
                cluster.crew.send(worker, command)
        cluster.crew.send(0, ports.SendKV(1, 0, 1, LayerRange(0, 4), (1, 2), (3, 4)))
        cluster.crew.send(1, ports.SendShard(2, 1, 0, "layer:3"))
        cluster.crew.send(1, m.ReportMemory(3))
        await cluster.until(lambda: len(cluster.events) == 9)
        done = {event.step_id: tokens_of(event) for event in cluster.events if isinstance(event, m.StepDone)}
        assert done == {i: [expected_token(t, [(0, 2), (2, 4)])] for i, t in enumerate([[5], [6, 7], big])}
        ended = [(worker, event) for worker, event in cluster.told if isinstance(event, ports.TransferEnded)]
        assert sorted((e.transfer_id, worker, e.complete, e.num_bytes) for worker, e in ended) == [
            (1, 1, True, 2 * 4 * 40), (2, 0, True, 1000),
        ]
        # The block that worker 1 got, sent back and on: bytes survive both directions.
        cluster.crew.send(1, ports.SendKV(4, 1, 0, LayerRange(0, 4), (3,), (9,)))
        await cluster.until(lambda: len(cluster.events) == 10)
        assert cluster.events[-1].complete and cluster.exits == []


def num_shared_memories(pid):
    """Of links: each end keeps its own slots mapped, and the peer's."""
    return sum("jettison-link" in os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())


async def test_links_are_of_their_pair_s_kind_and_opened_when_first_used():
    async with Cluster(3, link_kind="mixed") as cluster:
        assert [num_shared_memories(pid) for pid in cluster.crew.pids.values()] == [0, 0, 0]
        stages = [(0, (0, 1), None, 1), (1, (1, 2), 0, 2), (2, (2, 4), 1, None)]
        for worker, layers, prev, next_ in stages:
            cluster.crew.send(worker, codec.step_command(make_step(1, [5], layers, prev, next_)))
        cluster.crew.send(2, ports.SendKV(7, 2, 0, LayerRange(0, 4), (1, 2), (3, 4)))
        cluster.crew.send(0, ports.SendShard(8, 0, 2, "layer:3"))
        await cluster.until(lambda: len(ends(cluster)) == 1 and len(copy_ends(cluster)) == 2)
        assert tokens_of(ends(cluster)[0]) == [expected_token([5], [layers for _, layers, _, _ in stages])]
        assert all(end.complete for end in copy_ends(cluster))
        assert [num_shared_memories(pid) for pid in cluster.crew.pids.values()] == [2, 2, 0]


async def test_a_bug_in_start_is_not_the_users_fault():
    with pytest.raises(JettisonError, match="ZeroDivisionError: oops"):
        async with Cluster(1, what="0:bug"):
            pass


def copy_out(transfer_id):
    return ports.SendKV(transfer_id, 0, 0, LayerRange(0, 4), (1, 2), (3, 4), to_host=True, beside_steps=True)


def copy_ends(cluster):
    return [event for event in cluster.events if isinstance(event, ports.TransferEnded)]


async def test_a_copy_beside_steps_is_told_of_by_a_worker_that_has_nothing_else_to_do():
    async with Cluster(1) as cluster:
        for transfer_id in range(3):
            cluster.crew.send(0, copy_out(transfer_id))
            await cluster.until(lambda wanted=transfer_id: len(copy_ends(cluster)) == wanted + 1)
        assert [(end.transfer_id, end.complete) for end in copy_ends(cluster)] == [(0, True), (1, True), (2, True)]


async def test_steps_run_and_a_worker_dies_in_the_middle_of_a_copy():
    async with Cluster(1, "0:slow copies") as cluster:
        cluster.crew.send(0, copy_out(1))
        cluster.crew.send(0, codec.step_command(make_step(2, [5], (0, 4))))
        await cluster.until(lambda: any(isinstance(event, m.StepDone) for event in cluster.events))
        os.kill(cluster.crew.pids[0], signal.SIGKILL)
        await cluster.until(lambda: cluster.exits)
        assert copy_ends(cluster) == []


async def test_a_killed_worker_is_reported_once_after_its_events():
    async with Cluster(2) as cluster:
        for worker, command in pipeline_step(1, [5]):
            cluster.crew.send(worker, command)
        await cluster.until(lambda: len(cluster.events) == 2)
        os.kill(cluster.crew.pids[0], signal.SIGKILL)
        await cluster.until(lambda: bool(cluster.exits))
        assert cluster.exits == [(0, -signal.SIGKILL)] and list(cluster.crew.pids) == [1]
        cluster.crew.send(0, m.ReportMemory(1))  # to no worker: no error
        # The survivor ends what depended on the dead one, and lives on.
        cluster.crew.send(*list(pipeline_step(2, [5]))[1])
        cluster.crew.send(1, codec.step_command(make_step(3, [5])))
        await cluster.until(lambda: len(cluster.events) == 5)
        lost = ports.LinkLost(1, 0, 0)
        ends = {type(event): event.step_id for event in cluster.events[2:] if event != lost}
        assert lost in cluster.events and ends == {ports.StepFailed: 2, m.StepDone: 3}


async def test_signals_of_the_process_group_do_not_end_a_worker():
    async with Cluster(1) as cluster:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(cluster.crew.pids[0], number)
        cluster.crew.send(0, codec.step_command(make_step(1, [5])))
        await cluster.until(lambda: len(cluster.events) == 1)
        assert cluster.exits == []


@pytest.mark.parametrize("what", ["", "0:hang", "1:slow"])
def test_workers_die_with_a_controller_that_is_killed(what):
    """Idle (end of file), in the middle of a step, and while loading (both: parent-death signal)."""
    script = textwrap.dedent(f"""
        import asyncio, sys, time
        sys.path[:0] = {[str(HERE), str(HERE.parents[1]), str(SOURCES)]!r}
        from worker_fakes import make_step
        from test_processes import Cluster
        from jettison.live.wire import codec

        async def main():
            cluster = Cluster(2, what={what!r})
            starting = asyncio.create_task(cluster.crew.start())
            if {what!r} == "1:slow":
                while not (len(cluster.crew.pids) == 2 and all(cluster.crew.pids.values())):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.5)  # while they load
            else:
                await starting
                cluster.crew.send(0, codec.step_command(make_step(1, [5])))
            await asyncio.sleep(0.2)
            print(*cluster.crew.pids.values(), cluster.spawner.folder.path, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    controller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    *pids, folder = controller.stdout.readline().split()
    controller.kill()
    controller.wait()
    controller.stdout.close()
    deadline = time.monotonic() + PATIENCE_S
    while any(is_alive(int(pid)) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pids) == 2 and not any(is_alive(int(pid)) for pid in pids)
    remove_abandoned(Path(folder).parent)  # as the next start does
    assert not Path(folder).exists()


@pytest.fixture
def address_limit(monkeypatch):
    """Far more than is needed, but a limit; child processes inherit it: a fork server of this environment alone."""
    monkeypatch.setenv("OF_A_TEST", "address_limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 42, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(("what", "error", "says"), [
    ("memory", UserError, r"^MemoryError; ulimit -v lets .* 4096.00 GiB .* unlimited"),
    ("crash", WorkerLostError, r"ended with code 7 while it was starting \(ulimit -v lets a process have 4096.00 GiB"),
])
async def test_a_worker_that_may_lack_addresses_says_so(what, error, says, address_limit, capfd):
    with pytest.raises(error, match=says):
        async with Cluster(1, what=f"0:{what}"):
            pass
    assert "Traceback" not in capfd.readouterr().err


async def test_a_folder_for_temporary_files_whose_path_is_too_long_for_a_socket(tmp_path, monkeypatch):
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with Cluster() as cluster:
        done = await run_step(cluster, 1, [5])
        assert tokens_of(done) == [expected_token([5], [(0, 2), (2, 4)])]
    assert not list(long.iterdir())


async def test_the_secret_is_on_no_command_line_and_in_no_environment():
    async with Cluster(1) as cluster:
        secret = cluster.crew._secret.hex().encode()
        for name in ("cmdline", "environ"):
            assert secret not in read(f"/proc/{cluster.crew.pids[0]}/{name}")


# --- lives after the first


async def run_step(cluster, step_id, tokens):
    for worker, command in pipeline_step(step_id, tokens):
        cluster.crew.send(worker, command)
    await cluster.until(lambda: any(getattr(e, "step_id", None) == step_id for e in ends(cluster)))
    return next(e for e in ends(cluster) if e.step_id == step_id)


def ends(cluster):
    return [event for event in cluster.events if isinstance(event, m.StepDone | ports.StepFailed)]


@pytest.mark.parametrize("link_kind", ["shm", "tcp"])
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_worker_is_started_again_with_links_to_all(link_kind, victim):
    async with Cluster(link_kind=link_kind) as cluster:
        assert tokens_of(await run_step(cluster, 1, [5])) == [expected_token([5], [(0, 2), (2, 4)])]
        for life in (1, 2):
            os.kill(cluster.crew.pids[victim], signal.SIGKILL)
            await cluster.until(lambda life=life: len(cluster.exits) == life)
            cluster.crew.send(1 - victim, ports.FenceWorker(1 - victim, life, victim, life - 1))
            await cluster.until(lambda life=life: ports.WorkerFenced(1 - victim, life) in cluster.events)
            ready = await cluster.crew.restart(victim)
            assert ready.pid == cluster.crew.pids[victim] and cluster.crew.life(victim) == life
            done = await run_step(cluster, 10 + life, [6, life])
            assert tokens_of(done) == [expected_token([life], [(0, 2), (2, 4)])]
            # A fence for an older life that comes late does not harm the new link.
            cluster.crew.send(1 - victim, ports.FenceWorker(1 - victim, 100 + life, victim, life - 1))
            assert isinstance(await run_step(cluster, 20 + life, [7]), m.StepDone)
            lives = {1 - victim: 0, victim: life}
            names = {path.name for path in cluster.spawner.folder.path.iterdir()}
            assert names == {"control", *(f"link-{w}.{n}" for w, n in lives.items())}, "older lives leave no name"


async def test_a_stage_that_lost_its_input_says_who_is_lost():
    async with Cluster() as cluster:
        (_, _), (second, command) = pipeline_step(1, [5])
        cluster.crew.send(second, command)
        os.kill(cluster.crew.pids[0], signal.SIGKILL)
        await cluster.until(lambda: ends(cluster))
        assert ends(cluster)[0].lost_worker == 0


@pytest.mark.parametrize("kill_hung", [True, False])
async def test_a_stopped_worker_is_replaced_and_heard_no_more(kill_hung):
    async with Cluster(patience=Patience(3.0, 300.0)) as cluster:
        cluster.crew.kill_hung = kill_hung
        old = cluster.crew.pids[0]
        os.kill(old, signal.SIGSTOP)
        cluster.crew.send(0, codec.step_command(make_step(1, [5])))
        await cluster.until(lambda: cluster.exits)
        assert cluster.exits == [(0, -signal.SIGKILL)] and 0 not in cluster.crew.pids
        cluster.crew.send(1, ports.FenceWorker(1, 1, 0, 0))
        await cluster.crew.restart(0)
        if not kill_hung:
            assert is_alive(old)
            os.kill(old, signal.SIGCONT)
        await cluster.until(lambda: ports.WorkerFenced(1, 1) in cluster.events)
        async with asyncio.timeout(PATIENCE_S):
            while is_alive(old):
                await asyncio.sleep(0.01)
        assert isinstance(await run_step(cluster, 2, [5]), m.StepDone)
        assert [e.step_id for e in ends(cluster)] == [2], "the step of the old life counts nowhere"
        assert len(cluster.exits) == 1


async def test_a_worker_that_only_waits_or_computes_long_is_not_hung():
    async with Cluster(patience=Patience(1.5, 300.0), what="0:hang") as cluster:
        cluster.crew.send(0, codec.step_command(make_step(1, [5])))
        await asyncio.sleep(4.0)
        assert cluster.exits == []


async def test_one_endless_step_counts_as_hung():
    async with Cluster(patience=Patience(0.0, 0.5), what="0:hang") as cluster:
        cluster.crew.send(0, codec.step_command(make_step(1, [5])))
        await cluster.until(lambda: cluster.exits)
        assert cluster.exits[0][0] == 0


async def lose(cluster, worker):
    """Give a worker up, and have the other one fence it."""
    life = cluster.crew.life(worker)
    cluster.crew.declare_lost(worker, "injected")
    cluster.crew.send(1 - worker, ports.FenceWorker(1 - worker, life, worker, life))
    await cluster.until(lambda: ports.WorkerFenced(1 - worker, life) in cluster.events)


@pytest.mark.parametrize("broken", ["socket.send_fds", "os.pipe"])
async def test_a_start_that_the_machine_refuses_leaves_nothing_and_can_be_tried_again(broken, monkeypatch):
    async with Cluster() as cluster:
        await lose(cluster, 0)
        await cluster.crew._lives[0].handle.ended
        gc.collect()
        num_files = len(os.listdir("/proc/self/fd"))

        def refuse(*arguments, **options):
            raise OSError(12, "Cannot allocate memory")

        with monkeypatch.context() as patch:
            patch.setattr(broken, refuse)
            for _ in range(2):
                with pytest.raises(OSError, match="Cannot allocate"):
                    await cluster.crew.restart(0)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == num_files
        await cluster.crew.restart(0)
        assert isinstance(await run_step(cluster, 1, [5]), m.StepDone)
