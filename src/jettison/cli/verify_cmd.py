"""``jettison verify``: show that output does not depend on what memory did meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jettison.config.hubcache import model_folder
from jettison.live.machine.address_space import MORE_PROGRAM_BYTES, check_address_limit


def verify(
    model_dir: Annotated[
        Path | None, typer.Argument(metavar="MODEL_DIR", help="Model folder (default: a small model made for it).")
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Precision; tokens are promised equal in float64 only.")
    ] = "float64",
    max_model_len: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Context that is served; a sliding window must not be shorter."),
    ] = None,
    kernels: Annotated[
        str, typer.Option(metavar="KERNELS", help="As in `jettison serve`: auto, native, native+torch-linear, torch.")
    ] = "auto",
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="As in `jettison serve`; all instances on the first card.")
    ] = "cpu",
    alone: Annotated[
        bool, typer.Option("--alone", help="Compare with each request alone, by the same kernels.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Also three and four instances, and workers killed in every phase of a move.")
    ] = False,
) -> None:
    """Serve the same requests with and without drops and restores, and compare the tokens."""
    from jettison.report.output import check_writable

    if json_out is not None:
        check_writable(json_out)  # better told now than after minutes of work
    check_address_limit(MORE_PROGRAM_BYTES)
    from jettison.live.machine.endings import ended_by_sigterm
    from jettison.live.verify.run import run_verify

    if model_dir is not None:
        model_dir = Path(model_folder(str(model_dir)))
    with ended_by_sigterm():
        code = run_verify(
            model_dir, json_out, dtype, full=full, max_model_len=max_model_len, kernels=kernels, alone=alone,
            device=device,
        )
    raise typer.Exit(code)
