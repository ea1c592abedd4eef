"""The ``jettison`` command: gathers the commands and turns errors into one line and an exit code.

Exit codes: 0 done; 1 it failed; 2 the caller can mend it (a wrong flag, folder or file).
What a command does lives below; nothing here decides anything.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Sequence
from copy import copy
from typing import Any

import typer

from jettison import __version__
from jettison.cli import (
    batch_cmd,
    bench,
    bill_cmd,
    config_cmd,
    demo,
    explain_cmd,
    model,
    plan_cmd,
    profile_cmd,
    reproduce_cmd,
    serve,
    simulate_cmd,
    top_cmd,
    trace_cmd,
    validate_cmd,
    verify_cmd,
)
from jettison.cli.help import Command, Group
from jettison.cli.pasted import PastedCommand
from jettison.errors import JettisonError, UserError
from jettison.live.machine.address_space import explained

logger = logging.getLogger(__name__)

_MENDABLE = frozenset({
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EROFS,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EADDRINUSE, errno.EADDRNOTAVAIL,
})
"""What the operating system says of a path or an address that the caller could give differently."""

app = typer.Typer(
    name="jettison",
    cls=Group,
    rich_markup_mode=None,  # boxes cut long flags off; jettison.cli.help does not
    help="Serve large language models with elastic memory: under overload, drop replicated layers and keep serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # an unexpected error shows Python's own traceback, whole
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jettison {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    pass


app.command("serve", cls=PastedCommand)(serve.serve)
app.command("bench", cls=Command)(bench.bench)
app.command("top", cls=Command)(top_cmd.top)
app.add_typer(batch_cmd.app, name="batch")
app.add_typer(model.app, name="model")
app.add_typer(config_cmd.app, name="config")
app.add_typer(trace_cmd.app, name="trace")
app.command("verify", cls=Command)(verify_cmd.verify)
app.command("demo", cls=Command)(demo.demo)
app.command("profile", cls=PastedCommand)(profile_cmd.profile)
app.command("explain", cls=Command)(explain_cmd.explain)
app.command("simulate", cls=Command)(simulate_cmd.simulate)
app.command("bill", cls=Command)(bill_cmd.bill)
app.command("reproduce", cls=Command)(reproduce_cmd.reproduce)
app.command("plan", cls=Command)(plan_cmd.plan)
app.command("validate", cls=Command)(validate_cmd.validate)


@app.command("version", cls=Command)
def version() -> None:
    """Print the version."""
    typer.echo(f"jettison {__version__}")


_USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""Unknown flags, commands and missing arguments, of whichever click this typer brings or uses."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (``sys.argv`` by default) and return its exit code; never raises JettisonError or OSError."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = _with_command(words)(args=words, prog_name="jettison", standalone_mode=False)
    except _USAGE_ERROR as error:
        return _misuse(error)
    except typer.Abort:
        return _complain("aborted", 1)
    except SystemExit as leaving:  # how typer ends, well or not
        return leaving.code if isinstance(leaving.code, int) else 0
    except Exception as raised:
        told = explained(raised)
        if isinstance(told, JettisonError):
            return _complain(told, 2 if isinstance(told, UserError) else 1)
        if isinstance(told, OSError):
            logger.debug("the operating system refused", exc_info=told)
            return _complain(_reason(told), 2 if told.errno in _MENDABLE else 1)
        raise  # not foreseen: its traceback is of use
    return code if isinstance(code, int) else 0


def _with_command(words: Sequence[str]) -> typer.Typer:
    """The command line, of the first word's command alone if it is one: others have hundreds of options to build."""
    alone = copy(app)
    alone.registered_commands = [known for known in app.registered_commands if known.name in words[:1]]
    alone.registered_groups = [known for known in app.registered_groups if known.name in words[:1]]
    return alone if alone.registered_commands or alone.registered_groups else app


def run() -> None:
    """Console script."""
    sys.exit(main())


def _misuse(error: Any) -> int:
    """One line that names the page with the right words; without any word, that page."""
    message = error.format_message()
    if message.startswith("Usage: "):
        print(message, file=sys.stderr)
        return 2
    where = error.ctx.command_path if error.ctx is not None else "jettison"
    return _complain(f"{message.rstrip('.')}; see {where} --help", 2)


def _reason(error: OSError) -> str:
    """``PATH: No such file or directory``."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{error.filename}: {reason}"


def _complain(error: Exception | str, exit_code: int) -> int:
    line = " ".join(str(error).split()) or type(error).__name__
    print(f"jettison: {line}", file=sys.stderr)
    return exit_code
