"""A server on three hosts that Ray has found: a trace and a batch, while a host is cut off, killed, or Ray's head dies.

Hosts as in `benchmarks moves hosts`, with a node of Ray in each; the server (a front end apart, packing, dropping,
moves, a batch beside) runs on A, and its clients reach it over A's cable. Every scene is a cluster of its own:

- calm: nothing happens; with --starve a process keeps one of the machine's cores busy all the time;
- cut: B's cable is taken out in the midst; kill: every process on B is killed;
- head: Ray's head is killed with all of Ray on A, and stays away for --away seconds; then Ray returns.

Every answer is compared, letter for letter, with that of one instance alone, in float64. Exit code 1 where one differs
or is missing, a line of the batch is not done, a host counted as lost wrongly, or `/health` does not say that nothing
can be placed while the head is away, or still says so afterwards. Needs root, `ip`, `tc`, `unshare` and Ray.

    python -m benchmarks moves ray_hosts [--scenes calm cut kill head] [--seconds 60] [--trace FILE] [--json OUT]
    python -m benchmarks moves ray_hosts --scenes calm --seconds 1800 --starve
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import openai
import psutil

from benchmarks.evidence import LIVE
from benchmarks.moves.hosts import HOSTS, Network, inside
from benchmarks.overload.trained import Answers
from benchmarks.shared import REPOSITORY, Namespace, Row, keep, machine, parse, say
from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.live.engine.assembly import assemble
from jettison.live.experiments.server_process import ServerProcess, flag_arguments
from jettison.workload.client import ReplayOptions, replay_sync
from jettison.workload.shaping import cap_lengths, limit, scale_lengths, scale_time
from jettison.workload.traces import TraceRow, Workload, read_trace

SCENES = ("calm", "cut", "kill", "head")
PORT, RAY_PORT = 8000, 6379
MOST_TOKENS = 224
START_S, NODE_S, PATIENCE_S = 180.0, 60.0, 120.0
COUNTS = ("drops_total", "restores_total", "migrations_total", "sleeps_total", "wakes_total", "worker_losses_total",
          "worker_joins_total", "offline_output_tokens_total")  # fmt: skip
SAME: dict[str, object] = {
    "dtype": "float64", "block_size": 8, "page_size": 4096, "num_threads": 1, "max_model_len": 256,
}  # fmt: skip
FLAGS: dict[str, object] = SAME | {
    "instances": 3, "max_num_seqs": 32, "max_num_batched_tokens": 64, "overload": "drop", "packing": "mell",
    "packing_epoch_s": 2, "sleep": "auto", "sleep_after_s": 5, "offline": "harvest", "slo_ttft_ms": 2000,
    "slo_tpot_ms": 500, "host_memory": "16MiB",
}  # fmt: skip


def load_of(args: Namespace) -> Workload:
    """Arrivals of the trace in the seconds asked for, its lengths made small; without one a steady load with waves."""
    wanted = round(args.rate * args.seconds)
    if args.trace is None:
        rows, at_s = [], 0.0
        for index in range(wanted):
            at_s += (0.25 if index // 20 % 3 == 0 else 1.375) / args.rate
            rows.append(TraceRow(at_s, 8 + index * 7 % 40, 40 + index * 13 % 120))
        return Workload(tuple(rows), "waves", "made up")
    found = limit(read_trace(args.trace), num_requests=wanted)
    if len(found.columns) < wanted:
        raise SystemExit(f"{args.trace} has {len(found.columns)} requests, {wanted} are wanted")
    return cap_lengths(scale_lengths(scale_time(found, found.duration_s / args.seconds), 0.3, floor_tokens=8,
                                     input_factor=0.03), MOST_TOKENS)  # fmt: skip


def arrivals_of(args: Namespace) -> str:
    """In words."""
    name = "waves" if args.trace is None else args.trace.stem
    return f"{name}, {args.rate:g} a second for {args.seconds:g} s{', one core taken' if args.starve else ''}"


# --- the cluster


class RayHosts:
    """Ray on the three hosts."""

    def __init__(self, network: Network, hidden: Path) -> None:
        self._network, self._hidden = network, hidden
        paths = os.pathsep.join(filter(None, [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH")]))
        self.environment = os.environ | {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_memory_monitor_refresh_ms": "0",
            "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        self.nodes: dict[str, subprocess.Popen[str]] = {}
        self.address = f"{network.ip_of(HOSTS[0])}:{RAY_PORT}"

    def start(self, host: str, *before: str) -> None:
        """Start a node; ``before``: how its host is entered, where something lives there already."""
        role = ("--head", "--port", str(RAY_PORT), "--include-dashboard", "false") if host == HOSTS[0] else (
            "--address", self.address)  # fmt: skip
        words = (*(before or inside(self._network, host, self._hidden)), sys.executable, "-m", "ray.scripts.scripts",
                 "start", "--block", *role, "--node-ip-address", self._network.ip_of(host), "--num-cpus", "1",
                 "--object-store-memory", str(80 << 20), "--disable-usage-stats")  # fmt: skip
        node = self.nodes[host] = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=self.environment, start_new_session=True,
        )
        assert node.stdout is not None
        told = []
        for line in node.stdout:
            told.append(line)
            if "Ray runtime started" in line:
                break
        else:
            raise RuntimeError(f"Ray did not start on {host}: {''.join(told)[-2000:]}")
        threading.Thread(target=node.stdout.read, daemon=True).start()

    def kill(self, host: str) -> None:
        """All of Ray there."""
        node = self.nodes.pop(host)
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        node.wait()

    def close(self) -> None:
        """Idempotent."""
        for host in list(self.nodes):
            self.kill(host)


class Far(ServerProcess):
    """A server on host A."""

    def __init__(self, model: Path, flags: dict[str, object], log: Path, network: Network, ray: RayHosts) -> None:
        super().__init__(model, flags, log, PORT)
        self._ip, self._ray = network.ip_of(HOSTS[0]), ray

    @property
    def url(self) -> str:
        """As its clients reach it."""
        return f"http://{self._ip}:{PORT}"

    def start(self, timeout_s: float = START_S) -> None:
        """See ``ServerProcess``."""
        super().start(timeout_s)

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        command = [
            *entering(self._ray.nodes[HOSTS[0]].pid), sys.executable, "-m", "jettison", "serve", str(self._model_dir),
            "--host", self._ip, "--port", str(PORT), *flag_arguments(self._flags),
        ]  # fmt: skip
        return command, self._ray.environment


def entering(pid: int) -> tuple[str, ...]:
    """Before a command, for it to run where this process does: its network and its mounts."""
    return ("nsenter", "--target", str(pid), "--net", "--mount")


# --- what happens


@dataclass(slots=True)
class Scene:
    """One cluster under load."""

    name: str
    network: Network
    ray: RayHosts
    server: Far
    args: Namespace
    problems: list[str] = field(default_factory=list)
    told: Row = field(default_factory=dict)

    def strike(self) -> None:
        """What the scene is named for, a third into the load. Runs beside the client."""
        time.sleep(self.args.seconds / 3)
        if self.name == "cut":
            self._lost(lambda: self.network.cut(HOSTS[1]))
        elif self.name == "kill":
            self._lost(self._kill_host)
        elif self.name == "head":
            self._without_head()

    def _kill_host(self) -> None:
        words = ("ip", "netns", "pids", self.network.name(HOSTS[1]))
        for pid in subprocess.run(words, check=True, capture_output=True, text=True).stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int(pid)).kill()

    def _lost(self, strike: Callable[[], None]) -> None:
        before = count(self.server, "worker_losses_total")
        strike()
        at_s = time.monotonic()
        if not until(lambda: count(self.server, "worker_losses_total") > before, PATIENCE_S):
            self.problems.append("the host did not count as lost")
        self.told["lost_after_s"] = round(time.monotonic() - at_s, 2)

    def _without_head(self) -> None:
        server_pid = self.server.pid
        self.ray.kill(HOSTS[0])
        at_s = time.monotonic()
        if not until(lambda: "placed" in health(self.server), PATIENCE_S):
            self.problems.append("/health does not say that nothing can be placed")
        self.told["told_after_s"] = round(time.monotonic() - at_s, 2)
        time.sleep(max(0.0, self.args.away - (time.monotonic() - at_s)))
        for host in HOSTS[1:]:  # Ray's nodes end without a head after a minute; an operator's unit starts them again
            self.ray.kill(host)
        self.ray.start(HOSTS[0], *entering(server_pid))
        for host in HOSTS[1:]:
            self.ray.start(host)
        if not until(lambda: "placed" not in health(self.server), PATIENCE_S):
            self.problems.append("/health still says that nothing can be placed")
        self.told["away_s"] = round(time.monotonic() - at_s, 1)


def until(holds: Callable[[], bool], limit_s: float) -> bool:
    """Whether it came to hold in time."""
    ends_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.05)
    return True


def read(server: ServerProcess, path: str) -> str:
    """Empty where there is no answer."""
    try:
        with urllib.request.urlopen(f"{server.url}/{path}", timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def health(server: ServerProcess) -> str:
    """As it is told."""
    return read(server, "health")


def count(server: ServerProcess, name: str) -> float:
    """Of one of our counters, over all of its series."""
    return sum(map(float, re.findall(rf"^jettison:{name}(?:{{.*}})? (\S+)$", read(server, "metrics"), re.MULTILINE)))


# --- load and answers


def lines_of(model: str, number: int) -> bytes:
    """A batch."""
    bodies = [{"model": model, "prompt": [8 + n % 200, 9, 10, 8 + n * 3 % 200], "max_tokens": 40 + n % 60,
               "temperature": 0, "ignore_eos": True} for n in range(number)]  # fmt: skip
    return "\n".join(json.dumps({"custom_id": f"line-{n}", "method": "POST", "url": "/v1/completions", "body": body})
                     for n, body in enumerate(bodies)).encode()  # fmt: skip


def batch_of(client: openai.OpenAI, lines: bytes) -> str:
    """Its id, once it has begun."""
    file = client.files.create(file=("lines.jsonl", io.BytesIO(lines)), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return made.id


def batch_answers(client: openai.OpenAI, batch_id: str) -> dict[str, str]:
    """Of all its lines, once it is over."""
    ends_s = time.monotonic() + 10 * PATIENCE_S
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "expired", "cancelled"):
        if time.monotonic() > ends_s:
            return {}
        time.sleep(0.5)
    if batch.output_file_id is None:
        return {}
    told = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in told}


def answered(server: ServerProcess, load: Workload, lines: bytes, beside: Callable[[], None]) -> tuple[Row, dict]:
    """Figures, and all answers: of the load by number, of the batch by name."""
    answers = Answers()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20, timeout=PATIENCE_S) as client:
        batch_id = batch_of(client, lines)
        striking = threading.Thread(target=beside)
        striking.start()
        run = replay_sync(server.url, load, ReplayOptions(name="trace", on_data=answers.add, observe=False,
                                                          request_timeout_s=10 * PATIENCE_S))  # fmt: skip
        striking.join()
        texts: dict[object, str] = {**answers.texts(), **batch_answers(client, batch_id)}
    return {"requests": run.requests.submitted, "unanswered": run.requests.unanswered, "ttft_p99_s": run.ttft_s.p99,
            "tpot_p50_s": run.tpot_s.p50}, texts  # fmt: skip


def with_memory(flags: dict[str, object], folder: Path, blocks: int) -> dict[str, object]:
    """For so many KV blocks an instance."""
    sized = assemble(EngineConfig.resolve(model=str(folder), **flags))  # type: ignore[arg-type]
    return flags | {"memory": sized.memory_for_blocks(blocks)}


def expected(folder: Path, load: Workload, lines: bytes, scratch: Path) -> dict:
    """By one instance with ample memory, on this machine."""
    flags = SAME | {"instances": 1, "max_num_seqs": 64, "max_num_batched_tokens": 128}
    with ServerProcess(folder, with_memory(flags, folder, 2000), scratch / "alone.log") as server:
        row, texts = answered(server, scale_time(load, 2.0), lines, lambda: None)
    if row["unanswered"]:
        raise SystemExit(f"one instance alone left {row['unanswered']} requests without an answer")
    return texts


@contextlib.contextmanager
def starved(wanted: bool) -> Iterator[None]:
    """One of the machine's cores is busy with something else, of a higher priority."""
    if not wanted:
        yield
        return
    with subprocess.Popen(("nice", "-n", "-5", sys.executable, "-c", "while True: pass")) as busy:
        os.sched_setaffinity(busy.pid, {(os.cpu_count() or 1) - 1})
        try:
            yield
        finally:
            busy.kill()


