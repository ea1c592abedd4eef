"""The environment of processes that are started here."""

from __future__ import annotations

import os
from pathlib import Path

import jettison
from jettison.config import API_KEY_VARIABLES

RAY_TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
"""The token of a whole Ray cluster, for Ray's driver alone. ``RAY_AUTH_TOKEN_PATH`` names a file that every process of
the user can read; it tells nothing more."""


def child_environment() -> dict[str, str]:
    """This process's own, with the package that runs here importable, and without secrets: what a process needs of them
    is given to it by itself."""
    secrets = (*API_KEY_VARIABLES, RAY_TOKEN_VARIABLE)
    env = {name: value for name, value in os.environ.items() if name not in secrets}
    package_root = str(Path(jettison.__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
    return env
