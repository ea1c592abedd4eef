"""Commands that take vLLM's flags beside their own, so that a line of ``vllm serve`` can be pasted.

``jettison.config.vllm`` knows the flags; here the words of a command and the keys of its ``--config`` file meet it, so
that all that does not fit is told in one line.
"""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Any

from jettison.cli.help import Command
from jettison.config import KEYS
from jettison.config.files import YamlMapping, read_yaml_mapping
from jettison.config.vllm.translate import Reasons, Translation, translate_line, translate_values
from jettison.errors import ConfigError

_NOTES: ContextVar[Reasons | None] = ContextVar("notes", default=None)


class PastedCommand(Command):
    """A command whose words are translated before they are parsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        options, num_places = _options_of(self, ctx)
        found = translate_line(args, options, num_places)
        refusals = found.refusals
        path = next((word.partition("=")[2] for word in found.line if word.startswith("--config=")), None)
        if path is not None:
            refusals.include(read_file_of_flags(Path(path))[1].refusals)
        if refusals:
            raise ConfigError(f"{refusals}; see {ctx.command_path} --help")
        _NOTES.set(found.notes)
        parsed: list[str] = super().parse_args(ctx, found.line)
        return parsed


def _options_of(command: Any, ctx: Any) -> tuple[dict[str, bool], int]:
    """Every option of a command, with whether it takes a value; and the number of its arguments."""
    options: dict[str, bool] = {}
    num_places = 0
    for parameter in command.get_params(ctx):
        if parameter.param_type_name == "argument":
            num_places += 1
            continue
        takes_value = not (parameter.is_flag or getattr(parameter, "count", False))
        options |= dict.fromkeys((*parameter.opts, *parameter.secondary_opts), takes_value)
    return options, num_places


def read_file_of_flags(path: Path) -> tuple[YamlMapping, Translation]:
    """A configuration file in our keys; and what was said of vLLM's keys in it. Raises ConfigError where it cannot be
    read."""
    written = read_yaml_mapping(path)
    found = translate_values(written, KEYS, written.place_of)
    return written.replaced(found.values, found.origins), found


def said_notes() -> Reasons:
    """What the words of this command have without effect, to be told once; empty for commands that are not pasted."""
    told = _NOTES.get()
    _NOTES.set(None)
    return told if told is not None else Reasons()