def one(name: str, folder: Path, load: Workload, lines: bytes, right: dict, args: Namespace) -> Row:
    """A row of the result; ``problems`` is empty where all is well."""
    network = Network()
    with network.up(), contextlib.ExitStack() as ends:
        ray = RayHosts(network, folder.parent)
        ends.callback(ray.close)
        for host in HOSTS:
            ray.start(host)
        flags = with_memory(FLAGS, folder, args.blocks) | {
            "launcher": "ray", "ray_address": ray.address, "ray_placement": "spread", "api_servers": 1}  # fmt: skip
        server = ends.enter_context(Far(folder, flags, args.log or folder.parent / f"{name}.log", network, ray))
        scene = Scene(name, network, ray, server, args)
        ends.enter_context(starved(args.starve))
        row, texts = answered(server, load, lines, scene.strike)
        counts = {each: count(server, each) for each in COUNTS}
    problems = scene.problems
    if row["unanswered"]:
        problems.append(f"{row['unanswered']} requests have no answer")
    if differ := sum(texts.get(key) != text for key, text in right.items()):
        problems.append(f"{differ} of {len(right)} answers are missing or have other letters")
    if name in ("calm", "head") and counts["worker_losses_total"]:
        problems.append(f"{counts['worker_losses_total']:g} workers counted as lost")
    return {"scene": name, "arrivals": arrivals_of(args), **row, "answers": len(right), "differ": differ,
            **scene.told, **counts, "problems": problems}  # fmt: skip


