"""A worker process with a fake device, started by tests through ``LocalSpawner(worker_command=...)``."""

from __future__ import annotations

import gc
import os
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from worker_fakes import FakeDevice

from jettison.errors import BudgetError
from jettison.live.worker.forked import serve_forks
from jettison.live.worker.main import run_worker


class ProcessDevice(FakeDevice):
    """What goes wrong is asked for in the spec's ``model_dir``, per worker: ``<worker id>:<what>``."""

    def __init__(self, spec):
        super().__init__(spec.worker_id)
        worker, _, what = spec.model_dir.partition(":")
        self.what = what if worker == str(spec.worker_id) else ""
        if self.what == "slow copies":
            self.copy_gate = lambda copy: time.sleep(60)

    def start(self):
        if self.what == "budget":
            raise BudgetError("4096 bytes are needed")
        if self.what == "crash":
            os._exit(7)
        if self.what == "memory":
            raise MemoryError
        if self.what == "bug":
            raise ZeroDivisionError("oops")
        if self.what == "slow":
            time.sleep(60)
        super().start()

    def memory_report(self):
        return super().memory_report() | {"objects_out_of_the_collector_s_sight": gc.get_freeze_count()}

    def run_step(self, step, hidden, port=None, gives_up=None):
        if self.what == "hang":
            time.sleep(60)
        if self.what == "die":
            os._exit(9)
        return super().run_step(step, hidden, port, gives_up)


if __name__ == "__main__":
    serve_forks(partial(run_worker, make_device=ProcessDevice), lambda: None)
