"""Many cases over the cores there are: processes of our own, one case at a time each.

A case decides its result alone, so the number of processes and the order in which they finish change nothing.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Any

from jettison.config import usable_cores
from jettison.errors import JettisonError
from jettison.report.results import RunResult
from jettison.simulate.cases import Case, run_case

POLL_S = 0.25
"""How often progress of other processes is looked at."""

OnShares = Callable[[Sequence[float]], None]
"""Told the share of each case that is done."""


def run_cases(
    cases: Sequence[Case], *, num_processes: int | None = None, on_shares: OnShares = lambda shares: None
) -> list[RunResult]:
    """Results in the order of the cases. ``num_processes`` None: as many as there are cores and cases.

    Raises what a case raises, and JettisonError where a process dies.
    """
    number = min(len(cases), num_processes or usable_cores())
    if number <= 1:
        return _run_here(cases, on_shares)
    context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
    shares = context.Array("d", len(cases), lock=False)
    results: dict[int, RunResult] = {}
    waiting: dict[Future[RunResult], int] = {}
    with ProcessPoolExecutor(number, context, _remember, (shares,)) as pool:
        try:
            for index, case in enumerate(cases):
                waiting[pool.submit(_run, index, case)] = index
            while waiting:
                done, _ = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    results[waiting[future]] = future.result()
                    del waiting[future]
                on_shares(list(shares))
        except BrokenProcessPool:
            raise killed({future: cases[index].name for future, index in waiting.items()}, number) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[index] for index in range(len(cases))]


def killed(left: Mapping[Future[Any], str], num_processes: int) -> JettisonError:
    """What to tell of a process that died, mostly by the system's hand, and of the work that broke off with it.

    ``left``: names of what nobody has the result of, as it was submitted. Processes take the next of it, so what was
    under way are the first that have not ended.
    """
    broken = (name for f, name in left.items() if not f.done() or isinstance(f.exception(), BrokenProcessPool))
    names = " or ".join(repr(name) for name in islice(broken, num_processes))
    return JettisonError(
        f"a process died, perhaps for lack of memory, while it simulated {names}: try one at a time, `--processes 1`"
    )


def _run_here(cases: Sequence[Case], on_shares: OnShares) -> list[RunResult]:
    shares = [0.0] * len(cases)
    results = []
    for index, case in enumerate(cases):

        def note(ended: int, total: int, index: int = index) -> None:
            share = ended / total
            if share - shares[index] >= 0.01 or ended == total:
                shares[index] = share
                on_shares(shares)

        results.append(run_case(case, note))
    return results


_shares: SynchronizedArray[Any] | None = None
"""In a process of the pool: where it says how far it is."""


def _remember(shares: SynchronizedArray[Any]) -> None:
    global _shares
    _shares = shares


def _run(index: int, case: Case) -> RunResult:
    shares = _shares
    assert shares is not None

    def note(ended: int, total: int) -> None:
        shares[index] = ended / total

    try:
        return run_case(case, note)
    except JettisonError as error:
        raise type(error)(f"{case.name}: {error}") from None
