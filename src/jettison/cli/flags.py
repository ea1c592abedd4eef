"""Flags made from ``jettison.config.KEYS``, or from fields of a dataclass, so that flags, file keys and fields cannot
drift apart.

Flags of keys carry text; ``EngineConfig.resolve`` parses it, so a wrong value gets the same message wherever it stood.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import typer

from jettison.cli.pasted import read_file_of_flags, said_notes
from jettison.config import KEYS, EngineConfig, Key
from jettison.config.cards import visible_cards
from jettison.config.vllm.translate import note_of
from jettison.workload.options import Flag

_PANELS = {
    "model": "Model",
    "devices": "Devices",
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
    "connections": "Connections",
    "tls": "HTTPS",
    "console": "Console",
    "traces": "Traces",
    "hosts": "Hosts",
    "scale": "Instances that come and go",
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


def with_option_flags(options: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put, in place of a command's ``options``, an option for each field of this dataclass that is a
    ``workload.options.flag``; those without a panel come first."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature, hints = inspect.signature(command, eval_str=True), get_type_hints(options)
        own = [p for p in signature.parameters.values() if p.name != "options"]
        told = [f for f in fields(options) if "flag" in f.metadata]
        told.sort(key=lambda f: f.metadata["flag"].panel is not None)
        added = [_option(f, hints[f.name]) for f in told]
        at = list(signature.parameters).index("options")

        def wrapper(**values: Any) -> Any:
            own_values = {p.name: values.pop(p.name) for p in own}
            return command(options=options(**values), **own_values)

        wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
        parameters = [*own[:at], *added, *own[at:]]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        vars(wrapper)["__signature__"] = signature.replace(parameters=parameters)
        return wrapper

    return decorate


def _option(each: Field[Any], hint: Any) -> inspect.Parameter:
    told: Flag = each.metadata["flag"]
    option = typer.Option(
        each.default, *([told.told] if told.told else []), help=told.text, metavar=told.metavar, min=told.least,
        max=told.most, rich_help_panel=told.panel,
    )
    return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=hint)


def resolve_config(
    model_dir: Path | None, file: Path | None, flags: dict[str, Any], *, needs_model: bool = True
) -> EngineConfig:
    """Flags over the environment over the file over the defaults. Raises ConfigError.

    The file may have keys of vLLM, as may a line that ``jettison.cli.pasted`` has read; what of both is without effect
    is in the configuration's ``notes``.
    """
    if model_dir is not None:
        flags = {"model": str(model_dir), **flags}
    notes, from_file = said_notes(), None
    if file is not None:
        from_file, found = read_file_of_flags(file)
        found.check()
        notes.include(found.notes)
    place_in_file = None if from_file is None else from_file.place_of
    config = EngineConfig.resolve(
        file=from_file, place_in_file=place_in_file, environ=os.environ, look_for_cards=visible_cards,
        needs_model=needs_model, **flags
    )
    return replace(config, notes=(*note_of(notes), *config.notes))


def tell_notes(config: EngineConfig) -> None:
    """On stderr, of a command that keeps no log: what has another effect than was said, or none."""
    for note in config.notes:
        typer.echo(note, err=True)
