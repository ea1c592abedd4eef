"""From a spec's cluster to what is simulated: the model's sizes, the memory, the links, and what things take.

A ``Machine`` comes from presets (``of_preset``), or from what was measured (``of_deployment``: a model folder here, or
what a live server told of itself). A variant's settings then make a ``sim.setup.ClusterSetup`` of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jettison.config import EngineConfig
from jettison.config.values import shown
from jettison.core.configured import cluster_params, scheduler_limits
from jettison.core.founding import first_drop
from jettison.core.serving.group import SchedulerLimits
from jettison.cost.deployment import Deployment, deployment_from_document
from jettison.cost.gpus import LINE_RATE_REACHED, LinkPreset
from jettison.cost.hardware import HardwareProfile
from jettison.cost.presets import ClusterPreset, InstancePreset, cluster_preset, instance_preset
from jettison.cost.profile_document import ProfileDocumentError, StoredProfile, from_document
from jettison.errors import BudgetError, ConfigError
from jettison.memory.hostpool import num_host_slots
from jettison.memory.kvtransfers import MAX_PIECE_BYTES, MAX_PIECE_NS
from jettison.memory.layout import LayoutSpec
from jettison.memory.pagechoice import best_page_bytes
from jettison.memory.pagemap import PageSizes, first_capacity_blocks
from jettison.profiles import AUTO, read_profile
from jettison.sim.executor import ModelledExecutor
from jettison.sim.links import LATENCY_S, LinkClass, LinkSpec, Topology
from jettison.sim.setup import CUDA_PAGE_BYTES, ClusterSetup, Hops, MemorySetup
from jettison.simulate.clients import Edge
from jettison.simulate.profiling import profile_of_preset, profiling_command, with_profile
from jettison.simulate.spec import ClusterSpec, ExperimentSpec, LinkChange, Settings, SloSpec, Timing, VariantSpec
from jettison.types import LayerRange, ModelShape

DEFAULT_CONTEXT = 131_072
"""Most tokens of a request, where the model is a preset and the spec gives no ``max_model_len``."""

PIECE_BYTES = 4 << 20
"""Of bulk transfers between accelerators, where the spec says nothing else."""

MOST_BLOCKS = 10_000_000
"""Of KV in an instance, and in its host pool: each has an entry in a book."""

DEFAULT_GBPS = 100.0
"""Of each GPU's card, where a spec names a model and a GPU and no link."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster without its settings. All memory is of one instance."""

    name: str
    shape: ModelShape
    num_instances: int
    gpus_per_instance: int | None
    """None: not of GPUs."""
    budget_bytes: int
    profile: HardwareProfile
    topology: Topology
    workspace_bytes: int = 0
    page_bytes: int | None = None
    """None: the settings', or what CUDA has."""
    max_model_len: int = DEFAULT_CONTEXT
    settings: Settings = field(default_factory=dict)
    """Of the deployment that was measured; a spec's beat them."""
    caches_prefixes: bool = False
    """Prefix caching where the settings do not say: only a cluster that was measured had it on."""
    core_knows_profile: bool = True
    parameter_share: float | None = None
    """Of the GPUs' whole memory, as the papers state it. None: not of GPUs, or the spec says how much there is."""

    @property
    def kv_tokens(self) -> int:
        """What one instance's KV cache holds, undropped and before rounding to pages."""
        free = self.budget_bytes - self.workspace_bytes - self.shape.parameter_bytes
        return max(0, free // (self.shape.num_layers * self.shape.kv_bytes_per_token_layer))

    @property
    def is_preset(self) -> bool:
        """It has not been measured: the model has no context of its own."""
        return self.gpus_per_instance is not None

    @property
    def num_gpus(self) -> int | None:
        """Of the whole cluster; None where it has none."""
        return None if self.gpus_per_instance is None else self.num_instances * self.gpus_per_instance


def resolve_machine(cluster: ClusterSpec, settings: Settings, base_dir: Path = Path()) -> Machine:
    """The machine that a spec means. ``settings``: of all variants, as they decide what a model folder needs.

    Raises ConfigError, ModelError and BudgetError, each in one line.
    """
    if cluster.preset is not None or cluster.gpu is not None:
        machine = _of_presets(cluster, base_dir)
    elif cluster.is_local:
        from jettison.simulate.local import local_deployment  # torch, and only here

        machine = of_deployment(local_deployment(cluster, settings, base_dir), cluster)
    else:
        machine = of_deployment(described(cluster, base_dir), cluster)
    if machine.kv_tokens < 1:
        needed = machine.shape.parameter_bytes + machine.workspace_bytes
        raise BudgetError(
            f"cluster: {machine.name} needs {needed} bytes for parameters and workspace, and more for KV; an instance "
            f"has {machine.budget_bytes}"
        )
    return machine


# --- presets


def _of_presets(cluster: ClusterSpec, base_dir: Path) -> Machine:
    preset = _cluster_preset(cluster)
    instance, name = preset.instance, f"{preset.name} ({preset.num_instances} x {preset.instance.name})"
    if (stored := _measured_steps(cluster, base_dir)) is not None:
        preset = replace(preset, measured=profile_of_preset(stored, instance, "cluster.profile"))
        name += f", steps as measured on {stored.fingerprint.hardware}"
    is_inside, unchanged = _changes_inside(cluster, preset), LinkChange()
    inside = preset.scale_up
    nodes = {i: i // preset.instances_per_node for i in range(preset.num_instances)}
    topology = Topology(
        between=_link(preset.scale_out, instance, unchanged if is_inside else cluster.link),
        inside=None if inside is None else _link(inside, instance, cluster.link if is_inside else unchanged),
        host=LinkSpec.of(LinkClass.PCIE, instance.host_link_bytes_per_s),
        machine_of=nodes,
        card_of=nodes if cluster.link.card_per_node else {},
    )
    # What plans count on: a plan may join any two instances.
    others = range(1, preset.num_instances) if preset.num_instances > 1 else (0,)
    slowest = min((topology.link(0, other) for other in others), key=lambda link: link.bytes_per_s)
    profile = replace(preset.profile(), link_bytes_per_s=slowest.bytes_per_s, link_latency_s=slowest.latency_s)
    return Machine(
        name=name,
        shape=instance.shape,
        num_instances=preset.num_instances,
        gpus_per_instance=instance.num_gpus,
        budget_bytes=_budget_bytes(cluster, instance),
        profile=profile,
        topology=topology,
        parameter_share=(
            instance.parameter_share if cluster.memory_bytes is None and cluster.kv_tokens is None else None
        ),
    )


def _measured_steps(cluster: ClusterSpec, base_dir: Path) -> StoredProfile | None:
    """The profile that takes the roofline's place; None where the spec names none. Raises ConfigError."""
    if cluster.measured is not None:
        try:
            return from_document(cluster.measured)
        except ProfileDocumentError as error:
            raise ConfigError(f"cluster.profile: {error}") from None
    if cluster.profile == AUTO:
        return None
    return read_profile(found_file(cluster.profile, base_dir, "cluster.profile"))


def changes_inside(cluster: ClusterSpec) -> bool | None:
    """Whether ``cluster.link`` is about the link inside a node (True) or between nodes; None where it changes nothing,
    or where there is but one. Raises ConfigError."""
    if cluster.preset is None or cluster.link == LinkChange():
        return None
    return _changes_inside(cluster, _cluster_preset(cluster))


def _changes_inside(cluster: ClusterSpec, preset: ClusterPreset) -> bool:
    """As the spec says; else what joins its instances: the link inside a node where they are all in one."""
    said = cluster.link.within_node
    if said and preset.scale_up is None:
        raise ConfigError(f"cluster.link.within_node: {preset.name} has no link inside a node")
    if said is not None:
        return said
    return preset.scale_up is not None and preset.num_instances <= preset.instances_per_node


def _cluster_preset(cluster: ClusterSpec) -> ClusterPreset:
    """With instances and utilisation as the spec has them."""
    if cluster.preset is not None:
        try:
            preset = cluster_preset(cluster.preset)
        except ConfigError as error:
            raise ConfigError(f"cluster: {error}") from None
        if cluster.weights is not None:
            model = replace(preset.instance.model, weights=cluster.weights)
            preset = replace(preset, instance=replace(preset.instance, model=model))
    else:
        assert cluster.gpu is not None and cluster.model is not None
        try:
            instance = instance_preset(cluster.model, cluster.gpu, cluster.gpus_per_instance, cluster.weights)
        except ConfigError as error:
            raise ConfigError(f"cluster: {error}") from None
        latency_s = instance.gpu.efficiency.network_s
        link = LinkPreset("network", instance.num_gpus * DEFAULT_GBPS * 1e9 / 8, latency_s)
        preset = ClusterPreset(cluster.gpu, instance, cluster.instances or 1, 1, link)
    if cluster.instances is not None:
        preset = replace(preset, num_instances=cluster.instances)
    if cluster.memory_utilisation is not None:
        try:
            instance = replace(preset.instance, memory_utilisation=cluster.memory_utilisation)
        except ValueError as error:
            raise BudgetError(f"cluster.memory_utilisation: {error}") from None
        preset = replace(preset, instance=instance)
    return preset


def _budget_bytes(cluster: ClusterSpec, instance: InstancePreset) -> int:
    if cluster.memory_bytes is not None:
        wanted, what = cluster.memory_bytes, f"cluster.memory: {cluster.memory_bytes} bytes are"
    elif cluster.kv_tokens is not None:
        wanted = instance.parameter_bytes + cluster.kv_tokens * instance.kv_bytes_per_token
        what = f"cluster.kv_tokens: {cluster.kv_tokens} tokens beside the parameters are {wanted} bytes,"
    else:
        return instance.budget_bytes
    if wanted > instance.memory_bytes:
        gpus = f"{instance.num_gpus} x {instance.gpu.name}"
        raise BudgetError(f"{what} more than the {instance.memory_bytes} of {gpus}")
    return wanted


def _link(preset: LinkPreset, instance: InstancePreset, change: LinkChange) -> LinkSpec:
    """A link between instances, as the preset or the spec has it: all GPUs' cards together."""
    line = preset.line_bytes_per_s if change.gbps is None else instance.num_gpus * change.gbps * 1e9 / 8
    return _changed(replace(preset, line_bytes_per_s=line), change)


def _changed(preset: LinkPreset, change: LinkChange) -> LinkSpec:
    link_class = LinkClass(change.link_class or _usual_class(preset))
    latency_s = preset.latency_s
    if change.link_class is not None:
        latency_s = LATENCY_S[link_class]
    if change.latency_us is not None:
        latency_s = change.latency_us / 1e6
    changed = replace(
        preset, latency_s=latency_s,
        efficiency=preset.efficiency if change.efficiency is None else change.efficiency,
        duplex_efficiency=preset.duplex_efficiency if change.duplex_efficiency is None else change.duplex_efficiency,
    )
    return _spec_of(changed, link_class)


def _usual_class(preset: LinkPreset) -> LinkClass:
    """By its name, which says what it is made of."""
    if "NVLink" in preset.name:
        return LinkClass.NVLINK
    if preset.name.startswith("PCIe"):
        return LinkClass.PCIE
    return LinkClass.ETHERNET if preset.name.endswith("Gbps") else LinkClass.RDMA


def _spec_of(preset: LinkPreset, link_class: LinkClass) -> LinkSpec:
    """Presets say what each direction keeps (0.5 to 1), the simulator what both carry beyond one (0 to 1)."""
    return LinkSpec(preset.bytes_per_s, preset.latency_s, 2.0 * preset.duplex_efficiency - 1.0, link_class)


# --- measured


def of_deployment(deployment: Deployment, cluster: ClusterSpec | None = None) -> Machine:
    """What was measured, with the spec's changes. Raises ConfigError where it has no profile."""
    cluster = cluster or ClusterSpec()
    profile = deployment.profile
    if profile is None:
        raise ConfigError(f"cluster: {_without_profile(deployment, cluster)}")
    shape = deployment.shape
    budget = deployment.budget_bytes if cluster.memory_bytes is None else cluster.memory_bytes
    if cluster.kv_tokens is not None and not cluster.is_local:  # a local one has been made so large, to the page
        kv_bytes = cluster.kv_tokens * shape.num_layers * shape.kv_bytes_per_token_layer
        budget = deployment.workspace_bytes + shape.parameter_bytes + kv_bytes
    measured = LinkPreset("shared memory", profile.link_bytes_per_s, profile.link_latency_s, 1.0)
    change = cluster.link
    if change.gbps is not None:
        efficiency = LINE_RATE_REACHED if change.efficiency is None else change.efficiency
        measured = replace(measured, line_bytes_per_s=change.gbps * 1e9 / 8, efficiency=efficiency)
    link = _changed(measured, change)
    if change != LinkChange():  # what plans count on is what is there
        profile = replace(profile, link_bytes_per_s=link.bytes_per_s, link_latency_s=link.latency_s)
    return Machine(
        name=deployment.name,
        shape=shape,
        num_instances=cluster.instances or deployment.num_instances,
        gpus_per_instance=None,
        budget_bytes=budget,
        profile=profile,
        topology=Topology(link),
        workspace_bytes=deployment.workspace_bytes,
        page_bytes=deployment.page_bytes,
        max_model_len=deployment.max_model_len,
        settings=deployment.settings,
        caches_prefixes=True,
        core_knows_profile=deployment.core_knows_profile,
    )


def _without_profile(deployment: Deployment, cluster: ClusterSpec) -> str:
    if cluster.is_local and cluster.model is not None:
        command = profiling_command(deployment, cluster.model)
        return f"there is no profile of {deployment.name} for this machine; `{command}` makes it, beside the model"
    command = profiling_command(deployment, out="profile.json")
    return (
        f"the description has no profile of {deployment.name}; `{command}` makes one on its machine, from its model "
        "folder: then say cluster.profile: profile.json"
    )


def described(cluster: ClusterSpec, base_dir: Path) -> Deployment:
    """What a live cluster told of itself, with the profile that the spec names. Raises ConfigError."""
    deployment = _description(cluster, base_dir)
    if cluster.profile == AUTO:
        return deployment
    return with_profile(deployment, found_file(cluster.profile, base_dir, "cluster.profile"))


def _description(cluster: ClusterSpec, base_dir: Path) -> Deployment:
    if isinstance(cluster.description, str):
        path = found_file(cluster.description, base_dir, "cluster.description")
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cluster.description: {path}: {error}") from None
        return deployment_from_document(document, f"cluster.description: {path}")
    return deployment_from_document(cluster.description, "cluster.description")


def found_file(name: str, base_dir: Path, where: str) -> Path:
    """A file by its name: as it is, or beside the spec. Raises ConfigError."""
    for path in (Path(name), base_dir / name):
        if path.is_file():
            return path
    raise ConfigError(f"{where}: there is no file {name}")


# --- a variant's cluster


def resolve_config(machine: Machine, spec: ExperimentSpec, variant: VariantSpec) -> EngineConfig:
    """What a live engine would be told: the machine's settings, under the spec's, under the variant's.

    Raises ConfigError for settings that contradict each other.
    """
    settings: dict[str, Any] = {**machine.settings, **spec.settings, **variant.settings}
    settings |= {"overload": variant.policy, "instances": machine.num_instances, "memory": machine.budget_bytes}
    if "enable_prefix_caching" not in settings:
        settings["enable_prefix_caching"] = machine.caches_prefixes
    try:
        return EngineConfig.resolve(needs_model=False, num_cores=1, **settings)
    except ConfigError as error:
        raise ConfigError(f"variant {variant.name!r}: {error}") from None


def objectives_of(spec: ExperimentSpec, config: EngineConfig) -> SloSpec:
    """By which a run is judged: the spec's, else those that the engine serves by (``slo_ttft_ms``, ``slo_tpot_ms``)."""
    own = (config.offline.slo_ttft_ms, config.offline.slo_tpot_ms)
    ttft_s, tpot_s = (None if each is None else each / 1e3 for each in own)
    return SloSpec(
        ttft_s if spec.slo.ttft_s is None else spec.slo.ttft_s, tpot_s if spec.slo.tpot_s is None else spec.slo.tpot_s
    )


def drops_ahead(machine: Machine, block_size: int, page_bytes: int) -> tuple[LayerRange, ...]:
    """What the drop that comes first leaves to its members, which a card maps ahead."""
    shape = machine.shape
    sizes, whole = PageSizes.of(shape, block_size, page_bytes), LayoutSpec(shape.all_shards, shape.all_layers)
    blocks = first_capacity_blocks(machine.budget_bytes, machine.workspace_bytes, whole, sizes)
    return first_drop(shape, blocks * shape.num_layers * sizes.kv_block_bytes)


def cluster_setup(machine: Machine, spec: ExperimentSpec, variant: VariantSpec, seed: int) -> ClusterSetup:
    """Everything but the requests. Raises ConfigError."""
    config = resolve_config(machine, spec, variant)
    limits = _limits(machine, config)
    keeps_mappings, page_bytes = machine.profile.keeps_mappings, machine.page_bytes or CUDA_PAGE_BYTES
    if machine.page_bytes is None and keeps_mappings:  # as `--page-size auto` chooses
        page_bytes = best_page_bytes(
            machine.shape, limits.block_size, machine.budget_bytes, machine.workspace_bytes, CUDA_PAGE_BYTES)
    if "page_size" in {**spec.settings, **variant.settings}:
        page_bytes = config.memory.page_bytes or page_bytes
    num_slots = num_host_slots(config.memory.host_memory_bytes, machine.shape, limits.block_size)
    _check_books(machine, limits.block_size, num_slots)
    timing = spec.timing
    if config.most_instances > config.instances and timing.start_s is None:
        raise ConfigError(
            f"variant {variant.name!r}: max_instances needs timing.start_s, the seconds that a process takes to start"
        )
    params = cluster_params(
        config, num_host_slots=num_slots,
        profile=machine.profile if machine.core_knows_profile and config.profile != "none" else None,
        start_s=timing.start_s,
    )
    inside = machine.topology.inside
    if params.profile is not None and inside is not None:
        params = replace(params, near_bytes_per_s=inside.bytes_per_s)
    if machine.topology.host is not None:
        # Copy engines work beside the steps: a whole step's time is theirs, as InferCept has it.
        params = replace(params, swap=replace(params.swap, time_share=1.0))
    return ClusterSetup(
        shape=machine.shape,
        limits=limits,
        params=params,
        num_workers=config.most_instances,
        memory=MemorySetup(
            machine.budget_bytes, machine.workspace_bytes, page_bytes,
            drops_ahead(machine, limits.block_size, page_bytes) if keeps_mappings else None,
        ),
        profile=machine.profile,
        executor=step_executor(machine.profile, timing, seed),
        topology=machine.topology,
        hops=_hops(timing, machine),
        piece_bytes=config.overload.exchange_piece_bytes
        or (PIECE_BYTES if machine.is_preset else MAX_PIECE_BYTES),
        piece_ns=None if config.overload.exchange_piece_bytes else MAX_PIECE_NS,
        coordinate_links=config.overload.coordinate_links,
        tick_s=config.overload.check_interval_ms / 1e3,
        start_s=timing.start_s or 0.0,
        # Not by default: what simulations compare is how long queues become.
        max_num_queued_reqs=(
            config.scheduler.max_num_queued_reqs
            if "max_num_queued_reqs" in {**spec.settings, **variant.settings} else None
        ),
    )


def step_executor(profile: HardwareProfile, timing: Timing, seed: int) -> ModelledExecutor:
    """Steps as the profile has them, with what the spec says is around them."""
    return ModelledExecutor(profile.cost, timing.step_s or 0.0, timing.noise, seed)


def _check_books(machine: Machine, block_size: int, num_slots: int) -> None:
    """Raises ConfigError for more memory than its blocks can be accounted for."""
    for what, number in (
        ("cluster: the memory of an instance (memory, kv_tokens) is", machine.kv_tokens // block_size),
        ("settings.host_memory is", num_slots),
    ):
        if number > MOST_BLOCKS:
            raise ConfigError(f"{what} {shown(number)} KV blocks, and {MOST_BLOCKS:,} can be simulated at most")


def _limits(machine: Machine, config: EngineConfig) -> SchedulerLimits:
    max_model_len = config.model.max_model_len or machine.max_model_len
    if max_model_len > machine.max_model_len and not machine.is_preset:
        raise ConfigError(
            f"settings.max_model_len {max_model_len} exceeds the {machine.max_model_len} positions of {machine.name}"
        )
    is_card = machine.profile.keeps_mappings
    keeps_rows = not (is_card or machine.is_preset)  # GPUs' runner does not
    return scheduler_limits(config, max_model_len, goes_ahead=is_card, keeps_rows=keeps_rows)


def _hops(timing: Timing, machine: Machine) -> Hops:
    hop_s = machine.profile.hop_s
    usual = Hops() if hop_s is None else Hops(hop_s, hop_s)
    return Hops(
        usual.command_s if timing.command_s is None else timing.command_s,
        usual.report_s if timing.report_s is None else timing.report_s,
    )


def edge_of(timing: Timing) -> Edge:
    """Between clients and the engine."""
    return Edge(timing.request_s or 0.0, timing.response_s or 0.0)
