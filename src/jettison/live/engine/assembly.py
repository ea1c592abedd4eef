"""From a resolved configuration to the parts of an engine: model shape, worker specs, limits, core."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from jettison.config import EngineConfig, usable_cores
from jettison.config.devices import CARD_PAGE_BYTES
from jettison.config.sections import DEFAULT_PAGE_BYTES
from jettison.config.values import format_bytes
from jettison.core.cluster import ClusterCore
from jettison.core.configured import cluster_params, scheduler_limits
from jettison.core.founding import first_drop, initial_groups
from jettison.core.ladder.lists import parse_overload
from jettison.core.serving.group import SchedulerLimits
from jettison.cost.hardware import HardwareProfile
from jettison.cost.profile_document import Fingerprint
from jettison.device.addresses import span_bytes
from jettison.device.choice import choose_back_end, kind_of
from jettison.device.dtypes import Dtype, resolve_dtype
from jettison.device.kernels.choosing import parts_are_exact, rows_are_independent
from jettison.device.kernels.processor import Processor
from jettison.device.model.end_tokens import EndTokens, read_end_tokens
from jettison.device.model.folder import folder_by
from jettison.device.model.hf_config import DecoderConfig, read_config
from jettison.device.model.kept import keep_integers, told_of_kept
from jettison.device.model.quantized.config import scheme_of_folder
from jettison.device.model.shards import model_shape
from jettison.device.model.tying import with_its_own_head
from jettison.device.model.workspaceplan import plan_workspace, position_bytes
from jettison.device.spec import HOST, RANDOM
from jettison.errors import BudgetError, ConfigError
from jettison.live.engine.cards import BACK_ENDS, PIECE_BYTES, cards_of, environment, unused_cards
from jettison.live.engine.encoder import MAX_FIXED_BYTES, fixed_step_bytes
from jettison.live.engine.positions import PositionRoom
from jettison.live.machine.address_space import gib, spans_complaint
from jettison.live.machine.memory import Wanted, cores_warning, memory_limit
from jettison.live.wire.worker_config import WorkerSpec
from jettison.memory.hostpool import num_host_slots
from jettison.memory.layout import LayoutSpec
from jettison.memory.pagechoice import best_page_bytes
from jettison.memory.pagemap import MIN_BLOCKS, PageSizes, check_budget, first_capacity_blocks
from jettison.policy.links import MachineId
from jettison.profiles import fingerprint, load_profile
from jettison.types import LayerRange, ModelShape, WorkerId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembly:
    """Everything that follows from the configuration and the model folder."""

    config: EngineConfig
    model: DecoderConfig
    """With rotary tables for what memory can hold of the context."""
    shape: ModelShape
    limits: SchedulerLimits
    worker_specs: list[WorkerSpec]
    end_tokens: EndTokens
    room: PositionRoom

    @property
    def workspace_bytes(self) -> int:
        """Activations and buffers of a worker: what is never dropped."""
        return self._workspace_for(self.model.max_model_len)

    def _workspace_for(self, num_positions: int) -> int:
        spec = self.worker_specs[0]
        limits = spec.max_num_tokens, spec.max_num_seqs
        return _workspace_bytes(self.model, num_positions, spec.dtype, spec.back_end, limits)

    @property
    def kernels(self) -> str:
        """What all workers compute with: the back end's own name, resolved here, once for the cluster."""
        return self.worker_specs[0].kernels

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: what the configuration says, or what was chosen for this model and memory."""
        return self.worker_specs[0].page_bytes

    @property
    def byte_tokens(self) -> int | None:
        """Tokens of a folder without a tokenizer; None where it needs one."""
        model = self.config.model
        return self.shape.vocab_size if model.load_format == RANDOM and model.tokenizer is None else None

    @property
    def rows_are_independent(self) -> bool:
        """Whether what a request computes has the same bits whatever shares its steps."""
        return rows_are_independent(self.kernels, resolve_dtype(self.worker_specs[0].dtype, self.model))

    @property
    def parameter_bytes(self) -> int:
        """What the workers that begin at the start read together."""
        return self._parameter_bytes_of(self.worker_specs[: self.config.instances])

    def _parameter_bytes_of(self, specs: Sequence[WorkerSpec]) -> int:
        shards = self.shape.shard_bytes
        layers = [self.shape.all_layers if spec.layers is None else LayerRange(*spec.layers) for spec in specs]
        return sum(shards[shard] for part in layers for shard in self.shape.shards_for(part))

    def memory_for_blocks(self, num_blocks: int) -> int:
        """Bytes of a worker that holds all parameters, its workspace and ``num_blocks`` KV blocks.

        The workspace is that of a worker with so much memory (``sized_for``), not of this one.
        """
        page = self.page_bytes
        arena = num_blocks * self.shape.block_bytes_per_layer(self.config.memory.block_size)
        parts = [*self.shape.shard_bytes.values(), *([arena] * self.shape.num_layers)]
        others = sum(-(-part // page) * page for part in parts)
        num_positions, memory_bytes = 0, 0
        while (reached := self.room.positions(memory_bytes)) > num_positions:  # more memory, more rows, more memory
            num_positions = reached
            memory_bytes = others + -(-self._workspace_for(num_positions) // page) * page
        return memory_bytes

    def sized_for(self, num_blocks: int) -> Assembly:
        """The same with that memory for each instance."""
        num_bytes = self.memory_for_blocks(num_blocks)
        memory = replace(self.config.memory, memory_bytes=num_bytes, gpu_memory_utilization=None)
        return assemble(replace(self.config, memory=memory))

    def check(self) -> None:
        """Raise now what would end every worker's start.

        BudgetError where a worker's first layout does not fit into its memory, its memory not into addresses, or all
        processes not into the machine; ModelError where the folder's weights are not those of its configuration (their
        headers are read). Logs a warning where the workers may come to use more than the machine has, or
        none of them will ever fall asleep.
        """
        memory, spec = self.config.memory, self.worker_specs[0]
        sizes = PageSizes.of(self.shape, memory.block_size, self.page_bytes)
        too_many = None
        if spec.back_end == HOST:  # a card's driver reserves more addresses than any limit would leave
            too_many = spans_complaint(span_bytes(memory.memory_bytes, self.workspace_bytes, self.shape, sizes))
        flag = f"--memory {format_bytes(memory.memory_bytes)} for each instance"
        try:
            kind_of(spec.back_end).check_addresses(memory.memory_bytes, self.workspace_bytes, self.shape, sizes)
        except BudgetError as error:
            raise BudgetError(f"{flag}: {too_many or error}") from error
        if too_many is not None:
            log.warning("%s: %s", flag, too_many)
        for layers in {LayerRange(*spec.layers) for spec in self.worker_specs if spec.layers is not None}:
            layout = LayoutSpec(self.shape.shards_for(layers), layers)
            self._check_budget(layout, sizes)
        dtype = resolve_dtype(spec.dtype, self.model)
        folder = folder_by(spec.load_format)(Path(spec.model_dir), self.model, dtype)
        folder.open()
        log.info("end tokens: %s", self.end_tokens)
        told = told_of_kept(self.model, dtype)
        if told is None and scheme_of_folder(Path(spec.model_dir)) is not None:
            told = f"quantized in the folder, {spec.dtype} in memory"
        if told is not None:
            log.info("weights: %s", told)
        if spec.back_end != HOST:
            log.info(
                "each instance has %s in pages of %s; they are on cards %s",
                gib(memory.memory_bytes), format_bytes(self.page_bytes), self.config.devices.cards,
            )
        for doubt in (*self.end_tokens.left_out, folder.doubt, unused_cards(self.config)):
            if doubt is not None:
                log.warning("%s", doubt)
        self._check_machine()

    def _check_budget(self, layout: LayoutSpec, sizes: PageSizes) -> None:
        """Raise BudgetError where a first layout does not fit; with the memory that it names, tables have more rows."""
        memory = self.config.memory
        try:
            check_budget(memory.memory_bytes, self.workspace_bytes, layout, sizes, memory.block_size)
        except BudgetError:
            num_positions = self.room.positions(self.memory_for_blocks(MIN_BLOCKS))
            workspace_bytes = max(self.workspace_bytes, self._workspace_for(num_positions))
            try:
                check_budget(memory.memory_bytes, workspace_bytes, layout, sizes, memory.block_size)
            except BudgetError as error:
                if (share := memory.gpu_memory_utilization) is None:
                    raise
                raise BudgetError(
                    f"the model does not fit: --gpu-memory-utilization {share:g} leaves {gib(memory.memory_bytes)} of a"
                    f" card for each instance; put fewer on a card, or raise it, or free the card; {error}"
                ) from error

    def _check_machine(self) -> None:
        """Raise BudgetError where the processes and parameters of all instances that there may be do not fit into this
        machine's memory; warn of less. Of hosts that are others nothing is known here."""
        sleep = self.config.sleep
        for why_awake in (
            sleep.why_none_sleeps(len(self.worker_specs)), self.config.scale.why_more_stay(sleep.min_awake),
        ):  # fmt: skip
            if why_awake is not None:
                log.warning("%s", why_awake)
        if not self.config.hosts.are_this_machine:
            return
        specs = self.worker_specs
        flag = "--instances" if len(specs) == self.config.instances else "--max-instances"
        is_hosted = specs[0].back_end == HOST  # else all but the host memory is a card's
        budget_bytes = sum(spec.host_bytes + is_hosted * spec.memory_bytes for spec in specs)
        parameter_bytes = is_hosted * self._parameter_bytes_of(specs)
        wanted = Wanted(len(specs), budget_bytes, parameter_bytes, self.config.api_servers, flag)
        limit = memory_limit()
        if (complaint := wanted.complaint(limit)) is not None:
            raise BudgetError(complaint)
        for warning in (
            wanted.warning(limit), cores_warning(len(specs), specs[0].num_threads, usable_cores(), flag),
        ):  # fmt: skip
            if warning is not None:
                log.warning("%s", warning)

    def load_profile(self) -> HardwareProfile | None:
        """The profile that the configuration names, if it is valid for these workers.

        Raises ConfigError for a file that was named and cannot be read.
        """
        return load_profile(self.config.profile, Path(self.worker_specs[0].model_dir), self.fingerprint)

    @property
    def fingerprint(self) -> Fingerprint:
        """What a profile of these workers is valid for."""
        spec = self.worker_specs[0]
        return fingerprint(Path(spec.model_dir), spec.dtype, spec.num_threads, spec.kernels, spec.model.weights)

    def build_core(
        self, capacity_blocks: Mapping[WorkerId, int], secret: bytes, profile: HardwareProfile | None = None,
        machine_of: Mapping[WorkerId, MachineId] | None = None, *, has_profiled_links: bool = True,
        loading_bytes_per_s: float | None = None, start_s: float | None = None, missing: Collection[WorkerId] = (),
    ) -> ClusterCore:
        """A core over workers that have reported their capacity, and those that may be started later or should be
        there (``missing``), which get the least of it. ``machine_of``: where they are not all in one.
        ``has_profiled_links``: theirs are such as were profiled, which is shared memory. ``start_s``: what a process
        took to start, without what it read."""
        slots = num_host_slots(self.worker_specs[0].host_bytes, self.shape, self.limits.block_size)
        params = cluster_params(
            self.config, num_host_slots=slots, profile=profile, machine_of=machine_of,
            has_profiled_links=has_profiled_links, loading_bytes_per_s=loading_bytes_per_s, start_s=start_s,
        )
        params = replace(params, link_bytes_per_s=kind_of(self.worker_specs[0].back_end).link_bytes_per_s)
        if params.provision.num_at_start is not None:
            at_start = frozenset({*capacity_blocks, *missing})
            params = replace(params, provision=replace(params.provision, at_start=at_start))
        least = min(capacity_blocks.values())
        of_all = {**dict.fromkeys((spec.worker_id for spec in self.worker_specs), least), **capacity_blocks}
        return ClusterCore(self.shape, self.limits, params, of_all, secret)


