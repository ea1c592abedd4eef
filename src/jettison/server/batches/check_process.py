"""``python -m jettison.server.batches.check_process``: checks one file at low priority and says what it finds.

A job in on standard input, verdicts out on standard output, a line of JSON each. It ends with its reader.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec

from jettison.errors import JettisonError
from jettison.server.batches.check import Job, Verdict, check_file, endpoint_for
from jettison.server.batches.records import BatchError

NICENESS = 15
"""It gets a thirtieth of a core beside work that wants all of it, and all of an idle one."""


async def _check(job: Job) -> None:
    try:
        endpoint = endpoint_for(job)
        async for verdict in check_file(job, endpoint):
            _tell(verdict)
    except (JettisonError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201  # the server's log
        _tell(Verdict(is_last=True, failure=BatchError(code="internal_error", message="The file cannot be read.")))


def _tell(verdict: Verdict) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Until the file's end, or the reader's."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the server's whole group
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    try:
        asyncio.run(_check(job))
    except BrokenPipeError:
        os._exit(1)  # standard output cannot be flushed any more


if __name__ == "__main__":
    main()
