"""One workload against one simulated cluster: ``simulate_workload(workload, setup) -> RunResult``.

The result has the same form as that of a live run (``docs/results.md``), so that every report works on it.

    from jettison.simulate.run import SimulationOptions, simulate_workload
    run = simulate_workload(workload, setup, SimulationOptions(name="drop"))

``setup`` is a ``sim.setup.ClusterSetup``: shape, limits, params (policies), memory, profile, executor, topology.
Baselines differ in the rungs of ``setup.params``; as in a live engine static pipelines run without lookahead
(``limits.lookahead``), which is the caller's affair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jettison.core.founding import initial_groups
from jettison.core.ladder.lists import overload_name
from jettison.core.observing import RunObserver
from jettison.report.classes import build_by_class
from jettison.report.fairness import FairnessHeader, measured_demand, measured_in
from jettison.report.results import METRIC_DEFINITIONS, RunResult
from jettison.sim.cluster import SimulatedCluster
from jettison.sim.faults import Fault
from jettison.sim.setup import ClusterSetup
from jettison.simulate.clients import Clients, Edge
from jettison.simulate.observe import Observer
from jettison.types import NANOSECONDS
from jettison.workload.conditions import capacity_tokens
from jettison.workload.pool import OfflinePool
from jettison.workload.prompts import PromptMaker
from jettison.workload.traces import Workload

MAX_DETAILED_REQUESTS = 50_000
"""Of larger runs neither single gaps nor a row a request are kept, unless asked for."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """How to run; the cluster is not in here."""

    name: str = "run"
    edge: Edge = field(default_factory=Edge)
    observe_interval_s: float = 0.5
    until_s: float | None = None
    """The run ends then; what is unfinished counts as failed. None: when everything has ended."""
    detail: bool | None = None
    """Keep every gap and a row a request. None: up to ``MAX_DETAILED_REQUESTS``."""
    gaps: bool | None = None
    """Keep every gap, too. None: as ``detail``. Without, percentiles of gaps are to the width of a histogram's bin."""
    faults: tuple[Fault, ...] = ()
    prompts: PromptMaker | None = None
    """Token ids; needed only where prefixes are cached. None: the same token over and over."""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    parameter_share: float | None = None
    """For the fairness header: of a device's whole memory, where that is more than an instance may use. None: of what
    an instance may use."""
    pool: OfflinePool | None = None
    """A batch beside the workload; not sent where offline requests are not served (``--offline none``)."""
    batches: tuple[OfflinePool, ...] = ()
    """Others; nor are they."""
    on_progress: Callable[[int, int], None] | None = None
    """Called with (requests ended, requests in all) as they end."""
    on_time: Callable[[float], None] | None = None
    """Called with the virtual time in seconds at every observation, whether or not a request has ended."""
    on_start: Callable[[SimulatedCluster], None] | None = None
    """Called with the cluster before the first request: for what an operator asks of it at certain times."""
    observer: RunObserver | None = None
    """Told of every step, transfer, decision and token: a time line, say. The run is slower and its result the same."""

    @property
    def pools(self) -> tuple[OfflinePool, ...]:
        """All batches."""
        return self.batches if self.pool is None else (self.pool, *self.batches)


def simulate_workload(
    workload: Workload, setup: ClusterSetup, options: SimulationOptions | None = None
) -> RunResult:
    """Replay ``workload`` in virtual time. Raises BudgetError where the model does not fit into a worker."""
    options = options or SimulationOptions()
    detail = options.detail if options.detail is not None else len(workload.rows) <= MAX_DETAILED_REQUESTS
    keeps_gaps = detail if options.gaps is None else options.gaps
    cluster = SimulatedCluster(
        setup,
        on_emit=lambda emit, now_ns: clients.on_emit(emit, now_ns),
        on_tokens=lambda request_ids, ends_ns: clients.on_tokens(request_ids, ends_ns),
        on_record=lambda record: observer.note_record(record),
        observer=options.observer,
    )
    counts_tokens = bool(options.pools) or workload.columns.is_offline is not None
    observer = Observer(cluster, options.observe_interval_s, options.on_time, counts_tokens=counts_tokens)
    limits = setup.limits
    clients = Clients(
        workload.rows, options.edge, _prompt_maker(options), keeps_gaps=keeps_gaps,
        max_request_tokens=min(limits.max_model_len, cluster.core.max_request_blocks() * limits.block_size),
        on_end=_progress(options, len(workload.rows)),
        pools=options.pools if setup.params.offline.serves else (), window_s=workload.duration_s,
    )
    observer.start()
    cluster.inject(options.faults)
    clients.start(cluster)
    if options.on_start is not None:
        options.on_start(cluster)
    until_ns = None if options.until_s is None else round(options.until_s * NANOSECONDS)
    cluster.run(until_ns, is_over=lambda: clients.all_ended)
    observer.stop()
    clients.close(cluster.loop.now_ns / NANOSECONDS)
    return _result(workload, cluster, clients, observer, options, detail, keeps_gaps)


def _prompt_maker(options: SimulationOptions) -> Callable[[int, int], tuple[int, ...]]:
    prompts = options.prompts
    if prompts is None:
        return lambda _, num_tokens: (0,) * num_tokens
    return lambda index, num_tokens: tuple(prompts.token_ids(index, num_tokens))


def _progress(options: SimulationOptions, total: int) -> Callable[[int], None] | None:
    on_progress = options.on_progress
    return None if on_progress is None else lambda ended: on_progress(ended, total)