def assemble(config: EngineConfig, processor: Processor | None = None) -> Assembly:
    """Read the model folder and make the plan of the cluster. Raises ModelError, ConfigError; of those that name
    cards before anything is read.

    ``processor``: by which kernels are chosen (None: this one).
    """
    cards, model_dir = cards_of(config), Path(config.model.model)
    model = read_config(model_dir, config.model.max_model_len)
    dtype = resolve_dtype(str(config.model.dtype), model)
    back_end = BACK_ENDS[config.devices.kind]
    kind = kind_of(back_end)
    kernels = kind.resolve_kernels(str(config.model.kernels), dtype, processor)
    model = with_its_own_head(model, model_dir, dtype, str(config.model.load_format))
    model = _with_kept(config, model, dtype, back_end, kernels)
    shape = model_shape(model, dtype)
    max_model_len = _max_model_len(config, model)
    end_tokens = _end_tokens(config, model)
    keeps_rows = kind.keeps_rows and parts_are_exact(kernels, dtype)
    _check_slices(config, kernels, dtype, keeps_rows=keeps_rows)
    limits = scheduler_limits(
        config, max_model_len, end_tokens.ids, goes_ahead=kind.goes_ahead, keeps_rows=keeps_rows
    )
    # A pipeline may hold a decode of every request beside a full prefill budget.
    max_num_tokens = max(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs)
    room = _position_room(config, model, shape, dtype, back_end, max_num_tokens)
    model = replace(model, max_model_len=room.positions(config.memory.memory_bytes))
    _check_step_size(limits, model.max_model_len)
    limits_of_steps = max_num_tokens, config.scheduler.max_num_seqs
    workspace_bytes = _workspace_bytes(model, model.max_model_len, dtype, back_end, limits_of_steps)
    config = _with_pages(config, shape, workspace_bytes)
    memory = config.memory
    sizes = PageSizes.of(shape, memory.block_size, memory.page_bytes or DEFAULT_PAGE_BYTES)
    ladder = parse_overload(config.overload.policy)
    layers = _layers_of_workers(config.most_instances, shape, static_pipeline=ladder.static_pipeline)
    spec = WorkerSpec(
        worker_id=0,
        model_dir=_path_for(config, str(model_dir)),
        model=model,
        dtype=dtype,
        memory_bytes=memory.memory_bytes,
        block_size=memory.block_size,
        page_bytes=sizes.page_bytes,
        max_num_tokens=max_num_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        back_end=back_end,
        kernels=kernels,
        load_format=str(config.model.load_format),
        tokenizer_dir=config.model.tokenizer and _path_for(config, config.model.tokenizer),
        num_threads=config.threads_of_a_worker,
        piece_bytes=config.overload.exchange_piece_bytes or PIECE_BYTES[config.devices.kind],
        coordinate=config.overload.coordinate_links,
        adapt_pieces=config.overload.exchange_piece_bytes is None,
        host_bytes=memory.host_memory_bytes,
        drop_layers=_drop_layers(config, shape, sizes, workspace_bytes) if "drop" in ladder.rungs else [],
    )
    specs = [
        structs.replace(spec, worker_id=worker, layers=layers[worker], environment=environment(card))
        for worker, card in enumerate(cards or [None] * config.most_instances)
    ]
    return Assembly(config, model, shape, limits, specs, end_tokens, room)


