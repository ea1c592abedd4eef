"""The keys: each is declared once, beside its field, in the section that it belongs to.

A default, a parser and a help text make a key; flags, YAML file and `jettison config show` follow from them.
``jettison.config.engine`` computes the values that depend on several keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from jettison.config.offline import offline_mode
from jettison.config.rungs import overload_list
from jettison.config.values import (
    Choice,
    Parser,
    Switch,
    count_from,
    float_from,
    int_from,
    json_object,
    machine_list,
    nonempty,
    nonempty_list,
    or_none,
    path_prefix,
    size_from,
    switches,
    truth,
)

Lookahead = Literal["on", "off"]
StepAhead = Literal["auto", "on", "off"]
OfflineSlices = Literal["auto", "on", "off"]
OfflineFill = Literal["knee", "objective", "paper"]
SchedulingPolicy = Literal["fcfs", "priority"]
StepPriority = Literal["decode", "prefill"]
Dispatch = Literal["freest", "fewest-requests"]
Planner = Literal["throughput", "memory"]
DropTrigger = Literal["forecast", "pressure"]
Migration = Literal["kv", "tokens", "adaptive"]
MigrationFit = Literal["soonest", "first-fit", "best-fit"]
Gathering = Literal["settle", "close"]
Saving = Literal["asleep", "idle"]
Packer = Literal["none", "mell", "best-fit", "worst-fit", "load-balance"]
Exchange = Literal["auto", "transfer", "recompute", "live"]
ContentFormat = Literal["auto", "string", "openai"]
Sleep = Literal["never", "auto"]
LogLevel = Literal["debug", "info", "warning", "error"]

API_KEY_VARIABLES = ("JETTISON_API_KEY", "VLLM_API_KEY")
"""Where a key may stand in the environment: the first that is set counts. The second is vLLM's, so that a server that
comes from there stays closed."""
SECRET_KEYS = ("api_key", "admin_key")
"""Keys with secret values, which are never shown."""
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_TOKEN_BUDGET = 512
DEFAULT_MEMORY_BYTES = 1 << 30
DEFAULT_PAGE_BYTES = 64 << 10


def all_or_int(value: object) -> int | None:
    """A whole number, or None for -1, which means all in vLLM."""
    number = int_from(-1)(value)
    return None if number == -1 else int(str(number))


def config_key(
    default: object,
    parse: Parser,
    text: str,
    *,
    name: str | None = None,
    metavar: str = "",
    unset: str | None = None,
    bare: object = None,
) -> Any:
    """A dataclass field that is a key. ``parse`` parses and checks its value; ``name`` is the key's name where that
    lacks the field's unit; ``unset`` is the word for None. A key that ``resolve`` computes has the default None, while
    the field's own default is ``bare``.
    """
    metadata = {
        "name": name, "default": default, "text": text, "unset": unset,
        "metavar": metavar or ("|".join(parse.words) if isinstance(parse, Choice) else "TEXT"),
        "parse": parse if unset is None else or_none(parse, unset),
    }
    return field(default=default if bare is None else bare, repr=name not in SECRET_KEYS, metadata=metadata)


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """A worker's memory: a hard limit that holds parameters, KV cache and workspace."""

    memory_bytes: int = config_key(
        None, size_from(1 << 16), "Memory of each instance (auto: 1GiB; on a card what --gpu-memory-utilization "
        "leaves).", name="memory", metavar="SIZE", unset="auto", bare=DEFAULT_MEMORY_BYTES)
    gpu_memory_utilization: float | None = config_key(
        None, float_from(0.01, 1.0), "On a card, instead of --memory: the part of its memory that all instances on it "
        "may use together; what other processes use at the start is taken off (auto: 0.9).",
        metavar="FRACTION", unset="auto")
    page_bytes: int | None = config_key(
        None, size_from(4096, multiple=True), "Unit in which memory moves between parameters and KV cache (auto: "
        "64KiB; on a card the multiple of 2MiB that loses the least KV).",
        name="page_size", metavar="SIZE", unset="auto", bare=DEFAULT_PAGE_BYTES)
    """None on a card: chosen by the model's shape where an engine is assembled."""
    block_size: int = config_key(16, int_from(1, 1024), "Tokens of one KV-cache block.", metavar="N")
    host_memory_bytes: int = config_key(
        None, size_from(0), "Host memory of each instance for KV (auto: as --memory, with cards at most 4GiB, where "
        "--overload has swap or --offline checkpoints, else none).",
        name="host_memory", metavar="SIZE", unset="auto", bare=1 << 30)
    enable_prefix_caching: bool = config_key(
        True, truth, "Reuse the KV cache of equal prompt prefixes.", metavar="BOOL")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The size of steps, and the admission of requests."""

    max_num_seqs: int = config_key(
        None, int_from(1),
        f"Most requests running on one instance; a merged group runs as many for each of its instances (auto: "
        f"{DEFAULT_MAX_NUM_SEQS}, or the token budget where that is less).",
        metavar="N", unset="auto", bare=DEFAULT_MAX_NUM_SEQS)
    max_num_batched_tokens: int = config_key(
        None, count_from(1), "Token budget of one step, also as 8k (auto: 512, or --max-num-seqs where that is more).",
        metavar="N", unset="auto", bare=DEFAULT_TOKEN_BUDGET)
    admission_watermark: float = config_key(
        0.01, float_from(0.0, 0.9), "Part of the blocks kept free when a request is admitted.", metavar="FRACTION")
    scheduling_policy: SchedulingPolicy = config_key(
        "fcfs", Choice(SchedulingPolicy), "Whose waiting requests are served first. fcfs: those of the key that "
        "was served least, and a request's priority counts among its own key's only; priority: it counts against all "
        "others' (any client may send any priority).")
    step_priority: StepPriority = config_key(
        "decode", Choice(StepPriority), "Who gets a step's token budget first. decode: a long prompt holds up no "
        "answer; prefill: first tokens come sooner, answers stand still while prompts fill the budget. Pipelines that "
        "look ahead mix both by cost, whatever is said here.")
    lookahead: Lookahead = config_key(
        "on", Switch(Lookahead), "In a pipeline, form microbatches of equal predicted time from all queued "
        "tokens. Only where --overload has drop: baselines form theirs by token counts, whatever is said here.")
    lookahead_min_tokens: int | None = config_key(
        None, int_from(1), "Fewest prompt tokens of such a microbatch (auto: 16; their number follows from costs).",
        metavar="N", unset="auto")
    step_ahead: StepAhead = config_key(
        "auto", Switch(StepAhead), "Plan an instance's next step while one is computed, so that its device never waits "
        "for the plan; a request that comes then waits for one step more (auto: off on CPUs).")
    max_num_queued_reqs: int | None = config_key(
        1000, int_from(1), "Waiting requests beyond which a client is told 429 (none: no limit).",
        metavar="N", unset="none")


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """Overload: when KV memory counts as the bottleneck, and how the engine responds."""

    policy: str = config_key(
        "drop", overload_list,
        "Out of KV memory: drop replicated layers and merge instances (drop), or a baseline: preempt and recompute, "
        "swap to the host, migrate between instances, static pipelines of two, an odd instance alone "
        "(docs/policies.md). Several together with +, as swap+migrate+drop.", name="overload", metavar="RUNGS")
    planner: Planner = config_key(
        "throughput", Choice(Planner),
        "How far a drop merges: as little as frees enough memory, or until the KV cache has doubled.")
    trigger: DropTrigger = config_key(
        "forecast", Choice(DropTrigger),
        "When a group whose queue memory keeps out drops. forecast: where its requests wait and last shorter for it; "
        "pressure: always, and it is restored once usage is below --restore-threshold (KunServe's own).",
        name="overload_trigger")
    min_wait_ms: int = config_key(
        50, int_from(0), "How long memory must have kept the head of the queue out before it counts as overload.",
        name="overload_min_wait_ms", metavar="MS")
    check_interval_ms: int = config_key(
        100, int_from(1), "How often the monitor looks besides after each step.",
        name="overload_check_interval_ms", metavar="MS")
    horizon_ms: int = config_key(
        0, int_from(0), "How far ahead memory is foreseen to run out (1000 is the paper's); 0: only what waits counts.",
        name="overload_horizon_ms", metavar="MS")
    dispatch: Dispatch = config_key(
        "freest", Choice(Dispatch), "Which instance or pipeline gets a new request. freest: of those with the fewest "
        "prompts ahead the one with the most free memory for each request; fewest-requests: the one with the fewest "
        "unfinished requests for each of its instances, as a proxy before several engines does (for baselines).")
    rebalance: bool = config_key(
        True, truth, "Requests that a full batch or full memory keeps waiting go to groups with room for them; with "
        "--dispatch fewest-requests only where this is said.",
        metavar="BOOL")
    restore_threshold: float = config_key(
        0.5, float_from(0.0, 1.0),
        "With --overload-trigger pressure: usage, as a part of the undropped KV capacity, below which layers are "
        "restored. 0: never, whatever the trigger.",
        metavar="FRACTION")
    drop_dwell_ms: int = config_key(
        500, int_from(0), "Least time between the end of any move of an instance, a death beside "
        "it or its return, and its next drop; doubled by every move in a row that fails, up to 128 times as long.",
        metavar="MS")
    restore_dwell_ms: int = config_key(
        2000, int_from(0), "Least time between a finished drop and its restore.", metavar="MS")
    swap_budget_blocks: int | None = config_key(
        None, int_from(1), "swap: blocks that a step may carry, in and out (auto: a quarter of its time).",
        metavar="N", unset="auto")
    migrate_threshold: float = config_key(
        3.0, float_from(0.0), "migrate: free blocks a request below which an instance gives, above which it takes.",
        metavar="BLOCKS")
    migrate_period_ms: int = config_key(50, int_from(1), "migrate: how often instances are compared.", metavar="MS")
    migration_kind: Migration = config_key(
        "kv", Choice(Migration), "migrate: how running requests change instances. kv: their KV is copied; tokens: the "
        "destination computes it from their tokens, while they go on decoding where they are; "
        "adaptive: each in the way that is done first without disturbing who decodes beside it.")
    migration_step_tokens: int | None = config_key(
        None, int_from(1), "migrate, as tokens: how many of them go into one step of the destination at most "
        "(auto: what its steps have room for).",
        metavar="N", unset="auto")
    migration_stop_ms: int = config_key(
        200, int_from(1), "migrate, adaptive: how long a request may stand still while its last blocks travel, 16 at "
        "most; where a link carries not even one in that time, requests go as tokens.", metavar="MS")
    migration_fit: MigrationFit = config_key(
        "soonest", Choice(MigrationFit), "adaptive, also of packing: which way a move takes where links and its "
        "destination both have room. soonest: that in which it is done first; first-fit: as KV; best-fit: that whose "
        "bounds it fills up most (the last two are MELL's).")
    machines: tuple[int, ...] = config_key(
        (), machine_list, "The machine of each instance, in order (0,0,1,1): those of one machine share its network "
        "card, and migrations are divided by that (auto: as workers were placed; else one machine has all).",
        metavar="N,N", unset="auto")
    exchange: Exchange = config_key(
        "auto", Choice(Exchange),
        "Running requests after a drop: send their KV, compute it again, attend to it remotely while it moves (live), "
        "or (auto) what is predicted to cost each of them least.")
    exchange_piece_bytes: int | None = config_key(
        None, size_from(4096),
        "Bulk transfers are cut into pieces of this size; activations go in between (auto: over TCP what the "
        "link carries in one stage's time; where workers share memory 1 MiB, on cards 8 MiB).", metavar="SIZE",
        unset="auto")
    coordinate_links: bool = config_key(
        True, truth, "Bulk transfers are cut up and yield to activations; no: for experiments only.", metavar="BOOL",
        name="coordination")


@dataclass(frozen=True, slots=True)
class OfflineConfig:
    """Offline requests (batches, service_tier flex) beside online ones."""

    mode: str = config_key(
        "harvest", offline_mode,
        "Offline requests: fill what online ones leave without touching their latency (harvest), be served behind "
        "online ones by priority alone (priority), or be refused (none). Parts of harvesting by themselves: scheduler, "
        "scheduler+checkpoint (docs/batches.md).", name="offline", metavar="MODE")
    slo_ttft_ms: float | None = config_key(
        None, float_from(0.001), "Time to the first token that offline work must leave to online requests (auto: 14 "
        "times the next). Named, it has drops, restores and wakes weigh first tokens against slower words by both.",
        metavar="MS", unset="auto")
    slo_tpot_ms: float | None = config_key(
        None, float_from(0.001), "Time between two tokens of an online request that offline work must leave to it "
        "(auto: 9 times the decode step of one request).", metavar="MS", unset="auto")
    fill: OfflineFill = config_key(
        "knee", Choice(OfflineFill), "How long a step with online requests may become by offline work. knee: as long "
        "as more tokens bring more tokens a second for it; objective: --slo-tpot-ms; paper: that, or --slo-ttft-ms "
        "where no request decodes (ConServe's own, for comparison).", name="offline_fill")
    fill_after_eviction: bool = config_key(
        False, truth, "Fill a step that has just evicted offline requests.", metavar="BOOL")
    safepoint_layers: int | None = config_key(
        None, int_from(1), "Layers after which a step may shed its offline part (auto: 1) or, without "
        "--offline-slices, one of offline requests alone may be abandoned (auto: as many as take a tenth of "
        "--slo-ttft-ms, at most half of the model).", metavar="N", unset="auto")
    slices: OfflineSlices = config_key(
        "auto", Switch(OfflineSlices), "When an online request comes, have the offline part of a step stop at the next "
        "safepoint and go on later from where it was; off: a step of offline requests alone may be abandoned, one of "
        "both kinds runs to its end (auto: on where rows do not depend on the batch, off on cards).",
        name="offline_slices")
    checkpoint_free: float = config_key(
        0.5, float_from(0.0, 1.0), "Part of the KV blocks that is free when KV of offline requests begins to be copied "
        "to host memory.", metavar="FRACTION")


@dataclass(frozen=True, slots=True)
class PackingConfig:
    """Packing: online requests are kept together on few instances, so that the others may sleep."""

    policy: Packer = config_key(
        "none", Choice(Packer), "Keep online requests on the fewest instances that hold them, and move running ones "
        "for that (mell); or a baseline: where least memory is free (best-fit), most "
        "(worst-fit), or that with moves from the fullest to the emptiest (load-balance) (docs/policies.md).",
        name="packing")
    epoch_s: float = config_key(
        1.0, float_from(0.01), "packing: how often it is planned.", name="packing_epoch_s", metavar="SECONDS")
    head_room: float | None = config_key(
        None, float_from(0.0, 0.9), "packing: part of each instance's KV memory that is left free (auto: for what "
        "arrives within the objective for first tokens, 5 to 25 %).",
        name="packing_head_room", metavar="FRACTION", unset="auto")
    moves: Migration = config_key(
        "adaptive", Choice(Migration), "packing: how running requests change instances. kv: their KV is copied; "
        "tokens: the destination computes it from their tokens; adaptive: each in the way that is done first without "
        "disturbing who decodes beside it.", name="packing_moves")
    fill: float = config_key(
        0.75, float_from(0.75, 1.0), "packing mell: part of its memory below which an instance takes requests from "
        "others. 0.75 is MELL's; more means fewer instances and more moves.",
        name="packing_fill", metavar="FRACTION")
    gather: Gathering = config_key(
        "settle", Choice(Gathering), "packing mell: what running requests move for, besides an instance that "
        "overflows. settle: to be on the fewest instances after every epoch; close: only to empty an instance, looked "
        "for every five epochs (a quarter to a third fewer moves).", name="packing_gather")
    saves: Saving = config_key(
        "asleep", Choice(Saving), "packing: which emptied instances pay for moves. asleep: those that fall asleep "
        "(--sleep auto, above --min-awake); idle: all, as in MELL, where idle ones are given back.",
        name="packing_saves")
    weight_load: float = config_key(
        1.0, float_from(0.0), "packing: what it counts that an instance has few requests, where several have room.",
        name="packing_weight_load", metavar="WEIGHT")
    weight_free: float = config_key(
        1.0, float_from(0.0), "packing: what it counts that much of its memory is free.",
        name="packing_weight_free", metavar="WEIGHT")
    weight_distance: float = config_key(
        1.0, float_from(0.0), "packing: what it counts that it is on the machine where the request is.",
        name="packing_weight_distance", metavar="WEIGHT")


@dataclass(frozen=True, slots=True)
class FaultsConfig:
    """Faults: when a worker counts as dead, and how the engine responds."""

    worker_heartbeat_timeout_s: float = config_key(
        1.5, float_from(0.0), "A worker silent for so long counts as hung and is replaced (0: never).",
        name="worker_heartbeat_timeout", metavar="SECONDS")
    worker_step_timeout_s: float = config_key(
        300.0, float_from(0.0), "A worker in one step, layout or load for so long counts as hung (0: never).",
        name="worker_step_timeout", metavar="SECONDS")
    max_worker_restarts: int = config_key(
        5, int_from(0), "A worker that dies more often than this in five minutes stays down.", metavar="N")
    outage_timeout_s: float = config_key(
        60.0, float_from(0.0), "How long accepted requests wait when no worker lives; then they end with an error.",
        name="outage_timeout", metavar="SECONDS")
    orphan_timeout_s: float = config_key(
        60.0, float_from(0.0), "With front ends: how long they and their streams wait for another controller when "
        "theirs has died or hangs (0: they end with it). As long as --outage-timeout: to a client it is the same wait.",
        name="orphan_timeout", metavar="SECONDS")


@dataclass(frozen=True, slots=True)
class SleepConfig:
    """Sleep: how many instances are awake, unless an operator asks for fewer (``POST /sleep``)."""

    mode: Sleep = config_key(
        "never", Choice(Sleep), "Instances that no online request uses fall asleep by themselves (auto), as long as "
        "nothing waits, or only when they are told to (never). Either way they are woken where memory, a death or "
        "prompts ahead press.", name="sleep")
    after_s: float = config_key(
        30.0, float_from(0.0), "How long no online request must have used an instance before it falls asleep.",
        name="sleep_after_s", metavar="SECONDS")

    min_awake: int = config_key(
        2, int_from(1, 1024), "Instances that stay awake however little there is to do; all where there are fewer. "
        "Where instances come and go it is --min-instances, unless it is said.",
        metavar="N")
    max_awake: int | None = config_key(
        None, int_from(1, 1024), "Instances that may be awake at one time (all: as many as there are).", metavar="N",
        unset="all")
    device_second: float = config_key(
        1.0, float_from(0.0), "Price of a second in which an instance is awake, in any unit of money.",
        name="price_device_second", metavar="PRICE")
    batch_token: float = config_key(
        0.0, float_from(0.0), "Price that a token of an offline request brings, in that unit: instances stay awake and "
        "are woken for offline work that is worth more than their seconds (0: for none without a deadline).",
        name="price_batch_token", metavar="PRICE")
    batch_floor: float = config_key(
        0.0, float_from(0.0), "Tokens a second of offline requests that instances stay awake and are woken for, "
        "whatever that costs (0: none).", metavar="TOKENS")

    def why_none_sleeps(self, instances: int) -> str | None:
        """A warning for the operator: ``--sleep auto`` is set, but none of ``instances`` may ever sleep. None: some
        may."""
        if self.mode != "auto" or self.min_awake < instances:
            return None
        return f"--sleep auto puts no instance to sleep: --min-awake {self.min_awake}, and {instances} instance(s)"


@dataclass(frozen=True, slots=True)
class TemplateConfig:
    """The chat template, which makes the text of a prompt of the messages of a chat."""

    chat_template: str | None = config_key(
        None, nonempty, "Chat template instead of the model folder's: a file, or the template itself.", metavar="FILE",
        unset="none")
    content_format: ContentFormat = config_key(
        "auto", Choice(ContentFormat), "How the template takes the content of messages: as texts, as lists of parts "
        "(openai), or as it is found to want it when it is tried at the start.", name="chat_template_content_format")
    default_kwargs: str = config_key(
        "{}", json_object, "Variables that the template is told, unless the request's chat_template_kwargs says "
        "otherwise: a JSON object.", name="default_chat_template_kwargs", metavar="JSON")
    trust_requests: bool = config_key(
        False, truth, "Take the chat_template of requests: they run in the sandbox, but cost what they like within its "
        "limits (docs/security.md).", name="trust_request_chat_template", metavar="BOOL")
    exclude_unused_tools: bool = config_key(
        False, truth, "Leave the tools of a request out of its prompt where its tool_choice is none.",
        name="exclude_tools_when_tool_choice_none", metavar="BOOL")
    tool_call_parser: str = config_key(
        "auto", nonempty, "Form in which the model calls tools: a name, a Python file of your own, none, or what the "
        "template shows (auto); docs/using.md lists them.", metavar="NAME")
    reasoning_parser: str = config_key(
        "auto", nonempty, "Marks of the model's thoughts: a name, none, or what the template shows (auto).",
        metavar="NAME")
    enable_auto_tool_choice: bool = config_key(
        True, truth, "Look for tool calls in answers that need not have any (tool_choice auto), as is done anyway.",
        metavar="BOOL")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP front end."""

    host: str = config_key("127.0.0.1", nonempty, "Address to listen on.", metavar="ADDRESS")
    port: int = config_key(8000, int_from(0, 65535), "Port to listen on (0: any free one).", metavar="PORT")
    api_keys: tuple[str, ...] = config_key(
        (), nonempty_list, f"Key that clients must send; may be given more than once (also: {API_KEY_VARIABLES[0]}).",
        name="api_key", metavar="KEY")
    api_key_file: str | None = config_key(
        None, nonempty, "More of them, one a line (lines that begin with # are left out); read again on SIGHUP. Unlike "
        "--api-key it shows nothing in the process list.", metavar="FILE", unset="none")
    admin_keys: tuple[str, ...] = config_key(
        (), nonempty_list, "Key for what administers the server (/sleep, /wake_up, /is_sleeping), where no other opens "
        "it; may be given more than once. Without one these are open where no key is asked for, else closed.",
        name="admin_key", metavar="KEY")
    metrics_need_key: bool = config_key(
        False, truth, "Where keys are asked for, ask for one at /metrics too (scrapers and gateways bring none).")
    root_path: str = config_key(
        "", path_prefix, "Path under which a proxy shows this server, whether it cuts it off or not.", metavar="PATH")
    max_active_reqs_per_key: int | None = config_key(
        None, int_from(1), "Choices under way (each prompt times n) beyond which a key is told 429 (none: no limit).",
        metavar="N", unset="none")
    max_stop_strings: int = config_key(
        64, int_from(1, 1024), "Stop strings that a request may have (OpenAI's number is 4).", metavar="N")
    max_logprobs: int | None = config_key(
        20, all_or_int, "Alternatives to a token that a request may ask for (-1: the whole vocabulary).",
        metavar="N", unset="-1")
    structured_outputs_config: str = config_key(
        "{}", switches("disable_any_whitespace", "disable_additional_properties"), "What holds for JSON that requests "
        "ask for, unless they say otherwise: a JSON object with disable_any_whitespace, disable_additional_properties.",
        metavar="JSON")
    record_trace: str | None = config_key(
        None, nonempty, "Record arrivals and lengths of requests, nothing else, for replay (docs/workloads.md).",
        metavar="FILE", unset="none")
    record_trace_bytes: int = config_key(
        64 << 20, size_from(1 << 16), "Most bytes of the recording, the file before it (FILE.1) included.",
        name="record_trace_size", metavar="SIZE")
    batch_dir: str | None = config_key(
        None, nonempty, "Folder for files and batches: prompts and answers lie in it; a server that is started with it "
        "again goes on where the last one was (auto: a folder of this model and port's own, docs/batches.md).",
        metavar="DIR", unset="auto")
    batch_window: int | None = config_key(
        None, int_from(1), "Choices of batches that are in the engine at one time (auto: twice --max-num-seqs for each "
        "instance).", metavar="N", unset="auto")
    batch_file_bytes: int = config_key(
        200_000_000, size_from(1024), "Largest file that may be uploaded.", name="batch_file_size", metavar="SIZE")
    batch_storage_bytes: int = config_key(
        4 << 30, size_from(1024), "Most bytes of files that one key may have, results included.",
        name="batch_storage_size", metavar="SIZE")
    shutdown_timeout_s: float = config_key(
        30.0, float_from(0.0), "Seconds that running requests get to finish after SIGTERM.",
        name="shutdown_timeout", metavar="SECONDS")
    timeline: str | None = config_key(
        None, nonempty, "Written at the end: steps, transfers, moves and requests as a time line for ui.perfetto.dev "
        "(.json or .json.gz). It names request ids, prompts never.", metavar="FILE", unset="none")


