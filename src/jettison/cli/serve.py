"""``jettison serve``: run the engine and its HTTP server until told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jettison.cli.flags import resolve_config, with_config_flags
from jettison.live.machine.address_space import check_address_limit


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
    from jettison.server.launch import serve as run_server

    with resolved.placed():
        code = run_server(resolved)
    raise typer.Exit(code)
