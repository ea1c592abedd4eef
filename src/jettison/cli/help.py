"""Help pages in plain text: sections as the options' panels, and every flag and choice in full at any width.

Typer's own pages put everything into boxes and cut off what does not fit; a flag that is cut off cannot be typed.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

DESCRIPTION_COLUMN = 30
"""A flag that is longer has a line of its own."""


class Command(TyperCommand):
    """A command whose help page lists options by panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class Group(TyperGroup):
    """A group of commands with the same kind of page."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, found.get_short_help_str(limit=1000)) for name, found in named if found is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            is_argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
            sections.setdefault(panel, []).append(record)
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl(records, col_max=DESCRIPTION_COLUMN)
