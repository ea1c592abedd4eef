"""A burst on two instances that may become three: carried by dropping first, then by the third, which is started and
filled by the others meanwhile; back to two, without a failed stream. Prints the time line.

    python -m benchmarks overload scale [--share 1.6] [--burst-s 20] [--json OUT]

The burst is so large that its peak demand is ``--share`` of what two merged instances hold. Every request has to be
answered in full. What has to hold is printed at the end, as met or missed; how soon the third comes, and what first
tokens take meanwhile, is printed and not judged.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from benchmarks.evidence import LIVE
from benchmarks.overload.traces import MODEL
from benchmarks.servers import metrics
from benchmarks.shared import Row, keep, machine, parse, print_rows, print_verdicts, quantile, settings_of, work_folder
from jettison.cost.speed import MachineSpeed
from jettison.demo.burst import make_setup
from jettison.live.experiments.overload import ExperimentSetup, measure_speed, profile_quickly, run_policy
from jettison.report.failures import check_answered
from jettison.simulate.calibrate import capacities, peak_demand_tokens, search_factor
from jettison.workload.arrivals import Burst
from jettison.workload.lengths import Lengths
from jettison.workload.synthetic import SyntheticSpec, generate
from jettison.workload.traces import Workload

CALM_S = 15.0
"""Before the burst and after it."""
RATE_PER_S = 1.0
BURST_TIMES = 8.0
CLOSE_ENOUGH = 0.05
PERIOD_S = 1.0
GAUGES = {
    "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting", "jettison:groups": "groups",
    "jettison:devices_awake": "awake", "jettison:instances_provisioned": "provisioned",
    "jettison:instances_wanted": "wanted",
}  # fmt: skip
TOLD = {
    "drop_decided": "a drop is decided", "drop": "dropped: one pipeline", "instance_asked": "a process is asked for",
    "instance_waits": "it waits", "worker_joined": "the process is there, empty", "woken": "filled by peers: serves",
    "restore_done": "layers taken back", "falling_asleep": "put to sleep", "asleep": "asleep",
    "instance_released": "its process has ended", "worker_lost": "a worker has died",
}  # fmt: skip


class Watch:
    """What a server is at, second by second, and what it has decided."""

    def __init__(self, most_s: float) -> None:
        """``most_s``: how long the server may take to be back at two instances once all is answered."""
        self.samples: list[Row] = []
        self.events: list[Row] = []
        self._most_s = most_s

    @contextmanager
    def __call__(self, url: str) -> Iterator[None]:
        begun_s, over = time.monotonic(), threading.Event()
        first_s = _events(url)["now_s"]

        def look() -> None:
            is_last = False
            while not is_last:  # one more once all is over: it tells what is left
                is_last = over.wait(PERIOD_S)
                found = metrics(url, *GAUGES)
                told = {name: found.get(metric, 0.0) for metric, name in GAUGES.items()}
                self.samples.append({"t": round(time.monotonic() - begun_s, 1)} | told)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
            ends_s = time.monotonic() + self._most_s
            while time.monotonic() < ends_s and not self._is_back(_events(url)["events"]):
                time.sleep(PERIOD_S)
        finally:
            over.set()
            thread.join()
        log = _events(url)["events"]
        self.events = [event | {"t": event["t"] - first_s} for event in log if event["kind"] in TOLD]

    @staticmethod
    def _is_back(log: Sequence[Row]) -> bool:
        """Each process that was asked for has been given back."""
        kinds = [event["kind"] for event in log]
        return kinds.count("instance_asked") == kinds.count("instance_released") + kinds.count("instance_given_up")


def _events(url: str) -> Row:
    with urlopen(f"{url}/jettison/events", timeout=30.0) as response:
        return dict(json.load(response))


def sized(setup: ExperimentSetup, speed: MachineSpeed, share: float, burst_s: float, seed: int) -> Workload:
    """So many users that the burst's peak demand is ``share`` of what two merged instances hold."""
    deployment = setup.deployment()
    spec = SyntheticSpec(
        "burst", RATE_PER_S, 2 * CALM_S + burst_s, Lengths(median=64, sigma=0.5, cap=256),
        Lengths(median=120, sigma=0.5, cap=400), bursts=(Burst(CALM_S, burst_s, BURST_TIMES),),
    )  # fmt: skip
    target = share * capacities(deployment)[1]
    users, _ = search_factor(
        lambda times: peak_demand_tokens(generate(spec.scaled(times), seed), speed, deployment), target, 1.0,
        close_enough=CLOSE_ENOUGH,
    )
    return generate(spec.scaled(users), seed)


def time_line(watch: Watch, answered: Sequence[Mapping[str, float | None]]) -> list[Row]:
    """Gauges by the second, with the first tokens of what came since the last one, and decisions between them."""
    rows: list[Row] = []
    last_s = 0.0
    for sample in watch.samples:
        for event in (e for e in watch.events if last_s <= e["t"] < sample["t"]):
            where = event.get("worker", event.get("workers"))
            told = TOLD[event["kind"]] if where is None else f"{TOLD[event['kind']]} ({where})"
            rows.append({"t": round(event["t"], 2), "what": told})
        came = [row["ttft_s"] for row in answered if last_s <= (row["scheduled_s"] or 0.0) < sample["t"]]
        found = [seconds for seconds in came if seconds is not None]
        rows.append(sample | {"came": len(came), "ttft_p99_s": quantile(found, 0.99) if found else None})
        last_s = sample["t"]
    return rows


def verdicts(watch: Watch) -> list[tuple[bool, str]]:
    """What has to hold of the decisions; whether all was answered is checked apart."""
    at = {event["kind"]: event["t"] for event in reversed(watch.events)}
    kinds = [event["kind"] for event in watch.events]
    return [
        ("drop" in at and at["drop"] < at.get("woken", float("inf")), "a drop carries the burst first"),
        ("instance_asked" in at and "woken" in at, "a third instance is asked for, filled and serves"),
        (bool(watch.samples) and watch.samples[-1]["provisioned"] == 2, "two instances are left"),
        ("worker_lost" not in kinds, "no worker has died"),
    ]


def main() -> None:
    args = parse(
        __doc__, share=(1.6, "peak demand over what two merged instances hold"), burst_s=20.0, seed=0,
        work_dir=(Path, "where the model and logs go"), sleep_after_s=3.0, most_s=120.0,
    )
    setup = make_setup(work_folder(args.work_dir, "scale"), args.seed, MODEL)
    speed = measure_speed(setup)
    profile_quickly(setup)
    load = sized(setup, speed, args.share, args.burst_s, args.seed)
    setup.extra_flags.update({"max_instances": 3, "sleep_after_s": args.sleep_after_s})
    watch = Watch(args.most_s)
    run = run_policy(setup, "drop", load, name="two to three", seed=args.seed, beside=watch)
    rows = time_line(watch, run.requests_detail or [])
    print_rows(rows, ["t", *GAUGES.values(), "came", "ttft_p99_s", "what"], "Time line")
    print_rows(
        [{"requests": run.requests.submitted, "answered": run.requests.completed, "ttft_p50_s": run.ttft_s.p50,
          "ttft_p99_s": run.ttft_s.p99, "itl_p99_s": run.itl_s.p99}], title="All requests",
    )
    met = print_verdicts(verdicts(watch))
    keep(args.json, {"machine": machine(), "settings": settings_of(args), "rows": rows, "verdicts": met}, *LIVE)
    check_answered([run])


if __name__ == "__main__":
    main()