def _end_tokens(config: EngineConfig, model: DecoderConfig) -> EndTokens:
    """The end tokens. Raises ConfigError for a tokenizer that does not fit: the model would have no row for some of its
    tokens. (A folder's own may have more tokens than the model: its maker knows which of them are of use.)"""
    told = config.model.tokenizer
    found = read_end_tokens(
        Path(config.model.model), model.vocab_size, config.model.generation_config, Path(told or config.model.model))
    if told is not None and told != config.model.model and found.num_ids > model.vocab_size:
        raise ConfigError(
            f"--tokenizer {told} has tokens up to {found.num_ids - 1}, and the model only {model.vocab_size} tokens: "
            "it is another model's")
    return found


def _max_model_len(config: EngineConfig, model: DecoderConfig) -> int:
    """Most tokens of a request. Raises ConfigError where more are asked for than the model has positions."""
    most = config.model.max_model_len or model.max_position_embeddings
    if most > model.max_position_embeddings:
        raise ConfigError(f"--max-model-len {most} exceeds the model's {model.max_position_embeddings} positions")
    return most


def _check_slices(config: EngineConfig, kernels: str, dtype: str, *, keeps_rows: bool) -> None:
    """Raises ConfigError where rows are to go on later and cannot."""
    if config.offline.slices == "on" and not keeps_rows:
        raise ConfigError(
            f"--offline-slices on: with {kernels} in {dtype} a step's rows cannot go on later with the same results"
        )


