"""Socket folders of launchers: whose owner was killed are removed by the next start, and no others."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import jettison
from jettison.live import run_folder
from jettison.live.run_folder import PREFIX, RunFolder, remove_abandoned


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
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


def test_the_next_start_removes_the_folder_of_a_process_that_was_killed(tmp_path: Path) -> None:
    script = (
        "import os, stat, time; from jettison.live.run_folder import RunFolder; folder = RunFolder();"
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
    assert path.exists()
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
