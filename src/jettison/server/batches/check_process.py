"""``python -m jettison.server.batches.check_process``: checks one file at low priority and writes its verdicts.

It reads a job from standard input and writes verdicts to standard output, each as a line of JSON. It ends with its
reader.
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
"""The process gets a thirtieth of a busy core, and all of an idle one."""


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
    """Run until the end of the file or of the reader."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the server's whole group
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    try:
        asyncio.run(_check(job))
    except BrokenPipeError:
        os._exit(1)  # standard output cannot be flushed any more


if __name__ == "__main__":
    main()
