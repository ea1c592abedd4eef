"""``jettison simulate``: a spec in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from jettison.config.files import read_yaml_mapping
from jettison.errors import ConfigError, UserError

SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC", help="YAML file (docs/simulate.md).")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PLACE=VALUE", help="Change one value of the spec; may be given more than once."),
]
SeedsOption = Annotated[int | None, typer.Option("--seeds", min=1, metavar="N", help="Seeds 0 to N - 1.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots.")]
ProcessesOption = Annotated[
    int | None,
    typer.Option("--processes", min=1, metavar="N", help="Runs at one time (default: as many as cores)."),
]


def read_spec(path: Path, assignments: list[str] | None, seeds: int | None) -> dict[str, Any]:
    """The spec as it is to be run. Raises ConfigError that names the file."""
    from jettison.simulate.sweeps import apply_settings

    try:
        raw = apply_settings(read_yaml_mapping(path, "the spec"), assignments or [])
    except ConfigError as error:
        raise error if str(path) in str(error) else ConfigError(f"{path}: {error}") from None
    return raw if seeds is None else {**raw, "seeds": list(range(seeds))}


def simulate(
    spec: SpecArgument,
    assignments: SetOption = None,
    seeds: SeedsOption = None,
    json_out: JsonOption = None,
    html_out: HtmlOption = None,
    timeline_out: Annotated[
        Path | None,
        typer.Option("--timeline", metavar="FILE", help="Write a time line for ui.perfetto.dev, or one for each run."),
    ] = None,
    processes: ProcessesOption = None,
) -> None:
    """Run a spec in virtual time: its workload against its cluster, under each of its variants.

    The core and its policies are those that serve live; executor, memory and links
    are modelled. The result has the form of `jettison bench`'s.
    """
    raw = read_spec(spec, assignments, seeds)
    from jettison.simulate.command import simulate_command

    with naming(spec):
        simulate_command(
            raw, str(raw.get("name") or spec.stem), spec.parent,
            json_out=json_out, html_out=html_out, timeline_out=timeline_out, num_processes=processes,
        )


@contextmanager
def naming(spec: Path) -> Iterator[None]:
    """Errors that the caller can mend say in which file. SIGTERM ends the command's processes with it."""
    from jettison.live.machine.endings import ended_by_sigterm

    try:
        with ended_by_sigterm():
            yield
    except UserError as error:
        raise error if str(spec) in str(error) else UserError(f"{spec}: {error}") from None
