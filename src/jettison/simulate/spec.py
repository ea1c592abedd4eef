"""What a spec file says: frozen dataclasses, parsed and checked section by section. docs/simulate.md is for people.

    spec = parse_spec(mapping)          # ConfigError: one line that begins with the place

Nothing is read and nothing is computed here: which machine a cluster is, is for ``simulate.machines``; which requests a
workload has, for ``simulate.workloads``; which runs a spec has, for ``simulate.cases``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from jettison.config import KEYS
from jettison.config.rungs import overload_list
from jettison.config.values import did_you_mean, nonempty, shown, truth
from jettison.cost.models import SmallWeights
from jettison.cost.profile_document import PLAIN_WEIGHTS
from jettison.errors import ConfigError
from jettison.sim.faults import Crash, Cut, Delay, Duplicate, Fault, Slow
from jettison.simulate.fields import Section, above, number, size, whole, word
from jettison.simulate.workload_spec import WorkloadSpec, parse_workload
from jettison.workload.rows import MAX_ARRIVAL_S

POLICIES = ("drop", "recompute", "swap", "migrate", "pipeline")
"""Of the key ``overload`` (docs/policies.md)."""

DEFAULT_POLICY = "drop"

ELSEWHERE = {
    "model": "cluster.model", "instances": "cluster.instances", "memory": "cluster.memory",
    "profile": "cluster.profile", "overload": "policy",
}
"""Keys of ``jettison serve`` that have a place of their own in a spec."""

LEAST_OBSERVE_S = 1e-3
"""Between two samples of a run: less is no time at all on a clock of whole nanoseconds, or more samples than events."""

LEAST_GBPS, MOST_GBPS = 1e-6, 1e9
"""Of a link: what is sent over less, or at less than ``LEAST_SHARE`` of its rate, comes after every time that a clock
of a simulation holds; more is no finite number of bytes."""

LEAST_SHARE = 1e-6

LEAST_FACTOR, MOST_FACTOR = 1e-6, 1e6
"""Of a slow worker's steps."""

MOST_KV_TOKENS = 10**12
"""Of one instance; more than any machine's memory."""

MOST_PRICE = 1e9
"""An hour, in whatever currency: what it comes to is a number that can be printed."""

Settings = Mapping[str, Any]
"""Flat keys of ``jettison serve``, each as it was written; their values have been tried."""


@dataclass(frozen=True, slots=True)
class LinkChange:
    """What of the links between instances differs from the preset's or the profile's. None: nothing."""

    link_class: str | None = None
    gbps: float | None = None
    """Line rate of one GPU's card (of one instance's, with a profile), per direction, in 10^9 bits per second."""
    latency_us: float | None = None
    efficiency: float | None = None
    """Part of the line rate that bulk transfers reach."""
    duplex_efficiency: float | None = None
    """Part of its rate that each direction keeps while both are busy: 1 full duplex, 0.5 half."""
    within_node: bool | None = None
    """Which link of a preset is changed: that inside a node, or that between nodes. None: what joins the instances."""
    card_per_node: bool = False
    """All instances of a node reach the others through one card, of this rate; else each instance has its own."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A preset, a model on GPUs, a model folder with a profile measured here, or the description of a live cluster.

    Exactly one of ``preset``, ``gpu``, ``description`` is given, or none and ``model`` is a folder.
    """

    preset: str | None = None
    gpu: str | None = None
    model: str | None = None
    """With ``gpu`` a preset's name, else a folder."""
    gpus_per_instance: int | None = None
    weights: SmallWeights | None = None
    """With ``preset`` or ``gpu``: how projections lie in memory. None: in bf16."""
    profile: str = "auto"
    """A file; ``auto``: what lies beside the model folder, or is in the description; with presets the roofline."""
    measured: Mapping[str, Any] | None = None
    """With a preset or a GPU: the content of a profile's file, in place of its name."""
    description: str | Mapping[str, Any] | None = None
    """What a live server tells of itself (``/jettison/deployment``): a file, or its content."""
    instances: int | None = None
    memory_utilisation: float | None = None
    memory_bytes: int | None = None
    """Of each instance."""
    kv_tokens: int | None = None
    """Memory of each instance, as what its KV cache holds."""
    create: Mapping[str, Any] | None = None
    """How ``jettison model create`` makes the folder where it is missing."""
    link: LinkChange = field(default_factory=LinkChange)

    @property
    def is_local(self) -> bool:
        """A model folder: the cluster can be started on this machine."""
        return self.preset is None and self.gpu is None and self.description is None


