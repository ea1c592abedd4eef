"""``jettison validate``: one spec, live twice and simulated."""

from __future__ import annotations

from typing import Annotated

import typer

from jettison.cli.simulate_cmd import JsonOption, SeedsOption, SetOption, SpecArgument, naming, read_spec
from jettison.live.machine.address_space import MORE_PROGRAM_BYTES, check_address_limit


def validate(
    spec: SpecArgument,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure the profile anew, also where it is there.")
    ] = False,
    assignments: SetOption = None,
    seeds: SeedsOption = None,
    json_out: JsonOption = None,
) -> None:
    """Run a spec live on this machine, twice, and simulated with the steps that the live run recorded, and compare.

    The cluster must be a model folder. A missing profile is measured first. The
    exit code says whether it ran: how near the simulation is, and how near the
    second live run, stands in the table and the result.
    """
    raw = read_spec(spec, assignments, seeds)
    check_address_limit(MORE_PROGRAM_BYTES)
    from jettison.simulate.validate_command import validate_command

    with naming(spec):
        validate_command(raw, str(raw.get("name") or spec.stem), spec.parent, json_out=json_out, calibrates=calibrate)
