"""Many cases over the cores there are: processes of our own, one case at a time each.

A case decides its result alone, so the number of processes and the order in which they finish change nothing.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Any, NamedTuple

from jettison.config import usable_cores
from jettison.errors import JettisonError
from jettison.report.results import RunResult
from jettison.simulate.cases import Case, run_case
from jettison.simulate.pool import RunPool

POLL_S = 0.25
"""How often progress of other processes is looked at."""



class CaseProgress(NamedTuple):
    """How far one case is."""

    share: float
    """Of its requests, those that have ended; 1 when it is over."""
    now_s: float
    """Virtual time; 0 before it begins."""
    last_arrival_s: float
    """0 before it begins."""


_NUM_FIELDS = len(CaseProgress._fields)

OnProgress = Callable[[Sequence[CaseProgress]], None]
"""Told how far each case is, in their order."""


def run_cases(
    cases: Sequence[Case], *, num_processes: int | None = None, on_progress: OnProgress = lambda _: None
) -> list[RunResult]:
    """Results in the order of the cases. ``num_processes`` None: as many as there are cores and cases.

    ``on_progress`` is called several times a second, whatever the cases do meanwhile.

    Raises what a case raises, and JettisonError where a process dies. No process is left then.
    """
    number = min(len(cases), num_processes or usable_cores())
    if number <= 1:
        return _run_here(cases, on_progress)
    told = multiprocessing.get_context("spawn").Array("d", _NUM_FIELDS * len(cases), lock=False)
    results: dict[int, RunResult] = {}
    waiting: dict[Future[RunResult], int] = {}
    with RunPool(number, _remember, told) as pool:
        try:
            for index, case in enumerate(cases):
                waiting[pool.submit(_run, index, case)] = index
            while waiting:
                done, _ = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    results[waiting[future]] = future.result()
                    del waiting[future]
                on_progress(_read(told))
        except BrokenProcessPool:
            raise killed({future: cases[index].name for future, index in waiting.items()}, number) from None
        except BaseException:
            pool.kill()  # the other results would be thrown away
            raise
    return [results[index] for index in range(len(cases))]


def killed(left: Mapping[Future[Any], str], num_processes: int) -> JettisonError:
    """What to tell of a process that died, mostly by the system's hand, and of the work that broke off with it.

    ``left``: names of what has no result yet, as it was submitted. Processes take the next of it, so what was
    under way are the first that have not ended.
    """
    broken = (name for f, name in left.items() if not f.done() or isinstance(f.exception(), BrokenProcessPool))
    names = " or ".join(repr(name) for name in islice(broken, num_processes))
    return JettisonError(
        f"a process died, perhaps for lack of memory, while it simulated {names}: try one at a time, `--processes 1`"
    )


def _run_here(cases: Sequence[Case], on_progress: OnProgress) -> list[RunResult]:
    progress = [CaseProgress(0.0, 0.0, 0.0) for _ in cases]
    due_s = time.monotonic() + POLL_S
    results = []
    for index, case in enumerate(cases):

        def note_share(ended: int, total: int, index: int = index) -> None:
            share = ended / total
            if share - progress[index].share >= 0.01 or ended == total:
                progress[index] = progress[index]._replace(share=share)
                on_progress(progress)

        def note_time(now_s: float, last_arrival_s: float, index: int = index) -> None:
            nonlocal due_s
            progress[index] = progress[index]._replace(now_s=now_s, last_arrival_s=last_arrival_s)
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + POLL_S
                on_progress(progress)

        results.append(run_case(case, note_share, on_time=note_time))
        note_share(1, 1)  # also where the run's end came before that of its requests
    return results


_told: SynchronizedArray[Any] | None = None
"""In a process of the pool: where it says how far it is, the fields of a ``CaseProgress`` for each case."""


def _read(told: SynchronizedArray[Any]) -> list[CaseProgress]:
    return [CaseProgress(*told[at : at + _NUM_FIELDS]) for at in range(0, len(told), _NUM_FIELDS)]


def _remember(told: SynchronizedArray[Any]) -> None:
    global _told
    _told = told


def _run(index: int, case: Case) -> RunResult:
    told, first = _told, index * _NUM_FIELDS
    assert told is not None

    def note_share(ended: int, total: int) -> None:
        told[first] = ended / total

    def note_time(now_s: float, last_arrival_s: float) -> None:
        told[first + 1], told[first + 2] = now_s, last_arrival_s

    try:
        result = run_case(case, note_share, on_time=note_time)
        note_share(1, 1)
        return result
    except JettisonError as error:
        raise type(error)(f"{case.name}: {error}") from None
