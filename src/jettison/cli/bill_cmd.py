"""``jettison bill``: the devices that a run had, and those that its requests would have needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jettison.errors import UserError

if TYPE_CHECKING:
    from jettison.report.bill import Bill


def bill(
    run_file: Annotated[Path, typer.Argument(metavar="RUN", help="Result file (`bench`, `demo`, `simulate` --json).")],
    name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Which run of the file (default: all).")
    ] = None,
    policies: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Packings, separated by commas (default: all).")
    ] = None,
    capacity_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of KV that a device holds (default: as in the run)."),
    ] = None,
    epoch_s: Annotated[
        float, typer.Option("--epoch-s", min=0.001, metavar="SECONDS", help="Time between two plans.")
    ] = 1.0,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write all of it as JSON.")
    ] = None,
    plot_out: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw devices over time: a .svg or .png for each run.")
    ] = None,
) -> None:
    """Show the devices that a run had, and how many its requests would have needed under each packing.

    The recorded requests are placed anew, on devices of the run's own KV capacity, as
    many as it takes; beside them stands the least that would do, exact where it is
    small, else a bound.
    """
    from rich.console import Console

    from jettison.report.bill import BillOptions, bill_document, bill_of, print_bill
    from jettison.report.output import check_writable, write_whole
    from jettison.report.results import read_results

    if plot_out is not None and plot_out.suffix not in (".svg", ".png"):
        raise UserError(f"--plot {plot_out}: its name has to end in .svg or .png")
    for out in filter(None, (json_out, plot_out)):
        check_writable(out)
    named = {} if policies is None else {"policies": tuple(policies.split(","))}
    options = BillOptions(capacity_tokens=capacity_tokens, epoch_s=epoch_s, **named)
    runs = read_results(run_file)
    if not runs:
        raise UserError(f"{run_file} holds no run")
    chosen = [run for run in runs if name is None or run.name == name]
    if not chosen:
        raise UserError(f"{run_file}: no run named {name!r} (runs: {', '.join(run.name for run in runs)})")
    bills = []
    for run in chosen:
        try:
            bills.append(bill_of(run, options))
        except UserError as error:
            raise UserError(f"{run_file}: {error}") from None
    # Files first: a reader of the words may be gone.
    if json_out is not None:
        documents = [bill_document(each) for each in bills]
        write_whole(json_out, json.dumps({"runs": documents}, indent=1, sort_keys=True) + "\n")
    if plot_out is not None:
        _draw(bills, plot_out)
    for each in bills:
        print_bill(each, Console())


def _draw(bills: list[Bill], plot_out: Path) -> None:
    """One file, or one a run with its name in the file's."""
    from jettison.report.output import safe_name
    from jettison.report.plots import draw_bill, to_png, to_svg

    for each in bills:
        named = plot_out.with_name(f"{plot_out.stem}-{safe_name(each.run)}{plot_out.suffix}")
        path = plot_out if len(bills) == 1 else named
        path.write_bytes((to_png if path.suffix == ".png" else to_svg)(draw_bill(each)))
