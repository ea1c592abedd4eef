"""Engine and HTTP server together, until they are told to stop. The only module that installs logging and the event
loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from jettison.config import EngineConfig
from jettison.cost.grouprate import prefill_token_s
from jettison.live.engine.assembly import Assembly
from jettison.live.engine.cards import watch_cards
from jettison.live.engine.engine import Engine
from jettison.live.engine.sleep_orders import SleepOrders
from jettison.live.experiments.server_process import ENDS_WITH_STDIN
from jettison.live.machine.garbage import settle_garbage_collector
from jettison.report.output import check_writable
from jettison.server.app import batch_service, create_app, server_state
from jettison.server.batches.settings import BatchSettings, own_folder
from jettison.server.batches.uploads import OVERHEAD_BYTES
from jettison.server.batches.window import Rates
from jettison.server.chat_renderer import template_settings
from jettison.server.console.settings import ConsoleSettings
from jettison.server.cors import CorsSettings
from jettison.server.credentials import Credentials
from jettison.server.descriptors import connection_limit
from jettison.server.fronts.beside import front_ends
from jettison.server.notify import notify
from jettison.server.parent.line import ParentLine
from jettison.server.quiet_log import install_log
from jettison.server.recorder import TraceRecorder
from jettison.server.sampling_defaults import SamplingDefaults, read_sampling_defaults
from jettison.server.serving import run_on, run_server
from jettison.server.settings import ServerSettings
from jettison.server.state import ServerState
from jettison.server.structured import JsonDefaults
from jettison.server.tokenizer import Tokenizer
from jettison.server.tracing import Traces, traces_to

logger = logging.getLogger(__name__)

HELD_SHARE = 0.2
"""Part of the time for draining for which an order to end waits for streams on their way back: a service manager gives
little more than that time."""

LAST_WORDS_S = 5.0
"""For what a controller with a bug still writes before it ends: its workers and streams wait for the next one."""

EXACT_DTYPES = frozenset({"float64"})
"""Precisions for which equal tokens are promised under all memory moves; see ``jettison verify``."""


def serve(config: EngineConfig, line: ParentLine | None = None) -> int:
    """Run until SIGTERM or SIGINT, with front ends until the parent tells; returns the exit code. Raises ModelError,
    BudgetError, ConfigError. ``line``: to the parent of a server with front ends, whose controller this is."""
    install_log(str(config.log_level))
    for note in config.notes if line is None or line.weights is None else ():
        logger.info("%s", note)
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        return runner.run(_serve(config, line))


@contextmanager
def _stopped_with_stdin(stop: asyncio.Event) -> Iterator[None]:
    """Set ``stop`` at the end of standard input, if the process that started this server asked for that."""
    if os.environ.get(ENDS_WITH_STDIN) != "1":
        yield
        return
    loop, fd = asyncio.get_running_loop(), 0

    def read() -> None:
        if not os.read(fd, 4096):
            loop.remove_reader(fd)
            stop.set()

    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)


def health_details(assembly: Assembly) -> dict[str, object]:
    """The entries of ``/health`` on tokens: whether equal tokens are promised, and the settings that runs can differ
    by.

    ``batch_independent``: no request's numbers depend on the other requests in its steps. Where it is false, these may
    change its tokens, unless equal tokens are promised all the same (``token_identity``). ``migration_kind``: how
    running requests change instances; as tokens, the destination recomputes their KV.
    """
    dtype, kind = assembly.worker_specs[0].dtype, assembly.config.overload.migration_kind
    return {
        "device": assembly.config.devices.kind, "dtype": dtype, "token_identity": dtype in EXACT_DTYPES,
        "kernels": assembly.kernels,
        "batch_independent": assembly.rows_are_independent, "overload": assembly.config.overload.policy,
        "migration_kind": kind, "migration_may_change_near_ties": kind != "kv" and dtype not in EXACT_DTYPES,
    }  # fmt: skip


def batch_settings(config: EngineConfig, assembly: Assembly) -> BatchSettings:
    """The folder of this server's files and batches, and the number of their lines in the engine at one time."""
    told = config.server.batch_dir
    own = own_folder(config.model.served_model_name, config.server.port)
    return BatchSettings(
        folder=own if told is None else Path(told),
        tokenizer_dir=Path(config.model.tokenizer_dir),
        byte_tokens=assembly.byte_tokens,
        is_made_at_once=told is not None,
        window=config.server.batch_window or 2 * config.scheduler.max_num_seqs * config.instances,
        max_file_bytes=config.server.batch_file_bytes,
        max_stored_bytes=config.server.batch_storage_bytes,
        profiled=cache(lambda: _profiled_rates(assembly)),  # read when it is first wanted
    )


def _profiled_rates(assembly: Assembly) -> Rates | None:
    """The profiled rates of an instance, in steps of the whole token budget and with the best batches of decodes."""
    profile, config = assembly.load_profile(), assembly.config
    rate = None if profile is None else profile.group_tokens_per_s(1)
    if profile is None or not rate:
        return None
    prompt_token_s = prefill_token_s(profile.cost, 1, config.scheduler.max_num_batched_tokens)
    return Rates(1.0 / prompt_token_s, rate)


