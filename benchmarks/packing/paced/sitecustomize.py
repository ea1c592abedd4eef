"""Steps that last as long as on a device of its own: ``JETTISON_BENCH_STEP_MS`` at least, a core free meanwhile.

Python imports this module by itself in every process that has this folder in ``PYTHONPATH``: in a worker, and in a
process that profiles.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACED = "jettison.device.runner"
STEP_S = float(os.environ.get("JETTISON_BENCH_STEP_MS", "0")) / 1e3


class _Pacer(MetaPathFinder):
    """Meets the import of the module that runs steps."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PACED:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _pace(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _pace(module: Any) -> None:
    plain = module.Runner.run

    def run(*args: Any, **kwargs: Any) -> Any:
        ends_s = time.perf_counter() + STEP_S
        result = plain(*args, **kwargs)
        time.sleep(max(0.0, ends_s - time.perf_counter()))
        return result

    module.Runner.run = run


if STEP_S:
    sys.meta_path.insert(0, _Pacer())