def _result(
    workload: Workload, cluster: SimulatedCluster, clients: Clients, observer: Observer, options: SimulationOptions,
    detail: bool, keeps_gaps: bool,
) -> RunResult:
    beside = tuple(pool.describe() for pool in options.pools)
    notes = (*workload.notes, *not_modelled(workload), *beside)
    run = build_by_class(
        options.name, clients.all_records, window_s=workload.duration_s, objectives=options,
        has_batch=bool(options.pools), num_unfinished=clients.num_unfinished, detail=detail,
        config=_config(workload, notes, cluster, options), events=observer.events(),
        series=observer.series, client={"lag_s": dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 0.0),
                                        "max_open_requests": clients.most_open},
    )
    if not keeps_gaps:
        _keep_gaps(run, clients, options.slo_tpot_s)
    if due := clients.batch_documents():
        run.config["batches"] = due
    run.config["fairness"] = _fairness(workload, notes, cluster, clients, options).as_dict()
    return run


def _keep_gaps(run: RunResult, clients: Clients, limit_s: float | None) -> None:
    """What is known of gaps of which none was kept."""
    run.itl_s = clients.gaps.summary()
    for name, gaps in (("online", clients.gaps), ("offline", clients.offline_gaps)):
        if run.classes is not None:
            run.classes[name]["itl_s"] = asdict(gaps.summary())
            run.classes[name]["gaps_within"] = None if limit_s is None else gaps.share_within(limit_s)


def not_modelled(workload: Workload) -> tuple[str, ...]:
    """What a recording says of its requests that a simulation does not heed, a note each."""
    columns, notes = workload.columns, []
    if columns.cached_tokens is not None:
        cached, total = int(columns.cached_tokens.sum()), int(columns.input_tokens.sum())
        notes.append(
            f"{cached:,} of {total:,} input tokens came from a prefix cache where this was recorded: computed here"
        )
    return tuple(notes)


def _config(
    workload: Workload, notes: Sequence[str], cluster: SimulatedCluster, options: SimulationOptions
) -> dict[str, Any]:
    setup = cluster.setup
    topology = setup.topology
    # Workers are numbered node by node: what joins the first and the last is inside a node only if all are in it.
    link = topology.link(0, setup.num_workers - 1)
    return {
        "simulated": True,
        "policy": overload_name(setup.params.rungs, static_pipeline=setup.params.static_pipeline),
        "cluster": {
            "instances": setup.num_at_start,
            **({} if setup.num_at_start == setup.num_workers else {"max_instances": setup.num_workers}),
            "memory_bytes": setup.memory.budget_bytes,
            "block_size": setup.limits.block_size,
            "max_num_batched_tokens": setup.limits.max_num_batched_tokens,
            "max_num_seqs": setup.limits.max_num_seqs,
            "step_priority": "prefill" if setup.limits.prefill_first else "decode",
            "link": str(link.link_class),
            "link_bytes_per_s": link.bytes_per_s,
            "link_latency_s": link.latency_s,
            "link_duplex_efficiency": link.duplex_efficiency,
            "link_within_node_bytes_per_s": None if topology.inside is None else topology.inside.bytes_per_s,
            "coordinate_links": setup.coordinate_links,
        },
        "edge_s": {"request": options.edge.request_s, "response": options.edge.response_s},
        "num_faults": len(options.faults),
        "num_events": cluster.loop.num_run,
        "event_log_hash": cluster.log.hexdigest,
        "workload": {
            "name": workload.name,
            "source": workload.source,
            "notes": list(notes),
            "num_requests": len(workload.rows),
            "has_tenants": workload.columns.tenant is not None,
            "duration_s": workload.duration_s,
            "mean_rate_per_s": workload.mean_rate_per_s,
        },
        "metric_definitions": METRIC_DEFINITIONS,
    }


def _fairness(
    workload: Workload, notes: Sequence[str], cluster: SimulatedCluster, clients: Clients, options: SimulationOptions
) -> FairnessHeader:
    """Demand as this run measured it, queue included."""
    setup = cluster.setup
    online = [record for record in clients.records if not record.is_offline]
    mean_tokens, peak_tokens = measured_demand(online or clients.records, workload.duration_s)
    num, shape = setup.num_at_start, setup.shape
    capacity = _capacity_tokens(setup)
    token_bytes = shape.num_layers * shape.kv_bytes_per_token_layer
    spare_copies = 0 if setup.params.static_pipeline else num - 1
    share = options.parameter_share
    return FairnessHeader(
        mean_demand_tokens=mean_tokens,
        peak_demand_tokens=peak_tokens,
        demand_model=measured_in(options.name),
        parameter_share=shape.parameter_bytes / setup.memory.budget_bytes if share is None else share,
        kv_capacity_tokens=float(capacity),
        merged_capacity_tokens=float(capacity + math.floor(spare_copies * shape.parameter_bytes / token_bytes)),
        arrivals=(workload.source, *notes),
    )


def _capacity_tokens(setup: ClusterSetup) -> int:
    """KV tokens of all groups that the cluster starts with: a static pipeline has as many as its poorest stage. Those
    that may be started later do not count."""
    memory = setup.memory
    return capacity_tokens(
        setup.shape,
        initial_groups(range(setup.num_at_start), setup.shape, static_pipeline=setup.params.static_pipeline),
        budget_bytes=memory.budget_bytes, workspace_bytes=memory.workspace_bytes, page_bytes=memory.page_bytes,
        block_size=setup.limits.block_size,
    )