@dataclass(frozen=True, slots=True)
class Timing:
    """Times around the steps, in seconds, where they are stated; None: what the cluster's preset or profile says."""

    command_s: float | None = None
    """From the controller to a worker."""
    report_s: float | None = None
    """From a worker to the controller."""
    step_s: float | None = None
    """Added to each step on each stage."""
    request_s: float | None = None
    """From a client's sending to the engine's accepting."""
    response_s: float | None = None
    """From a token's being sampled to the client's seeing it."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's time."""
    start_s: float | None = None
    """From asking for an instance's process until it can be filled; needed where there may be more than at the start
    (``settings.max_instances``)."""


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """One way to run the cluster: a policy, and keys of ``jettison serve``."""

    name: str
    policy: str = DEFAULT_POLICY
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SloSpec:
    """Objectives of one request, for goodput and for incidents; of P99 in ``jettison plan``."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class RandomFaults:
    """A schedule drawn from a seed (``sim.faults.draw_faults``)."""

    seed: int
    number: int
    span_s: float


@dataclass(frozen=True, slots=True)
class RunSpec:
    """When a run ends, and what is kept of it."""

    until_s: float | None = None
    detail: bool | None = None
    gaps: bool | None = None
    """Of requests that are kept one by one, every gap between two tokens; None: as ``detail``."""
    observe_interval_s: float = 0.5


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """What ``jettison plan`` looks for; its flags beat these."""

    slo_ttft_p99_s: float | None = None
    slo_tpot_p99_s: float | None = None
    max_instances: int | None = None
    price_per_gpu_hour: float | None = None


@dataclass(frozen=True, slots=True)
class ExperimentSpec:
    """Everything but sweeps: those are expanded before a spec is parsed."""

    name: str
    cluster: ClusterSpec
    workload: WorkloadSpec
    variants: tuple[VariantSpec, ...]
    settings: Settings = field(default_factory=dict)
    """Of all variants."""
    seeds: tuple[int, ...] = (0,)
    slo: SloSpec = field(default_factory=SloSpec)
    faults: tuple[Fault, ...] | RandomFaults = ()
    timing: Timing = field(default_factory=Timing)
    run: RunSpec = field(default_factory=RunSpec)
    plan: PlanSpec = field(default_factory=PlanSpec)


def parse_spec(raw: object, name: str = "experiment") -> ExperimentSpec:
    """Check a whole spec. ``name``: where it names itself no other. Raises ConfigError that begins with the place."""
    top = Section(raw, "")
    top.only(*(f.name for f in fields(ExperimentSpec)))
    cluster, block_size = _cluster(top.raw("cluster"))
    settings = _settings(top.section("settings"))
    if block_size is not None:
        if "block_size" in settings:
            raise ConfigError("settings.block_size is given as cluster.block_size, too")
        settings = MappingProxyType({**settings, "block_size": block_size})
    spec = ExperimentSpec(
        name=top.take("name", nonempty, name),
        cluster=cluster,
        workload=parse_workload(top.raw("workload"), "workload"),
        variants=_variants(top),
        settings=settings,
        seeds=_seeds(top.raw("seeds"), "seeds"),
        slo=_slo(top.section("slo")),
        faults=_faults(top),
        timing=_timing(top.section("timing")),
        run=_run(top.section("run")),
        plan=_plan(top.section("plan")),
    )
    return spec


# --- cluster


def _cluster(raw: object) -> tuple[ClusterSpec, object]:
    """The section, and its block size as it was written."""
    if isinstance(raw, str):
        raw = {"preset": raw}
    if raw is None:
        raise ConfigError("cluster is missing: name a preset, a model and a GPU, or a model folder")
    section = Section(raw, "cluster")
    forms = [key for key in ("preset", "gpu", "description") if section.has(key)]
    if len(forms) > 1:
        raise ConfigError(f"cluster.{forms[1]} does not go with cluster.{forms[0]}: give one of them")
    form = forms[0] if forms else "model"
    if form in ("preset", "description"):
        section.refuse("model", f"does not go with cluster.{form}, which has one")
    description = section.raw("description")
    if description is not None and not isinstance(description, str | Mapping):
        raise ConfigError(f"cluster.description needs a file, not {shown(description)}")
    profile = section.raw("profile")
    measured = profile if isinstance(profile, Mapping) and form in ("preset", "gpu") else None
    cluster = ClusterSpec(
        preset=section.take("preset", nonempty, None),
        gpu=section.take("gpu", nonempty, None),
        model=section.take("model", nonempty) if form in ("gpu", "model") else section.take("model", nonempty, None),
        gpus_per_instance=section.take("gpus_per_instance", whole(1, 4096), None),
        weights=section.take("weights", _weights, None),
        profile="auto" if measured is not None else section.take("profile", nonempty, "auto"),
        measured=measured,
        description=description,
        instances=section.take("instances", whole(1, 1024), None),
        memory_utilisation=section.take("memory_utilisation", _share, None),
        memory_bytes=section.take("memory", size, None),
        kv_tokens=section.take("kv_tokens", whole(1, MOST_KV_TOKENS), None),
        create=_create(section),
        link=_link(section.section("link"), form),
    )
    block_size = section.raw("block_size")
    if block_size is not None:
        _try_setting("block_size", block_size, section.at("block_size"))
    _check_form(section, form)
    section.close()
    return cluster, block_size


def _check_form(section: Section, form: str) -> None:
    """Keys that do not go with the kind of cluster, or with each other."""
    if form != "gpu":
        section.refuse("gpus_per_instance", "goes with cluster.gpu only")
    if form not in ("gpu", "preset"):
        section.refuse("memory_utilisation", "is for presets and GPUs: say memory, or kv_tokens")
        section.refuse("weights", "is for presets and GPUs: a folder's are what its files are")
    if form != "model":
        section.refuse("create", "goes with a model folder only")
    sizes = [key for key in ("memory", "kv_tokens", "memory_utilisation") if section.has(key)]
    if len(sizes) > 1:
        raise ConfigError(f"{section.at(sizes[1])} does not go with {section.at(sizes[0])}: give one of them")


def _weights(value: object) -> SmallWeights | None:
    name = nonempty(value)
    return None if name in ("bf16", PLAIN_WEIGHTS) else SmallWeights.parse(name)


def _share(value: object) -> float:
    share = above(0.0)(value)
    if share > 1.0:
        raise ValueError(f"needs a part from 0 to 1, not {shown(value)}")
    if share < LEAST_SHARE:
        raise ValueError(f"needs a part of {LEAST_SHARE:g} at least, not {shown(value)}")
    return share


_TIME = number(0.0, MAX_ARRIVAL_S)
_SPAN = above(0.0, MAX_ARRIVAL_S)
"""Seconds that the clock of a simulation holds, as those of arrivals."""


def _create(section: Section) -> Mapping[str, Any] | None:
    """Arguments of ``device.model.create.create_model``, whole numbers and words."""
    raw = section.raw("create")
    if raw is None:
        return None
    inner = Section(raw, section.at("create"))
    made: dict[str, Any] = {
        "arch": inner.take("arch", nonempty, "qwen3"), "layers": inner.take("layers", whole(1)),
        "hidden": inner.take("hidden", whole(1)), "heads": inner.take("heads", whole(1)),
        "kv_heads": inner.take("kv_heads", whole(1)), "seed": inner.take("seed", whole(0), 0),
        "max_position_embeddings": inner.take("max_position_embeddings", whole(2), 1024),
    }
    inner.close()
    return MappingProxyType(made)


def _link(section: Section, form: str) -> LinkChange:
    if form != "preset":
        section.refuse("within_node", "goes with a preset only: there is but one kind of link here")
        section.refuse("card_per_node", "goes with a preset only: instances have no nodes here")
    link = LinkChange(
        section.take("class", word("nvlink", "rdma", "pcie", "ethernet"), None),
        section.take("gbps", number(LEAST_GBPS, MOST_GBPS), None),
        section.take("latency_us", number(0.0, 999_999.0), None),
        section.take("efficiency", _share, None),
        section.take("duplex_efficiency", number(0.5, 1.0), None),
        section.take("within_node", truth, None),
        section.take("card_per_node", truth, False),
    )
    section.close()
    return link


# --- variants and their settings


def _variants(top: Section) -> tuple[VariantSpec, ...]:
    variants = [_variant(raw, where) for raw, where in top.items("variants")]
    if not variants:
        return (VariantSpec(DEFAULT_POLICY),)
    names = [variant.name for variant in variants]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"variants[{index}].name {name!r} is taken: give each variant a name of its own")
    return tuple(variants)


def _variant(raw: object, where: str) -> VariantSpec:
    if isinstance(raw, str):
        raw = {"policy": raw}
    section = Section(raw, where)
    policy = section.take("policy", overload_list, DEFAULT_POLICY)
    variant = VariantSpec(section.take("name", nonempty, policy), policy, _settings(section.section("settings")))
    section.close()
    return variant


def _settings(section: Section) -> Settings:
    """Keys of ``jettison serve`` with values that it would take, dashes made underscores."""
    settings: dict[str, Any] = {}
    for written in section.written:
        name, where = written.replace("-", "_"), section.at(written)
        if name in ELSEWHERE:
            raise ConfigError(f"{where} has a place of its own in a spec: {ELSEWHERE[name]}")
        if name in settings:
            raise ConfigError(f"{where} is given twice")
        if name not in KEYS:
            hint = did_you_mean(name, tuple(KEYS)) or "; `jettison config show` lists all keys"
            raise ConfigError(f"{where}: unknown key{hint}")
        value = section.raw(written)
        _try_setting(name, value, where)
        settings[name] = value
    return MappingProxyType(settings)


def _try_setting(name: str, value: object, where: str) -> None:
    try:
        KEYS[name].parse(value)
    except ValueError as error:
        raise ConfigError(f"{where} {error}") from None


# --- the rest


def _seeds(raw: object, where: str) -> tuple[int, ...]:
    """A number of seeds from 0 on, or a list of them."""
    if raw is None:
        return (0,)
    if not isinstance(raw, list | tuple):
        try:
            return tuple(range(whole(1, 10_000)(raw)))
        except ValueError:
            raise ConfigError(f"{where} needs a number of seeds or a list of them, not {shown(raw)}") from None
    try:
        seeds = tuple(whole(0)(item) for item in raw)
    except ValueError as error:
        raise ConfigError(f"{where}: each seed {error}") from None
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"{where} needs at least one seed, and none twice")
    return seeds


def _slo(section: Section) -> SloSpec:
    slo = SloSpec(section.take("ttft_s", above(0.0), None), section.take("tpot_s", above(0.0), None))
    section.close()
    return slo


def _timing(section: Section) -> Timing:
    seconds = number(0.0, 1.0)
    timing = Timing(
        section.take("command_s", seconds, None), section.take("report_s", seconds, None),
        section.take("step_s", seconds, None), section.take("request_s", seconds, None),
        section.take("response_s", seconds, None), section.take("noise", number(0.0, 2.0), 0.0),
        section.take("start_s", number(0.0, MAX_ARRIVAL_S), None),
    )
    section.close()
    return timing


def _run(section: Section) -> RunSpec:
    run = RunSpec(
        section.take("until_s", _SPAN, None), section.take("detail", truth, None),
        section.take("gaps", truth, None),
        section.take("observe_interval_s", number(LEAST_OBSERVE_S, MAX_ARRIVAL_S), 0.5),
    )
    section.close()
    return run


def _plan(section: Section) -> PlanSpec:
    plan = PlanSpec(
        section.take("slo_ttft_p99_s", above(0.0), None), section.take("slo_tpot_p99_s", above(0.0), None),
        section.take("max_instances", whole(1, 1024), None),
        section.take("price_per_gpu_hour", number(0.0, MOST_PRICE), None),
    )
    section.close()
    return plan


_FAULT_KINDS = ("crash", "cut", "slow", "delay", "duplicate")


def _faults(top: Section) -> tuple[Fault, ...] | RandomFaults:
    """A list of faults, or one mapping that says how to draw them."""
    raw = top.raw("faults")
    if isinstance(raw, Mapping):
        section = Section(raw, "faults")
        drawn = RandomFaults(
            section.take("seed", whole(0), 0), section.take("number", whole(1, 10_000)),
            section.take("span_s", _SPAN),
        )
        section.close()
        return drawn
    return tuple(_fault(item, where) for item, where in top.items("faults"))


def _fault(raw: object, where: str) -> Fault:
    section = Section(raw, where)
    kind = section.take("kind", word(*_FAULT_KINDS))
    at_s = section.take("at_s", _TIME)
    worker = whole(0, 1023)
    fault: Fault
    if kind == "cut":
        fault = Cut(at_s, section.take("a", worker), section.take("b", worker))
        if fault.a == fault.b:
            raise ConfigError(f"{section.at('b')} {fault.b} is {section.at('a')}, too: a link joins two workers")
    elif kind == "crash":
        restarts = section.take("restarts", truth, True)
        after_s = section.take("restart_after_s", _TIME, 1.0)
        fault = Crash(at_s, section.take("worker", worker), after_s if restarts else None,
                      section.take("detect_s", _TIME, 0.01))
    elif kind == "slow":
        fault = Slow(at_s, section.take("worker", worker), section.take("for_s", _SPAN),
                     section.take("factor", number(LEAST_FACTOR, MOST_FACTOR)))
    else:
        make = Delay if kind == "delay" else Duplicate
        fault = make(at_s, section.take("worker", worker), section.take("for_s", _SPAN),
                     section.take("delay_s", _TIME))
    section.close()
    return fault
