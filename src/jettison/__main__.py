"""``python -m jettison``: the same as the ``jettison`` command."""

from __future__ import annotations

from jettison.cli.main import run

if __name__ == "__main__":
    run()
