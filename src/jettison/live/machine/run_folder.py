"""The folder of a cluster's sockets: gone with its controller, also where that is killed. A process beside it, the
*guard*, does nothing but wait for its end (``python -m jettison.live.machine.run_folder FOLDER``). Where the guard is
killed, too, the next controller's start removes the folder.

The owner holds a lock (flock) on the folder, which the kernel frees when the process ends, however it ends. So an
unlocked folder of this name has no owner: process ids that come again and clocks have no say in that.

A socket's path has little room. Where TMPDIR is too long for it, or no temporary file can be written, the folder lies
in the first of a few short ones.

Other users' folders, links, and folders with anything but sockets in them are never touched.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jettison.errors import UserError
from jettison.live.machine.environment import child_environment

PREFIX = "jettison-run-"
MOST_TRIES = 100
"""Of a guard."""
MAX_SOCKET_PATH_BYTES = 107
"""The kernel's 108, less the zero at the end."""
SHORT_PARENTS = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
_ROOM_BYTES = len(f"/{PREFIX}") + 8 + len("/link-1023.1000000")
"""What follows the parent's path in the longest address; ``mkdtemp`` adds eight characters to the prefix."""


class RunFolder:
    """A new folder of mode 0700 in the folder for temporary files, or in a short one where that one's path is long."""

    def __init__(self) -> None:
        """Removes abandoned ones on the way. Raises OSError where no folder can be made, UserError where none can be
        whose path is short enough."""
        given = _temporary_files()
        others = [parent for parent in SHORT_PARENTS if parent != given]
        for parent in others if given is None else [given, *others]:
            remove_abandoned(parent)
        if given is not None and _has_room(given):
            self._make_in(given)
            return
        for parent in others:
            if _has_room(parent) and _is_safe(parent):
                try:
                    self._make_in(parent)
                except OSError:
                    continue
                return
        if given is None:
            raise UserError("no folder for temporary files can be written: set TMPDIR to a folder that can")
        raise UserError(
            f"TMPDIR is too long for sockets, whose paths have at most {MAX_SOCKET_PATH_BYTES} bytes: {given}. Set it "
            f"to a folder whose path has at most {MAX_SOCKET_PATH_BYTES - _ROOM_BYTES}"
        )

    def _make_in(self, parent: Path) -> None:
        """Raises OSError."""
        self._lock_fd: int | None = None
        while self._lock_fd is None:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            try:
                self._lock_fd = _lock(self.path)
            except (BlockingIOError, FileNotFoundError):
                continue  # before it was locked, another start took it for abandoned
            except OSError:
                break  # a file system without such locks: no other process gets one either, and so it stays
        self._guard = _guard(self.path)

    def remove(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._guard is not None:
            self._guard.kill()  # there is nothing left to remove
            self._guard.communicate()
            self._guard = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _temporary_files() -> Path | None:
    """None where no file can be written in any: the file system is read-only or full, which a socket may not mind."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return None


def _has_room(parent: Path) -> bool:
    """Whether the path of a socket below it can be bound."""
    return len(os.fsencode(parent)) + _ROOM_BYTES <= MAX_SOCKET_PATH_BYTES


def _is_safe(parent: Path) -> bool:
    """Whether others can neither rename nor remove a folder of this user in it: as the sticky bit sees to in /tmp."""
    try:
        info = parent.stat()
    except OSError:
        return False
    if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (0, os.getuid()):
        return False
    return bool(info.st_mode & stat.S_ISVTX) or not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _guard(path: Path) -> subprocess.Popen[bytes] | None:
    """A process that removes the folder when this one has ended: its standard input ends then. It has a session of its
    own, so that no signal to this one's reaches it, and no secret in its environment. None where the machine has no
    room for another process."""
    command = (sys.executable, "-P", "-m", "jettison.live.machine.run_folder", str(path))
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env=child_environment(),
        )  # fmt: skip
    except OSError:
        return None


def remove_abandoned(parent: Path, pattern: str = f"{PREFIX}*") -> None:
    """Remove the folders in ``parent`` that a controller of this user has made and no process holds any more."""
    for path in parent.glob(pattern):
        try:
            fd = _lock(path)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid == os.getuid():
                _remove(path, fd)
        except OSError:
            pass  # another process has just put something into it, or is quicker
        finally:
            os.close(fd)


def _remove(path: Path, fd: int) -> None:
    """Remove an open folder in which there are only sockets; another is left as it is. Raises OSError."""
    names = os.listdir(fd)
    if all(stat.S_ISSOCK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode) for name in names):
        for name in names:
            os.unlink(name, dir_fd=fd)
        path.rmdir()


def _lock(path: Path) -> int:
    """A descriptor that holds the lock of a folder. Raises OSError: FileNotFoundError where the folder is gone,
    BlockingIOError where another process has it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.lstat(path)):
            raise FileNotFoundError(f"{path} is another folder now")
    except BaseException:
        os.close(fd)
        raise
    return fd


if __name__ == "__main__":
    guarded = Path(sys.argv[1])
    sys.stdin.buffer.read()
    for _ in range(MOST_TRIES):  # the lock of a process that ends may be freed after its pipes
        remove_abandoned(guarded.parent, guarded.name)
        if not guarded.exists():
            break
        time.sleep(0.05)