def sampling_defaults(config: EngineConfig) -> SamplingDefaults:
    """The sampling defaults of a server, or of a batch without one. Raises ModelError, ConfigError."""
    model = config.model
    return read_sampling_defaults(Path(model.model), model.generation_config, model.override_generation_config)


def tell_of_turn_end(tokenizer: Tokenizer, end_tokens: Collection[int]) -> None:
    """Warn of a template whose turns end with a token that ends nothing: answers may run on behind it.

    The token is not made an end token, because some models write it and go on with another part of the same answer.
    """
    turn_end = tokenizer.turn_end()
    if turn_end is not None and turn_end not in end_tokens:
        logger.warning(
            "the chat template writes %s (%d) behind an answer, which no file of the folder names as an end token: "
            "where the model ends its turns so, add it to eos_token_id in generation_config.json",
            tokenizer.token_strings([turn_end])[0], turn_end,
        )


def _most_requests(config: EngineConfig) -> int | None:
    """Most requests that run and wait at one time; None where the queue has no bound."""
    num_queued = config.scheduler.max_num_queued_reqs
    return None if num_queued is None else num_queued + config.scheduler.max_num_seqs * config.instances


async def _start(engine: Engine, state: ServerState, served: asyncio.Event, line: ParentLine | None = None) -> None:
    await engine.start()
    if state.fronts is not None:
        state.fronts.tell()  # no client hears from `/health` what the front end that takes its requests does not know
    settle_garbage_collector()
    await served.wait()
    if line is not None:
        if not line.is_back and state.fronts is not None:
            await state.fronts.gather()  # each hands its streams in before it answers this
        line.ready(engine.weights_digest)
    _tell_manager(line, "READY=1", "STATUS=takes requests")


def _end_for_the_next(engine: Engine, line: ParentLine, keep: Callable[[], None]) -> None:
    """End this process at once where the core met a bug and another controller follows; else return.

    To workers and front ends it looks killed: they keep parameters and streams for the next one, where an orderly end
    would stop the former and fail the latter. A controller whose start has not ended does so in order: what its workers
    had kept may be why it failed, and the next starts them anew. ``keep`` writes what else would be lost; the kernel
    ends this process where the disk, or what the bug has left behind, lets it take too long."""
    if line.is_followed and engine.state == "ready":
        logger.error("the controller ends at once: workers and front ends wait for the next one")
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, LAST_WORDS_S)
            keep()
        finally:
            os._exit(1)


def _keep_records(engine: Engine, recorder: TraceRecorder | None, timeline: Path | None) -> None:
    """Write the recording's last rows, and the time line."""
    if recorder is not None:
        recorder.close()
    if engine.timeline is not None and timeline is not None:
        engine.timeline.write_or_tell(timeline, logger)


def _own_timeline(config: EngineConfig, line: ParentLine) -> Path | None:
    """Where a controller that is followed writes its own: ``line.json`` is the last one's, ``line-1.json`` the first's.
    """
    if config.server.timeline is None or line.heritage is None:
        return None
    path = Path(config.server.timeline)
    name, dot, ending = path.name.partition(".")
    return path.with_name(f"{name}-{line.heritage.epoch}{dot}{ending}")


def _tell_manager(line: ParentLine | None, *assignments: str) -> None:
    """The service manager listens to the process that it has started."""
    (notify if line is None else line.notify)(*assignments)


def _recorder(config: EngineConfig, credentials: Credentials) -> TraceRecorder | None:
    if config.server.record_trace is None:
        return None
    return TraceRecorder(
        Path(config.server.record_trace), config.server.record_trace_bytes,
        tells_tenants=credentials.keys_may_change or len(set(credentials.keys)) > 1,
    )


def _settings(
    config: EngineConfig, engine: Engine, assembly: Assembly, credentials: Credentials,
    recorder: TraceRecorder | None, traces: Traces | None,
) -> ServerSettings:
    defaults = sampling_defaults(config)
    if defaults.told is not None:
        logger.info("%s", defaults.told)
    return ServerSettings(
        model_names=config.model.served_model_names,
        api_keys=credentials.keys,
        admin_keys=config.server.admin_keys,
        keys_may_change=credentials.keys_may_change,
        metrics_need_key=config.server.metrics_need_key,
        console=ConsoleSettings(config.console.is_on, config.console.is_open, engine.records_since),
        root_path=config.server.root_path,
        cors=CorsSettings(**asdict(config.cors)),
        tls=credentials.tls.context(),
        default_seed=config.model.seed,
        sampling_defaults=defaults,
        json_defaults=JsonDefaults.of(config.server.structured_outputs_config),
        end_tokens=assembly.end_tokens,
        max_stops=config.server.max_stop_strings,
        max_logprobs=config.server.max_logprobs,
        max_active_reqs_per_key=config.server.max_active_reqs_per_key,
        idle_timeout_s=config.connections.keep_alive_timeout_s,
        write_timeout_s=config.connections.write_timeout_s,
        max_upload_bytes=config.server.batch_file_bytes + OVERHEAD_BYTES,
        max_connections=connection_limit(config.most_instances, _most_requests(config)),
        serves_offline=config.offline.mode != "none",
        templates=template_settings(config.templates),
        health_details=health_details(assembly),
        record_request=None if recorder is None else recorder.record,
        trace_request=None if traces is None else traces.note,
        event_log=engine.event_document,
        deployment=engine.deployment_document,
        card_uses=watch_cards(config, lambda: engine.snapshot().workers) if config.devices.kind == "cuda" else None,
        sleep_control=SleepOrders(engine),
    )


