"""What a result file's figures depend on: the commit, the day, and a digest of each room of `src/jettison` behind them.

    python -m benchmarks.evidence --stamp FILE ROOM...    # for a file that a command of the package wrote just now

Benchmarks write with `write_result`. `make claims` (claims.py) compares the digests with the tree as it is.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "jettison"

DECIDING = ("core", "policy", "memory", "cost")
"""Rooms that every figure of a schedule depends on."""
VIRTUAL = (*DECIDING, "sim", "simulate", "workload")
"""Rooms behind a figure in virtual time."""
SERVING = (*DECIDING, "live", "device", "transport", "profiles")
"""Rooms behind a figure of live workers."""
LIVE = (*SERVING, "server", "workload", "report")
"""Rooms behind a figure that a client of a live server measured."""


def digest(room: str, package: Path = PACKAGE) -> str:
    """Of names and contents of a room's sources, 16 hexadecimal digits. Raises ValueError where there are none.

    ``papers`` is the folder of that name beside ``src``.
    """
    sources = hashlib.sha256()
    if room == "papers" and package == PACKAGE:
        package = REPOSITORY
    inside = [package / f"{room}.py", *(package / room).rglob("*")]
    files = sorted(f for f in inside if f.suffix in {".py", ".c", ".h", ".yaml"} and f.is_file())
    if not files:
        raise ValueError(f"{package / room} has no sources")
    for file in files:
        data = file.read_bytes()
        sources.update(f"{file.relative_to(package)} {len(data)}\n".encode() + data)
    return sources.hexdigest()[:16]


def git(*arguments: str) -> str:
    """What git says of the repository. Raises CalledProcessError, or OSError where there is no git."""
    run = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def commit() -> str | None:
    """The commit of the tree, with -dirty where tracked files differ from it; None outside of a repository."""
    try:
        return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (subprocess.CalledProcessError, OSError):
        return None


def evidence(*rooms: str) -> dict[str, object]:
    """What is written beside the figures."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"commit": commit(), "date": today, "rooms": {room: digest(room) for room in rooms}}


def write_result(path: Path, document: dict[str, object], *rooms: str) -> None:
    """Write the figures with their evidence, as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(path.name + ".part")
    staged.write_text(json.dumps(document | {"evidence": evidence(*rooms)}, indent=1) + "\n", encoding="utf-8")
    staged.replace(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stamp", type=Path, required=True, metavar="FILE")
    parser.add_argument("rooms", nargs="+", metavar="ROOM")
    args = parser.parse_args()
    write_result(args.stamp, json.loads(args.stamp.read_text()), *args.rooms)


if __name__ == "__main__":
    main()