def _with_kept(
    config: EngineConfig, model: DecoderConfig, dtype: Dtype, back_end: str, kernels: str
) -> DecoderConfig:
    """With the matrices that are kept as integers. Raises ConfigError where none can be though it is asked for."""
    asked, model_dir = config.model.quantized_weights, Path(config.model.model)
    if asked == "widened":
        return model
    kept = model
    if back_end == HOST and scheme_of_folder(model_dir) is not None:  # a card's kernels keep none
        loaded = choose_back_end(back_end).load_kernels(kernels, dtype)
        kept = keep_integers(model, model_dir, dtype, loaded, str(config.model.load_format))
    if asked == "kept" and not kept.kept:
        raise ConfigError(
            f"--quantized-weights kept: nothing of {config.model.model} can be; it takes matrices of 4 or 8 bits in "
            "groups of 32 columns or a multiple, and the CPU's kernels in float32 or bfloat16"
        )
    return kept


def _layers_of_workers(instances: int, shape: ModelShape, *, static_pipeline: bool) -> dict[WorkerId, tuple[int, int]]:
    """Layers (from, to) that each worker begins with. Raises ConfigError for a pipeline that there cannot be."""
    groups = initial_groups(range(instances), shape, static_pipeline=static_pipeline)
    if static_pipeline and all(len(group) == 1 for group in groups):
        has = "one layer" if instances > 1 else "--instances 1"
        raise ConfigError(f"--overload pipeline divides the layers between two instances: it cannot with {has}")
    return {stage.worker_id: (stage.layers.lo, stage.layers.hi) for group in groups for stage in group}