def main() -> int:
    """The command."""
    args = parse(
        __doc__, scenes=(list(SCENES), "in this order"), seconds=(60.0, "of arrivals"),
        rate=(15.0, "requests a second"),
        trace=(Path, "whose arrivals and lengths are taken (docs/workloads.md)"), lines=(60, "of the batch"),
        away=(180.0, "seconds without Ray's head"), blocks=(40, "KV blocks of an instance"),
        starve=(False, "one core is busy with something else"), log=(Path, "of the server"),
    )  # fmt: skip
    if os.geteuid() != 0:
        raise SystemExit("namespaces need root")
    load, rows = load_of(args), []
    document: Row = {"machine": machine(), "load": list(load.notes), "flags": FLAGS}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:  # the hosts' own /tmp hides what is in this one
        folder = Path(scratch) / "hidden" / "model"
        folder.parent.mkdir()
        create_model(
            folder, arch="qwen2", layers=4, hidden=64, heads=4, kv_heads=2, max_position_embeddings=256, std=0.2)
        lines = lines_of(folder.name, args.lines)
        right = expected(folder, load, lines, Path(scratch))
        say(f"{len(right)} right answers")
        for name in args.scenes:
            rows.append(one(name, folder, load, lines, right, args))
            print(json.dumps(rows[-1]), flush=True)
            keep(args.json, document | {"rows": rows}, *LIVE)
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
