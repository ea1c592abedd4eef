"""``jettison bench``: replay a trace or a synthetic workload against any OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from jettison.cli.address import server_root
from jettison.cli.flags import with_option_flags
from jettison.errors import ConfigError
from jettison.workload.options import BenchOptions


@with_option_flags(BenchOptions)
def bench(
    *, url: Annotated[str, typer.Option(metavar="URL", help="Server's root.")] = "http://127.0.0.1:8000",
    options: BenchOptions,
) -> None:
    """Replay a load as it was (open loop: no client waits for an answer before it asks) and report TTFT and TPOT.

    The exit code is 1 where requests failed or were rejected, after all is printed and
    written; --allow-failures says which part may be.
    """
    if (options.trace is None) == (options.workload is None):
        raise ConfigError("give one load: --trace FILE or --workload NAME")
    from jettison.report.failures import check_answered
    from jettison.workload.bench import run_bench

    check_answered([run_bench(server_root(url), options)], options.allow_failures)
