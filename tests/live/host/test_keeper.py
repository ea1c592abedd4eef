"""Processes of one host: what they inherit, how they end, and what is left of a start that fails."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jettison.device.model.hf_config import parse_config
from jettison.device.model.jsonfile import JsonObject
from jettison.live.host.keeper import Keeper
from jettison.live.machine.netns import Placement
from jettison.live.wire.heartbeat import Patience
from jettison.live.wire.worker_config import WorkerSpec, WorkerStart

pytestmark = pytest.mark.live

CHILD = textwrap.dedent("""
    import os, sys, time
    import msgspec
    from jettison.live.wire.heartbeat import Heart
    from jettison.live.wire.stepflag import StepFlag
    from jettison.live.wire.worker_config import WorkerConfig

    config = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    assert config.parent_pid == os.getppid() and config.secret == b"s" * 16
    assert os.environ["OMP_NUM_THREADS"] == "3" and "JETTISON_API_KEY" not in os.environ
    os.write(config.spec.shared_copy_fd, b"x")
    what = config.spec.model_dir
    if what == "exit":
        sys.exit(len(config.listen_fds))
    heart = Heart(config.beat_fd, 0.001)
    heart.waiting = True
    if what == "beat":
        heart.start()
    flag = StepFlag.attach(config.flag_fd)
    while not flag.names(7):
        time.sleep(0.001)
    sys.exit(7)
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
def keeper(tmp_path, monkeypatch):
    monkeypatch.setenv("JETTISON_API_KEY", "a secret")
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
    child = keeper.spawn(start_of(4, "exit", 2), Placement(), has_far_peers=has_far_peers)
    assert child.addresses.near == f"unix:{tmp_path}/link-4.2"
    assert (child.addresses.far is not None) == has_far_peers
    if child.addresses.far is not None:
        host, port = child.addresses.far.removeprefix("tcp:").split(":")
        socket.create_connection((host, int(port)), 5).close()
    assert await ended(child) == num_doors
    keeper.spawn(start_of(4, "exit", 3), Placement(), has_far_peers=False)
    assert [path.name for path in tmp_path.iterdir()] == ["link-4.3"], "older lives leave no name"


async def test_a_step_is_given_up_by_its_word_and_a_process_that_has_ended_takes_none(keeper):
    child = keeper.spawn(start_of(0, "flag"), Placement(), has_far_peers=False)
    child.abandon(6)
    child.abandon(7)
    assert await ended(child) == 7
    child.abandon(8)
    child.kill()
    child.begin_beats(0.0)
    assert child.why_hung(1e9, 0.0, Patience(1.0, 1.0)) is None


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
    async with asyncio.timeout(30):
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


@pytest.mark.parametrize("broken", ["subprocess.Popen", "os.pidfd_open", "os.pipe", "os.memfd_create"])
async def test_a_start_that_the_host_refuses_leaves_no_descriptor(keeper, broken, monkeypatch):
    assert await ended(keeper.spawn(start_of(0, "exit"), Placement(), has_far_peers=True)) == 2
    gc.collect()
    num_files = len(os.listdir("/proc/self/fd"))

    def refuse(*arguments, **options):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(broken, refuse)
        with pytest.raises(OSError, match="Cannot allocate"):
            keeper.spawn(start_of(0, "exit", 1), Placement(), has_far_peers=True)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == num_files
