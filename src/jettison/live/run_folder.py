"""The folder of a launcher's sockets: gone with the launcher, or, where that was killed, with the next one's start.

The owner holds a lock (flock) on the folder, which the kernel frees when the process ends, however it ends. So an
unlocked folder of this name is nobody's: process ids that come again and clocks have no say in that.

Other users' folders, links, and folders with anything but sockets in them are never touched.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "jettison-run-"


class RunFolder:
    """A new folder of mode 0700 in the system's folder for temporary files."""

    def __init__(self) -> None:
        """Removes abandoned ones on the way. Raises OSError where no folder can be made."""
        remove_abandoned(Path(tempfile.gettempdir()))
        self._lock_fd: int | None = None
        while self._lock_fd is None:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            try:
                self._lock_fd = _lock(self.path)
            except (BlockingIOError, FileNotFoundError):
                continue  # before it was locked, another start took it for abandoned
            except OSError:
                break  # a file system without such locks: nobody else gets one either, and so it stays

    def remove(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in ``parent`` that a launcher of this user has made and nobody holds any more."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            fd = _lock(path)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid == os.getuid():
                _remove(path, fd)
        except OSError:
            pass  # somebody has just put something into it, or is quicker
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
    BlockingIOError where somebody else has it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.lstat(path)):
            raise FileNotFoundError(f"{path} is another folder now")
    except BaseException:
        os.close(fd)
        raise
    return fd
