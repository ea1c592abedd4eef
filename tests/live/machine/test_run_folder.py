"""Socket folders of launchers: whose owner was killed are removed by the next start, and no others."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import jettison
from jettison.errors import UserError
from jettison.live.machine import run_folder
from jettison.live.machine.run_folder import PREFIX, RunFolder, remove_abandoned
from waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This test's folder alone, however long its path is: nothing is bound here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(run_folder, "SHORT_PARENTS", ())
    monkeypatch.setattr(run_folder, "MAX_SOCKET_PATH_BYTES", 1 << 12)
    return tmp_path


def put_socket(folder: Path, name: str = "control") -> Path:
    """As bind leaves it behind; a bound one's path may not be as long as those of tests are."""
    os.mknod(folder / name, stat.S_IFSOCK | 0o600)
    return folder / name


def abandoned(parent: Path, name: str = "left") -> Path:
    folder = parent / f"{PREFIX}{name}"
    folder.mkdir(mode=0o700)
    put_socket(folder)
    put_socket(folder, "link-0.0")
    return folder


def test_a_folder_is_private_and_goes_with_its_owner(tmp_path: Path) -> None:
    folder = RunFolder()
    put_socket(folder.path)
    assert folder.path.parent == tmp_path and stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    other = RunFolder()
    assert other.path != folder.path and folder.path.exists(), "the owner lives"
    for each in (folder, other, folder):
        each.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("has_guard", [True, False])
def test_the_folder_of_a_process_that_was_killed_goes(has_guard: bool, tmp_path: Path) -> None:
    """At once; and where the guard was killed, too, with the next start."""
    script = (
        "import os, stat, time; from jettison.live.machine import run_folder; run_folder.MAX_SOCKET_PATH_BYTES = 4096;"
        f"run_folder._guard = run_folder._guard if {has_guard} else lambda path: None;"
        "folder = run_folder.RunFolder();"
        "os.mknod(folder.path / 'control', stat.S_IFSOCK | 0o600); print(folder.path, flush=True); time.sleep(60)"
    )
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(jettison.__file__).parent.parent)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        remove_abandoned(tmp_path)
        assert path.parent == tmp_path and (path / "control").exists()
        owner.kill()
        owner.wait()
    deadline = time.monotonic() + PATIENCE_S
    while has_guard and path.exists():
        assert time.monotonic() < deadline, "the guard removes it"
        time.sleep(0.02)
    assert path.exists() != has_guard
    RunFolder().remove()
    assert not list(tmp_path.iterdir())


def test_links_files_and_folders_with_other_things_stay(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    kept = put_socket(outside)
    (tmp_path / f"{PREFIX}link").symlink_to(outside)
    (tmp_path / f"{PREFIX}file").write_text("")
    os.mkfifo(tmp_path / f"{PREFIX}fifo")
    for name, put in (("a", lambda f: (f / "mine").write_text("")), ("b", lambda f: (f / "way").symlink_to(kept))):
        put(abandoned(tmp_path, name))
    other_name = tmp_path / "jettison-verify-x"
    other_name.mkdir()
    before = sorted(tmp_path.rglob("*"))
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_folders_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, uid = abandoned(tmp_path), os.getuid()
    monkeypatch.setattr(run_folder.os, "getuid", lambda: uid + 1)
    remove_abandoned(tmp_path)
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(run_folder.os, "getuid", lambda: uid)
    remove_abandoned(tmp_path)
    assert not folder.exists()


@pytest.mark.parametrize("is_gone", [False, True])
def test_two_that_start_together_get_a_folder_each(
    is_gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one finds this one's folder before it is locked."""
    make, made = tempfile.mkdtemp, []
    others: list[int] = []

    def mkdtemp(**how: str) -> str:
        made.append(make(**how))
        if len(made) == 1 and is_gone:
            remove_abandoned(tmp_path)
        elif len(made) == 1:
            others.append(run_folder._lock(Path(made[0])))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    folder = RunFolder()
    assert len(made) == 2 and folder.path == Path(made[1])
    remove_abandoned(tmp_path)
    assert folder.path.exists() and Path(made[0]).exists() != is_gone
    for fd in others:
        os.close(fd)
    folder.remove()


def test_without_locks_a_folder_is_made_and_nobody_s_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    left = abandoned(tmp_path)
    folder = RunFolder()
    assert left.exists() and folder.path.exists()
    folder.remove()
    assert not folder.path.exists()


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one short folder there is, beside a folder for temporary files that is too long for a socket."""
    given, short = tmp_path / ("long" * 30), tmp_path / "short"
    for folder in (given, short):
        folder.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(given))
    monkeypatch.setattr(run_folder, "SHORT_PARENTS", (short,))
    monkeypatch.setattr(run_folder, "MAX_SOCKET_PATH_BYTES", len(os.fsencode(short)) + run_folder._ROOM_BYTES)
    return short


def test_where_the_path_is_too_long_a_short_folder_is_taken(short: Path) -> None:
    left = abandoned(short)
    with RunFolder() as folder:
        assert folder.path.parent == short and stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        longest = put_socket(folder.path, "link-1023.1000000")
        assert len(os.fsencode(longest)) == run_folder.MAX_SOCKET_PATH_BYTES
        assert not left.exists(), "what was abandoned there is removed as well"
    assert not list(short.iterdir())


@pytest.mark.parametrize(("mode", "is_taken"), [(0o777, False), (0o1777, True), (0o770, False), (0o755, True)])
def test_a_short_folder_in_which_others_could_rename_ours_is_not_taken(
    mode: int, is_taken: bool, short: Path
) -> None:
    short.chmod(mode)
    if is_taken:
        with RunFolder() as folder:
            assert folder.path.parent == short
        return
    with pytest.raises(UserError, match="TMPDIR is too long for sockets") as caught:
        RunFolder()
    assert tempfile.gettempdir() in str(caught.value) and "\n" not in str(caught.value)
    assert not list(short.iterdir())


def test_without_any_short_folder_the_line_names_the_mend(short: Path) -> None:
    short.rmdir()
    with pytest.raises(UserError, match=r"TMPDIR is too long .* Set it to a folder whose path has at most \d+$"):
        RunFolder()


@pytest.mark.parametrize("has_short", [False, True])
def test_where_no_temporary_file_can_be_written_a_short_folder_is_taken(
    has_short: bool, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a root file system that is read-only, or full: a folder of sockets needs no block of it."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(short / "nowhere")])
    if not has_short:
        short.rmdir()
        with pytest.raises(UserError, match="set TMPDIR to a folder"):
            RunFolder()
        return
    with RunFolder() as folder:
        assert folder.path.parent == short


def test_abandoned_folders_are_found_in_every_place(short: Path) -> None:
    """What a start with a long TMPDIR has left is removed by one with a short TMPDIR, and the other way round."""
    left = abandoned(short), abandoned(Path(tempfile.gettempdir()))
    RunFolder().remove()
    assert not any(folder.exists() for folder in left)
