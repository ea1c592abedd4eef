"""``jettison plan``: how small a cluster may be."""

from __future__ import annotations

from typing import Annotated

import typer

from jettison.cli.simulate_cmd import (
    HtmlOption,
    JsonOption,
    ProcessesOption,
    SeedsOption,
    SetOption,
    SpecArgument,
    naming,
    read_spec,
)
from jettison.errors import ConfigError


def plan(
    spec: SpecArgument,
    slo_ttft_p99_s: Annotated[
        float | None, typer.Option("--slo-ttft-p99", metavar="SECONDS", help="P99 of the time to the first token.")
    ] = None,
    slo_tpot_p99_s: Annotated[
        float | None, typer.Option("--slo-tpot-p99", metavar="SECONDS", help="P99 of the time per output token.")
    ] = None,
    max_instances: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="The largest cluster that is tried.")
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(min=0.0, metavar="PRICE", help="Of one GPU; shows what a day costs.")
    ] = None,
    assignments: SetOption = None,
    seeds: SeedsOption = None,
    json_out: JsonOption = None,
    html_out: HtmlOption = None,
    processes: ProcessesOption = None,
) -> None:
    """Find the smallest cluster that holds a spec's workload within an objective, for each of its variants.

    The requests stay the same, the number of instances changes. Memory, links and
    settings are varied by a `sweep` in the spec.
    """
    for flag, value in (("--slo-ttft-p99", slo_ttft_p99_s), ("--slo-tpot-p99", slo_tpot_p99_s)):
        if value is not None and not value > 0.0:
            raise ConfigError(f"{flag} needs a time above 0, not {value:g}")
    raw = read_spec(spec, assignments, seeds)
    from jettison.simulate.sizing_command import size_command

    with naming(spec):
        size_command(
            raw, str(raw.get("name") or spec.stem), spec.parent,
            slo_ttft_p99_s=slo_ttft_p99_s, slo_tpot_p99_s=slo_tpot_p99_s,
            max_instances=max_instances, price_per_gpu_hour=price_per_gpu_hour, json_out=json_out,
            html_out=html_out, num_processes=processes,
        )
