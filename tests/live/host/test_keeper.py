"""Processes of one host: what they inherit, how they end, and what is left of a start that fails."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from jettison.device.model.hf_config import parse_config
from jettison.device.model.jsonfile import JsonObject
from jettison.live.host import keeper as keepers
from jettison.live.host.forkserver import fork_servers_kept
from jettison.live.host.keeper import Keeper, fork_server_begun
from jettison.live.machine.netns import Placement
from jettison.live.wire.heartbeat import Patience
from jettison.live.wire.worker_config import WorkerSpec, WorkerStart
from waiting import PATIENCE_S

pytestmark = pytest.mark.live

CHILD = textwrap.dedent("""
    import os, sys, time
    from jettison.live.wire.heartbeat import Heart
    from jettison.live.wire.stepflag import StepFlag
    from jettison.live.worker.forked import serve_forks

    def run(config):
        assert config.secret == b"s" * 16
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert not os.environ.keys() & {"JETTISON_API_KEY", "VLLM_API_KEY", "RAY_AUTH_TOKEN"}
        os.write(config.spec.shared_copy_fd, b"x")
        what = config.spec.model_dir
        if what == "exit":
            sys.exit(len(config.listen_fds))
        if what == "bug":
            raise ZeroDivisionError
        if what == "full":
            full = os.open("/dev/full", os.O_WRONLY)
            for standard in (sys.stdout, sys.stderr):
                os.dup2(full, standard.fileno())
                try:
                    print("what no disk has room for", file=standard)
                except OSError:
                    pass
            return 3
        if what == "say":
            print(os.getcwd(), os.getppid(), len(os.listdir("/proc/self/fd")))
            return 0
        heart = Heart(config.beat_fd, 0.001)
        heart.waiting = True
        if what == "beat":
            heart.start()
        flag = StepFlag.attach(config.flag_fd)
        while not flag.names(7):
            time.sleep(0.001)
        return len(config.listen_fds) if what == "doors" else 7

    serve_forks(run, lambda: None)
