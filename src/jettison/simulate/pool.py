"""Processes for runs in virtual time: they leave Ctrl-C to their parent, and none outlives it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from threading import Thread
from typing import Any


class RunPool(ProcessPoolExecutor):
    """Spawned processes, as a fork would copy threads' locks."""

    def __init__(self, num_processes: int, prepare: Callable[..., None] | None = None, *told: Any) -> None:
        """``prepare``: called once in each process, with what it is ``told``."""
        super().__init__(num_processes, multiprocessing.get_context("spawn"), _begin, (prepare, told))

    def kill(self) -> None:
        """End the processes now, whatever they are at: their futures break."""
        for process in tuple((self._processes or {}).values()):
            process.kill()
        self.shutdown(cancel_futures=True)


def _begin(prepare: Callable[..., None] | None, told: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # else it would go on with its next run
    # Not the kernel's signal (``endings.die_with``): that comes with the end of the thread which began this process.
    Thread(target=_end_with_parent, name="parent", daemon=True).start()
    if prepare is not None:
        prepare(*told)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
