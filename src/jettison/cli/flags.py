"""Flags made from ``jettison.config.KEYS``, so that flags, file keys and fields cannot drift apart.

Flags carry text; ``EngineConfig.resolve`` parses it, so a wrong value gets the same message wherever it stood.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from jettison.config import KEYS, EngineConfig, Key
from jettison.config.files import read_yaml_mapping

_PANELS = {
    "model": "Model",
    "memory": "Memory",
    "scheduler": "Scheduler",
    "overload": "Overload",
    "offline": "Offline requests beside online ones",
    "packing": "Packing",
    "faults": "Faults",
    "sleep": "Sleep",
    "templates": "Chat templates",
    "server": "Server",
    "cors": "Web pages of other origins (CORS)",
    "tls": "HTTPS",
    "": "Workers",
}


def with_config_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option for each key (except the model folder, an argument) to a command that takes ``**flags``.

    Options that were not given are left out of ``flags``: what remains is what the caller really said.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [_parameter(key) for key in KEYS.values() if key.name != "model"]

    def wrapper(**values: Any) -> Any:
        own_values = {p.name: values.pop(p.name) for p in own}
        return command(**own_values, **{name: value for name, value in values.items() if value not in (None, [])})

    wrapper.__doc__ = command.__doc__
    wrapper.__name__ = command.__name__
    wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
    vars(wrapper)["__signature__"] = signature.replace(parameters=[*own, *added])
    return wrapper


def _parameter(key: Key) -> inspect.Parameter:
    declaration = f"{key.flag}/--no-{key.flag.removeprefix('--')}" if key.is_bool else key.flag
    annotation: Any = bool | None if key.is_bool else list[str] | None if key.is_repeatable else str | None
    option = typer.Option(
        None,
        declaration,
        help=f"{key.text} Default: {key.show(key.default) or 'none'}.",
        metavar=None if key.is_bool else key.metavar,
        rich_help_panel=_PANELS[key.section],
    )
    return inspect.Parameter(key.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def resolve_config(
    model_dir: Path | None, file: Path | None, flags: dict[str, Any], *, needs_model: bool = True
) -> EngineConfig:
    """Flags over the environment over the file over the defaults. Raises ConfigError."""
    if model_dir is not None:
        flags = {"model": str(model_dir), **flags}
    from_file = None if file is None else read_yaml_mapping(file)
    place_in_file = None if from_file is None else from_file.place_of
    return EngineConfig.resolve(
        file=from_file, place_in_file=place_in_file, environ=os.environ, needs_model=needs_model, **flags
    )