""")
MODEL = parse_config(JsonObject(Path("config.json"), {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 16, "max_position_embeddings": 64,
}))


def start_of(worker, what, life=0):
    spec = WorkerSpec(
        worker_id=worker, model_dir=what, model=MODEL, dtype="float32", memory_bytes=1, block_size=16,
        page_bytes=4096, max_num_tokens=64, max_num_seqs=4, num_threads=3,
    )
    return WorkerStart(
        spec=spec, secret_hex=(b"s" * 16).hex(), epoch=life, control_address="unix:/nowhere", beat_interval_s=0.01
    )


@pytest.fixture
async def keeper(tmp_path, monkeypatch):
    monkeypatch.setenv("JETTISON_API_KEY", "a secret")
    monkeypatch.setenv("VLLM_API_KEY", "another")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a third")
    os.chmod(tmp_path, 0o700)
    kept = Keeper(tmp_path, (sys.executable, "-c", CHILD))
    yield kept
    kept.close()
    kept.close()


async def ended(child):
    return await asyncio.wait_for(asyncio.shield(child.ended), 30)


@pytest.mark.parametrize(("has_far_peers", "num_doors"), [(False, 1), (True, 2)])
async def test_a_worker_listens_for_its_own_host_and_where_there_are_others_for_them(
    keeper, tmp_path, has_far_peers, num_doors
):
    child = keeper.spawn(start_of(4, "doors", 2), Placement(), has_far_peers=has_far_peers)
    assert child.addresses.near == f"unix:{tmp_path}/link-4.2"
    assert (child.addresses.far is not None) == has_far_peers
    if child.addresses.far is not None:
        host, port = child.addresses.far.removeprefix("tcp:").split(":")
        socket.create_connection((host, int(port)), 5).close()
    child.abandon(7)
    assert await ended(child) == num_doors
    keeper.spawn(start_of(4, "exit", 3), Placement(), has_far_peers=False)
    assert [path.name for path in tmp_path.iterdir()] == ["link-4.3"], "older lives leave no name"


@pytest.mark.parametrize("name", [b"gone", "f\u00fcr".encode("latin-1")])
async def test_a_worker_starts_in_its_keepers_folder_whatever_that_is_called_and_where_it_is_gone(
    keeper, tmp_path, monkeypatch, name, capfd
):
    folder = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(folder)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # with a relative one no Python starts where the folder is gone
    if name == b"gone":
        os.rmdir(folder)
        assert await ended(keeper.spawn(start_of(0, "exit"), Placement(), has_far_peers=True)) == 2, "it ran"
        return
    assert await ended(keeper.spawn(start_of(0, "say"), Placement(), has_far_peers=False)) == 0
    assert os.fsencode(tmp_path) in os.fsencode(capfd.readouterr().out)


async def test_a_step_is_given_up_by_its_word_and_a_process_that_has_ended_takes_none(keeper):
    child = keeper.spawn(start_of(0, "flag"), Placement(), has_far_peers=False)
    child.abandon(6)
    child.abandon(7)
    assert await ended(child) == 7
    child.abandon(8)
    child.kill()
    child.begin_beats(0.0)
    assert child.why_hung(1e9, 0.0, Patience(1.0, 1.0)) is None


async def test_a_worker_whose_last_lines_have_no_room_on_the_disk_ends_with_its_code(keeper, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert await ended(keeper.spawn(start_of(0, "full"), Placement(), has_far_peers=False)) == 3


async def test_a_process_that_is_killed_has_ended(keeper):
    child = keeper.spawn(start_of(0, "flag"), Placement(), has_far_peers=False)
    child.kill()
    child.kill()
    assert await ended(child) == -signal.SIGKILL


async def test_beats_keep_a_process_from_counting_as_hung(keeper):
    patience = Patience(60.0, 0.0)
    beating = keeper.spawn(start_of(0, "beat"), Placement(), has_far_peers=False)
    silent = keeper.spawn(start_of(1, "flag"), Placement(), has_far_peers=False)
    begun_s = time.monotonic()
    for child in (beating, silent):
        child.begin_beats(begun_s)
    assert silent.why_hung(begun_s + 59, 0.0, patience) is None
    assert "silent" in str(silent.why_hung(begun_s + 61, 0.0, patience))
    assert silent.why_hung(begun_s + 61, 5.0, patience) is None, "the caller was away"
    async with asyncio.timeout(PATIENCE_S):
        while beating.why_hung(begun_s + 61, 0.0, patience) is not None:
            await asyncio.sleep(0.005)  # until its first beat is here
    for child in (beating, silent):
        child.abandon(7)
        assert await ended(child) == 7


async def test_workers_of_a_host_share_one_copy_of_the_parameters(keeper):
    for worker in range(2):
        assert await ended(keeper.spawn(start_of(worker, "exit"), Placement(), has_far_peers=False)) == 1
    fd = keeper._shared_copy_fd
    assert os.fstat(fd).st_size == 2, "both have written"
    keeper.empty_shared_copy()
    assert os.fstat(fd).st_size == 0


async def test_an_error_of_a_worker_ends_it_alone(keeper, capfd):
    running = keeper.spawn(start_of(0, "flag"), Placement(), has_far_peers=False)
    assert await ended(keeper.spawn(start_of(1, "bug"), Placement(), has_far_peers=False)) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err
    running.abandon(7)
    assert await ended(running) == 7


async def test_a_worker_starts_where_its_keeper_is_and_with_no_descriptor_of_another(
    keeper, tmp_path, capfd, monkeypatch
):
    others = [keeper.spawn(start_of(worker, "flag"), Placement(), has_far_peers=True) for worker in (1, 2)]
    said = []
    for folder in (tmp_path, Path("/")):
        monkeypatch.chdir(folder)
        assert await ended(keeper.spawn(start_of(0, "say"), Placement(), has_far_peers=False)) == 0
        said.append(capfd.readouterr().out.split())
    assert [line[0] for line in said] == [str(tmp_path), "/"]
    # 0 to 2; the copy of the parameters, beats, the flag; a door; the folder that is listed
    assert [line[2] for line in said] == ["8", "8"]
    for child in others:
        child.kill()
        assert await ended(child) == -signal.SIGKILL


def num_watched(pid):
    """Descriptors that the process waits for, of all its epolls."""
    count = 0
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += path.read_text().count("tfd:")
    return count


async def test_a_fork_server_waits_for_nothing_that_has_ended(keeper, tmp_path, capfd):
    """A descriptor that stays ready would have it spin."""
    with fork_servers_kept():
        assert await ended(keeper.spawn(start_of(0, "say"), Placement(), has_far_peers=False)) == 0
        server = int(capfd.readouterr().out.split()[1])
        assert num_watched(server) == 3, "its parent, its door, the keeper's line"
        child = keeper.spawn(start_of(1, "flag"), Placement(), has_far_peers=False)
        async with asyncio.timeout(PATIENCE_S):
            while not child.pid:
                await asyncio.sleep(0.001)
        pidfd = os.dup(child._pidfd)  # as if the keeper were slow to close it
        keeper.close()
        async with asyncio.timeout(PATIENCE_S):
            while num_watched(server) > 2:
                await asyncio.sleep(0.001)
        os.close(pidfd)
        assert await ended(child) == -signal.SIGKILL


async def test_a_fork_server_that_was_begun_before_is_the_keepers(tmp_path, capfd):
    command = (sys.executable, "-c", CHILD + "# of its own\n")
    before = set(psutil.Process().children())
    with fork_server_begun(3, command):
        (begun,) = set(psutil.Process().children()) - before
        keeper = Keeper(tmp_path, command)
        assert await ended(keeper.spawn(start_of(0, "say"), Placement(), has_far_peers=False)) == 0
        assert int(capfd.readouterr().out.split()[1]) == begun.pid
        keeper.close()


def test_one_fork_server_is_for_the_clusters_of_all_tests(monkeypatch):
    """Torch is imported once in a run. Pytest tells each test's name in the environment, which others are equal in."""
    environment = keepers.worker_environment(1)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    assert keepers.worker_environment(1) == environment
    monkeypatch.setenv("JETTISON_FAILPOINT", "of this test's workers")
    assert keepers.worker_environment(1) != environment