def _open(config: EngineConfig, recorder: TraceRecorder | None, traces: Traces | None) -> None:
    """Begin to keep and send requests. Unusable paths are reported here, before the model is loaded."""
    for each in (recorder, traces):
        if each is not None:
            each.start()
    if config.server.timeline is not None:
        check_writable(Path(config.server.timeline))


async def _close(recorder: TraceRecorder | None, traces: Traces | None, *, waits: bool) -> None:
    """End what keeps or sends requests, once no more come. Without ``waits`` for no collector of traces."""
    if recorder is not None:
        await asyncio.to_thread(recorder.close)
    if traces is not None:
        await traces.close(waits=waits)


async def _run(
    app: Starlette, config: EngineConfig, assembly: Assembly, drain: Callable[[float], Awaitable[None]],
    credentials: Credentials, stop: asyncio.Event, served: asyncio.Event, line: ParentLine | None,
) -> int:
    """Serve until a signal or ``stop``; see ``run_server``. ``served`` is set when clients can connect."""
    state, server = server_state(app), config.server
    on_hangup = partial(credentials.reload, state.keys) if credentials.keys_may_change else None
    options: dict[str, Any] = {"shutdown_timeout_s": server.shutdown_timeout_s, "on_drain": drain, "stop": stop}
    if line is None:
        return await run_server(
            app, server.host, server.port, on_started=lambda port: served.set(), on_hangup=on_hangup, **options)
    line.on_hangup = on_hangup
    fronts = front_ends(state, config, assembly.byte_tokens, line, credentials.tls, on_served=served.set)
    async with fronts as listener:
        return await run_on(app, listener, force=line.force, **options)


async def _serve(config: EngineConfig, line: ParentLine | None = None) -> int:
    """Run engine and server. HTTP is up while the model loads, so that probes are answered (503) instead of refused."""
    credentials = Credentials(config, None if line is None else line.credentials_fd)
    engine = Engine(
        config, heritage=None if line is None else line.heritage, must_serve=None if line is None else line.weights)
    assembly = engine.prepare()
    recorder = _recorder(config, credentials)
    traces = traces_to(config.traces.endpoint, engine.records_since, config.model.served_model_name)
    settings = _settings(config, engine, assembly, credentials, recorder, traces)
    tokenizer = Tokenizer.from_dir(
        config.model.tokenizer_dir, max_template_chars=settings.max_template_chars, templates=settings.templates,
        byte_tokens=assembly.byte_tokens)
    tell_of_turn_end(tokenizer, assembly.end_tokens.ids)
    app = create_app(engine, tokenizer, settings, batch_settings(config, assembly))
    logger.info("%s", server_state(app).forms.told)
    batches = batch_service(app)
    _open(config, recorder, traces)
    await batches.start()

    async def drain(timeout_s: float) -> None:
        _tell_manager(line, "STOPPING=1", "STATUS=lets running requests end")
        await batches.stop()
        await engine.drain(timeout_s)

    stop, served = asyncio.Event() if line is None else line.stop, asyncio.Event()
    if line is not None:
        line.open(HELD_SHARE * config.server.shutdown_timeout_s)
    # A supervisor restarts a process that ends; a server that answers 503 for ever helps no client.
    engine.on_failure = stop.set
    if line is not None:
        engine.on_bug = partial(
            _end_for_the_next, engine, line, partial(_keep_records, engine, recorder, _own_timeline(config, line)))
    starting = asyncio.create_task(_start(engine, server_state(app), served, line), name="jettison-start")
    starting.add_done_callback(lambda task: stop.set() if not task.cancelled() and task.exception() else None)
    code = 1
    try:
        with _stopped_with_stdin(stop):
            code = await _run(app, config, assembly, drain, credentials, stop, served, line)
    finally:
        if not starting.done():
            starting.cancel()
        try:
            await starting
        except asyncio.CancelledError:
            pass
        finally:
            failed = engine.state == "failed"
            await batches.close()
            await asyncio.to_thread(server_state(app).grammars.close)
            await engine.close()
            await _close(recorder, traces, waits=code == 0)
    return 1 if failed else code
