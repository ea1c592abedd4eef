"""``jettison serve``: run the engine and its HTTP server until told to stop."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jettison.cli.flags import resolve_config, with_config_flags
from jettison.config import EngineConfig
from jettison.live.machine.address_space import check_address_limit
from jettison.live.machine.garbage import imports_that_stay

if TYPE_CHECKING:
    from jettison.server.parent.line import ParentLine


@with_config_flags
def serve(
    model_dir: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL_DIR", help="Model folder (Hugging Face layout), or ORG/NAME in the hub's cache."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="YAML file with the same keys; a flag beats it.")
    ] = None,
    **flags: Any,
) -> None:
    """Serve a model over HTTP, with OpenAI's API. A line of `vllm serve` can be pasted (docs/from-vllm.md).

    --memory is a hard limit for each instance: parameters, KV cache, workspace.
    With two instances or more, an overload of KV memory makes them drop layers
    that the others hold and run as one pipeline until the wave has passed.
    """
    resolved = resolve_config(model_dir, config, flags)
    check_address_limit()

    with resolved.placed():
        code = _run(resolved)
    raise typer.Exit(code)


def _fork_server_beside(config: EngineConfig) -> AbstractContextManager[None]:
    """One that imports torch while this process imports the rest, where workers will be forked on this host: not for a
    folder without a model, which ends the start before that."""
    if config.hosts.launcher != "local" or not (Path(config.model.model) / "config.json").is_file():
        return nullcontext()
    from jettison.live.host.keeper import fork_server_begun
    from jettison.server.descriptors import WANTED, raise_descriptor_limit

    raise_descriptor_limit(WANTED)  # workers have the limit that what they are forked from began with
    return fork_server_begun(config.threads_of_a_worker)


def _run(config: EngineConfig) -> int:
    """The server; with front ends its parent, and in processes that are forked from it a controller."""

    def controller(line: ParentLine | None) -> int:
        with imports_that_stay():
            from jettison.server.launch import serve as run_server

        return run_server(config, line)

    def prepare() -> None:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # what is forked from has one thread
        with imports_that_stay():
            import jettison.server.launch  # noqa: F401 - with all that a controller imports

    from jettison.live.machine.process_name import CONTROLLER, PARENT, name_process

    name_process(PARENT if config.api_servers else CONTROLLER)
    if not config.api_servers:
        with _fork_server_beside(config):
            return controller(None)
    from jettison.server.parent.process import Parent
    from jettison.server.quiet_log import install_log

    install_log(str(config.log_level))
    server = config.server
    return Parent(
        controller, config.api_servers, server.host, server.port, config.faults.orphan_timeout_s,
        prepare=prepare, spans_hosts=config.hosts.launcher != "local",
    ).run()
