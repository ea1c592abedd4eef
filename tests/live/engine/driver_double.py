"""Ray's driver without Ray, as a process: it says what the test's folder tells it to.

    python driver_double.py FOLDER

Each start leaves ``open-N`` there, with the ``Open`` that it was given. ``no-room``: it says so with the file's text.
``waits``: it waits for room until the file goes, and tells that again and again with its text; of what is to be placed
meanwhile it tells that once. ``away``: the head is, for the file's text; when the file goes, the process ends.
``silent``: what is to be placed never is. ``deaf``: a ``Ping`` stays unanswered. Each ``Ping`` leaves ``pinged``, each
``Remove`` ``removed-NUMBER-LIFE``, and ``GiveBack`` ``given-back``.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import msgspec

from jettison.live.wire import placing as p


def tell(event):
    os.write(1, msgspec.json.encode(event) + b"\n")


def text_of(path):
    """Empty where there is no file, or none of its text yet."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def main(folder):
    reader = os.fdopen(0, "rb", buffering=0)
    line = reader.readline()
    num = len(list(folder.glob("open-*")))
    (folder / f"part-{num}").write_bytes(line)
    (folder / f"part-{num}").rename(folder / f"open-{num}")
    while why_waits := text_of(folder / "waits"):
        for _ in range(2):
            tell(p.Waits(why_waits))
        time.sleep(0.01)
    if (folder / "no-room").exists():
        tell(p.NoRoom((folder / "no-room").read_text()))
        return
    tell(p.Opened("10.0.0.1"))
    was_away = False
    while True:
        why_away = text_of(folder / "away")
        if why_away and not was_away:
            tell(p.Head(why_away))
        if was_away and not why_away:
            return
        was_away = bool(why_away)
        if not select.select([reader], [], [], 0.01)[0]:
            continue
        line = reader.readline()
        if not line:
            return
        command = msgspec.json.decode(line, type=p.PlacerCommand)
        if isinstance(command, p.Place):
            number, life = command.post.number, command.post.life
            if why_waits := text_of(folder / "waits"):
                tell(p.Waits(why_waits, number))
            if not (folder / "silent").exists():
                tell(p.Requested(number, life, "00", f"10.0.0.{number + 2}"))
        elif isinstance(command, p.Remove):
            (folder / f"removed-{command.number}-{command.life}").touch()
            tell(p.Over(command.number, command.life, None))
        elif isinstance(command, p.Ping):
            (folder / "pinged").touch()
            if not (folder / "deaf").exists():
                tell(p.Pong())
        elif isinstance(command, p.GiveBack):
            (folder / "given-back").touch()


main(Path(sys.argv[1]))
