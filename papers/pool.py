"""Jobs over several processes, each done once however many figures need it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from typing import Any

import jettison
from jettison.errors import JettisonError
from jettison.report.results import RunResult, read_results, write_results
from jettison.simulate.batch import killed
from jettison.simulate.pool import RunPool
from papers.jobs import job_name, run_job


@cache
def program_mark() -> str:
    """Changes with any source file of the package and of this folder."""
    digest = hashlib.sha256()
    for root in (Path(jettison.__file__).parent, Path(__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


OnDone = Callable[[int, int, str], None]
"""(jobs done, jobs that were begun or wait for a process, what the last one was)."""


ENDED = "this reproduction has ended"
_FACTOR = "factor"
"""Name of what is kept of a job that looks for a load."""


class Runs:
    """Results by job. With a folder, what is done is kept there, and what is there is not done again: an interrupted
    reproduction goes on. What another version of the program has left there is not taken.

    With more than one process, several threads may ask at the same time, so that the runs of one figure fill the cores
    which another's leave idle; a job that two of them want is done once. ``with Runs(...)``: its processes end at the
    end of the block. One process is this one.
    """

    def __init__(self, processes: int = 1, on_done: OnDone | None = None, folder: Path | None = None) -> None:
        self.num_done = 0
        self.num_kept = 0
        """Jobs that were found in the folder."""
        self._folder = folder
        self._on_done = on_done
        self._processes = processes
        self._lock = threading.RLock()
        """Of all that follows."""
        self._pool: RunPool | None = None
        self._found: dict[str, Future[RunResult | float]] = {}
        """Under way, or done and noted."""
        self._num_wanted = 0
        self._is_closed = False

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self.close(at_once=kind is not None and not issubclass(kind, Exception))

    def close(self, *, at_once: bool = False) -> None:
        """What is under way is waited for (``at_once``: ended), what is not is called off, and nothing new begins."""
        with self._lock:
            pool, self._pool, self._is_closed = self._pool, None, True
        if pool is not None:
            if at_once:
                pool.kill()
            else:
                pool.shutdown(cancel_futures=True)

    def all(self, jobs: Sequence[str]) -> list[RunResult]:
        """Runs, in the order of their jobs; what has not been asked for before is simulated now."""
        return [found for found in self._all(jobs) if isinstance(found, RunResult)]

    def factors(self, jobs: Sequence[str]) -> list[float]:
        """What jobs that look for a load come to."""
        return [found for found in self._all(jobs) if isinstance(found, float)]

    def _all(self, jobs: Sequence[str]) -> list[RunResult | float]:
        """Raises JettisonError where a process dies."""
        try:
            with self._lock:
                futures = [self._future(job) for job in jobs]
            return [future.result() for future in futures]
        except BrokenProcessPool:
            if self._is_closed:
                raise JettisonError(ENDED) from None
            with self._lock:
                lost = {future: job_name(job) for job, future in self._found.items()}
            raise killed(lost, self._processes) from None

    def _future(self, job: str) -> Future[RunResult | float]:
        found = self._found.get(job)
        if found is None:
            # Kept first: the program's mark is taken before processes load sources that may be edited meanwhile.
            found = self._found[job] = self._kept(job) or self._begun(job)
        return found

    def _begun(self, job: str) -> Future[RunResult | float]:
        """``noted`` is over when the result has been counted, kept and told of."""
        if self._is_closed:
            raise JettisonError(ENDED)
        self._num_wanted += 1
        noted: Future[RunResult | float] = Future()
        if self._processes == 1:
            found = run_job(job)
            self._note(job, found)
            noted.set_result(found)
            return noted

        def note(done: Future[RunResult | float]) -> None:
            try:
                self._note(job, done.result())
            except BaseException as error:  # noqa: BLE001  # the caller that waits for it raises it
                noted.set_exception(error)
            else:
                noted.set_result(done.result())

        if self._pool is None:
            self._pool = RunPool(self._processes)
        self._pool.submit(run_job, job).add_done_callback(note)
        return noted

    def _note(self, job: str, found: RunResult | float) -> None:
        file = self._file(job)
        if file is not None:
            run = found if isinstance(found, RunResult) else RunResult(_FACTOR, {"factor": repr(found)})
            write_results(file, [run])
        with self._lock:
            self.num_done += 1
            if self._on_done is not None:
                self._on_done(self.num_done, self._num_wanted, job_name(job))

    def _kept(self, job: str) -> Future[RunResult | float] | None:
        file = self._file(job)
        if file is None or not file.is_file():
            return None
        self.num_kept += 1
        kept = read_results(file)[0]
        found: Future[RunResult | float] = Future()
        found.set_result(float(kept.config["factor"]) if kept.name == _FACTOR else kept)
        return found

    def _file(self, job: str) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{hashlib.sha256((program_mark() + job).encode()).hexdigest()[:24]}.json"
