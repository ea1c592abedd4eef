"""Jobs over several processes, each done once however many figures need it."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path

import jettison
from jettison.report.results import RunResult, read_results, write_results
from jettison.simulate.batch import killed
from jettison.simulate.reproduce.jobs import job_name, run_job


@cache
def program_mark() -> str:
    """Changes with any source file of this package."""
    digest = hashlib.sha256()
    root = Path(jettison.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


OnDone = Callable[[int, int, str], None]
"""(jobs done, jobs in all, what the last one was)."""


_FACTOR = "factor"
"""Name of what is kept of a job that looks for a load."""


class Runs:
    """Results by job. With a folder, what is done is kept there, and what is there is not done again: an interrupted
    reproduction goes on. What another version of the program has left there is not taken."""

    def __init__(self, processes: int = 1, on_done: OnDone | None = None, folder: Path | None = None) -> None:
        self.num_done = 0
        self.num_kept = 0
        """Jobs that were found in the folder."""
        self._folder = folder
        self._processes = processes
        self._on_done = on_done
        self._found: dict[str, RunResult | float] = {}

    def all(self, jobs: Sequence[str]) -> list[RunResult]:
        """Runs, in the order of their jobs; what nobody has asked for before is simulated now."""
        return [found for found in self._all(jobs) if isinstance(found, RunResult)]

    def factors(self, jobs: Sequence[str]) -> list[float]:
        """What jobs that look for a load come to."""
        return [found for found in self._all(jobs) if isinstance(found, float)]

    def _all(self, jobs: Sequence[str]) -> list[RunResult | float]:
        self._take_kept(jobs)
        missing = list(dict.fromkeys(job for job in jobs if job not in self._found))
        if self._processes > 1 and len(missing) > 1:
            self._in_processes(missing)
        else:
            for number, job in enumerate(missing, 1):
                self._keep(job, run_job(job), number, len(missing))
        return [self._found[job] for job in jobs]

    def _in_processes(self, jobs: list[str]) -> None:
        """Raises JettisonError where a process dies."""
        context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
        number = min(self._processes, len(jobs))
        under_way: dict[Future[RunResult | float], str] = {}
        with ProcessPoolExecutor(number, context) as pool:
            try:
                for job in jobs:
                    under_way[pool.submit(run_job, job)] = job
                while under_way:
                    for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                        self._keep(under_way[future], future.result(), len(jobs) - len(under_way) + 1, len(jobs))
                        del under_way[future]
            except BrokenProcessPool:
                raise killed({future: job_name(job) for future, job in under_way.items()}, number) from None

    def _file(self, job: str) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{hashlib.sha256((program_mark() + job).encode()).hexdigest()[:24]}.json"

    def _take_kept(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            file = self._file(job)
            if job not in self._found and file is not None and file.is_file():
                self.num_kept += 1
                kept = read_results(file)[0]
                self._found[job] = float(kept.config["factor"]) if kept.name == _FACTOR else kept

    def _keep(self, job: str, found: RunResult | float, done: int, total: int) -> None:
        self._found[job] = found
        file = self._file(job)
        if file is not None:
            run = found if isinstance(found, RunResult) else RunResult(_FACTOR, {"factor": repr(found)})
            write_results(file, [run])
        self.num_done += 1
        if self._on_done is not None:
            self._on_done(done, total, job_name(job))