def test_a_host_without_a_process_for_it_is_told_by_the_keeper(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", refused)
    with fork_server_begun(3, (sys.executable, "-c", "# no other has this")):
        pass


async def test_with_a_fork_server_its_workers_end_and_the_next_has_another(keeper, capfd):
    assert await ended(keeper.spawn(start_of(0, "say"), Placement(), has_far_peers=False)) == 0
    server = int(capfd.readouterr().out.split()[1])
    child = keeper.spawn(start_of(1, "flag"), Placement(), has_far_peers=False)
    async with asyncio.timeout(PATIENCE_S):
        while not child.pid:
            await asyncio.sleep(0.001)
    os.kill(server, signal.SIGKILL)
    assert await ended(child) == -signal.SIGKILL
    assert await ended(keeper.spawn(start_of(0, "say", 1), Placement(), has_far_peers=False)) == 0
    assert int(capfd.readouterr().out.split()[1]) != server


async def test_an_order_to_a_fork_server_that_has_just_ended_goes_to_another(keeper, capfd):
    assert await ended(keeper.spawn(start_of(0, "say"), Placement(), has_far_peers=False)) == 0
    server = int(capfd.readouterr().out.split()[1])
    watched = os.pidfd_open(server)
    os.kill(server, signal.SIGKILL)
    select.select([watched], [], [], 30)  # without a turn of the loop: the keeper has not heard of it
    os.close(watched)
    assert await ended(keeper.spawn(start_of(0, "exit", 1), Placement(), has_far_peers=False)) == 1


async def test_no_worker_outlives_its_keeper(keeper, tmp_path):
    with fork_servers_kept():
        child = keeper.spawn(start_of(0, "flag"), Placement(), has_far_peers=False)
        async with asyncio.timeout(PATIENCE_S):
            while not child.pid:
                await asyncio.sleep(0.001)
        alive = os.pidfd_open(child.pid)
        keeper.close()
        await asyncio.to_thread(select.select, [alive], [], [], 30)
        os.close(alive)
        other = Keeper(tmp_path, (sys.executable, "-c", CHILD))
        assert await ended(other.spawn(start_of(0, "exit", 1), Placement(), has_far_peers=False)) == 1
        other.close()


async def test_a_program_that_is_broken_ends_each_start(tmp_path, capfd):
    kept = Keeper(tmp_path, (sys.executable, "-c", "import nothing_of_this_name"))
    for life in range(2):
        assert await ended(kept.spawn(start_of(0, "exit", life), Placement(), has_far_peers=False)) == 1
    kept.close()
    assert "ModuleNotFoundError" in capfd.readouterr().err


@pytest.mark.parametrize("broken", ["socket.send_fds", "os.pipe", "os.memfd_create"])
async def test_a_start_that_the_host_refuses_leaves_no_descriptor(keeper, broken, monkeypatch):
    assert await ended(keeper.spawn(start_of(0, "exit"), Placement(), has_far_peers=True)) == 2
    gc.collect()
    num_files = len(os.listdir("/proc/self/fd"))

    with monkeypatch.context() as patch:
        patch.setattr(broken, refused)
        with pytest.raises(OSError, match="Cannot allocate"):
            keeper.spawn(start_of(0, "exit", 1), Placement(), has_far_peers=True)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == num_files


async def test_a_fork_server_that_the_host_refuses_leaves_no_descriptor(tmp_path, monkeypatch):
    kept = Keeper(tmp_path, (sys.executable, "-c", CHILD + "# of a host that refuses\n"))
    kept.empty_shared_copy()
    with monkeypatch.context() as patch:
        patch.setattr("jettison.live.host.keeper.open_shared_copy", lambda: os.memfd_create("copy"))
        num_files = len(os.listdir("/proc/self/fd")) + 1  # the copy stays with the keeper
        patch.setattr("subprocess.Popen", refused)
        with pytest.raises(OSError, match="Cannot allocate"):
            kept.spawn(start_of(0, "exit"), Placement(), has_far_peers=True)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == num_files
    assert await ended(kept.spawn(start_of(0, "exit", 1), Placement(), has_far_peers=True)) == 2
    kept.close()


def refused(*arguments, **options):
    raise OSError(12, "Cannot allocate memory")


async def test_a_worker_has_ended_only_when_it_is_gone(keeper, capfd):
    """A fork server that is killed closes its line before its workers are killed."""
    assert await ended(keeper.spawn(start_of(0, "say"), Placement(), has_far_peers=False)) == 0
    server = int(capfd.readouterr().out.split()[1])
    children = [keeper.spawn(start_of(worker, "flag", 1), Placement(), has_far_peers=False) for worker in range(3)]
    async with asyncio.timeout(PATIENCE_S):
        while not all(child.pid for child in children):
            await asyncio.sleep(0.001)
    watched = [os.pidfd_open(child.pid) for child in children]
    os.kill(server, signal.SIGKILL)
    for child, pidfd in zip(children, watched, strict=True):
        assert await ended(child) == -signal.SIGKILL
        assert select.select([pidfd], [], [], 0)[0], "it still lives"
        child.kill()
        os.close(pidfd)
