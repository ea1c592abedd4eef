"""``python failing_core.py FILE serve ...``: the command, with a core that meets a bug in controllers behind a parent.

It raises on a token where FILE is there, which it takes away then, and wherever a request that is open begins with
``POISON``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from jettison.cli.main import run
from jettison.core import ports
from jettison.server.parent import process

POISON = 99


def break_core(path: Path) -> None:
    """From now on."""
    from jettison.core.cluster import ClusterCore  # where no front end is started from

    handle = ClusterCore.handle

    def broken(core: ClusterCore, event: ports.Event, now_ns: int) -> list[ports.Action]:
        actions = handle(core, event, now_ns)
        if any(isinstance(action, ports.EmitTokens) for action in actions):
            if path.exists():
                path.unlink()
                raise RuntimeError("a bug")
            if any(state.request.prompt_token_ids[0] == POISON for state in core.state.requests.values()):
                raise RuntimeError("a bug that a request meets")
        return actions

    ClusterCore.handle = broken  # type: ignore[method-assign]


if __name__ == "__main__":
    serve, path = process.serve, Path(sys.argv.pop(1))

    def serve_broken(sock: object, parent_pid: int, prepare: Callable[[], object]) -> object:
        """In the process that controllers are forked from."""
        def prepare_broken() -> None:
            prepare()
            break_core(path)

        return serve(sock, parent_pid, prepare_broken)  # type: ignore[arg-type]

    process.serve = serve_broken  # type: ignore[assignment]
    run()