def _with_pages(config: EngineConfig, shape: ModelShape, workspace_bytes: int) -> EngineConfig:
    """The configuration with a page size, which on a card follows from the model and the memory."""
    memory = config.memory
    if memory.page_bytes is not None:
        return config
    page_bytes = best_page_bytes(shape, memory.block_size, memory.memory_bytes, workspace_bytes, CARD_PAGE_BYTES)
    return replace(config, memory=replace(memory, page_bytes=page_bytes))


def _drop_layers(
    config: EngineConfig, shape: ModelShape, sizes: PageSizes, workspace_bytes: int
) -> list[tuple[int, int]]:
    """What the drop that comes first leaves to either of its members."""
    if config.most_instances < 2:
        return []
    whole = LayoutSpec(shape.all_shards, shape.all_layers)
    blocks = first_capacity_blocks(config.memory.memory_bytes, workspace_bytes, whole, sizes)
    return [(layers.lo, layers.hi) for layers in first_drop(shape, blocks * shape.num_layers * sizes.kv_block_bytes)]


def _workspace_bytes(
    model: DecoderConfig, num_positions: int, dtype: str, back_end: str, limits: tuple[int, int]
) -> int:
    """With rotary tables of so many rows; ``limits``: most tokens and most sampled rows of a step."""
    model = replace(model, max_model_len=num_positions)
    keeps_rows = kind_of(back_end).keeps_rows
    return plan_workspace(model, resolve_dtype(dtype, model), *limits, keeps_rows=keeps_rows).num_bytes


def _position_room(
    config: EngineConfig, model: DecoderConfig, shape: ModelShape, dtype: str, back_end: str, max_num_tokens: int
) -> PositionRoom:
    block_size = config.memory.block_size
    return PositionRoom(
        num_instances=config.most_instances,
        parameter_bytes=shape.parameter_bytes,
        fixed_bytes=_workspace_bytes(model, 0, dtype, back_end, (max_num_tokens, config.scheduler.max_num_seqs)),
        row_bytes=position_bytes(model, resolve_dtype(dtype, model)),
        kv_block_bytes=shape.num_layers * shape.block_bytes_per_layer(block_size),
        block_size=block_size,
        context=model.max_model_len,
    )


def _path_for(config: EngineConfig, path: str) -> str:
    """The path for workers: of those that Ray places, none has this process's working directory."""
    return path if config.hosts.launcher == "local" else os.path.abspath(path)


def _check_step_size(limits: SchedulerLimits, num_positions: int) -> None:
    """A step is one control message: what the configuration decides of its size must fit. Raises ConfigError.

    ``num_positions``: what memory holds of the context for one request, which bounds its block table.
    """
    max_blocks = -(-num_positions // limits.block_size)
    num_bytes = fixed_step_bytes(limits.max_num_batched_tokens, limits.max_num_seqs, max_blocks)
    if num_bytes > MAX_FIXED_BYTES:
        raise ConfigError(
            f"a step could need {num_bytes} bytes, more than the {MAX_FIXED_BYTES} that are sent at once: lower "
            "--max-num-seqs, --max-model-len or --max-num-batched-tokens, or raise --block-size")
