"""What is kept survives a crash at any moment: a machine that forgets the process, not the disk."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from batches_util import documents, jsonl, line
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jettison.errors import ConfigError
from jettison.server.batches import store as store_module
from jettison.server.batches.outcome import write_outcome
from jettison.server.batches.records import FOLLOWS, OVER, Batch, Result, Status, StoredFile
from jettison.server.batches.store import Store

NUM_LINES = 6
WINDOW_S = 3600


class _Crash(BaseException):
    """The process is gone."""


def crash(store: Store) -> Store:
    """Another process opens the folder: nothing of the first is left, and nothing was closed in order."""
    if store._lock_fd is not None:
        os.close(store._lock_fd)  # what the kernel does
        store._lock_fd = None
    again = Store(store.folder)
    again.open()
    return again


def a_file(store: Store, file_id: str, content: bytes, owner: str = "") -> StoredFile:
    store.incoming(file_id).write_bytes(content)
    return StoredFile(
        id=file_id, owner=owner, filename="in.jsonl", purpose="batch", num_bytes=len(content), created_at=0)


def a_batch(number: int, file_id: str, owner: str = "") -> Batch:
    return Batch(
        id=f"batch_{number}", owner=owner, endpoint="/v1/completions", input_file_id=file_id, completion_window="1h",
        created_at=0, expires_at=WINDOW_S)


class StoreMachine(RuleBasedStateMachine):
    """Batches go through their lives in any order, with a crash between and inside any two steps."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="jettison-test-"))
        self.store = Store(self.folder / "batches")
        self.store.open()
        self.batches: list[Batch] = []
        self.acknowledged: dict[int, dict[int, bytes]] = {}
        """Results that the store has taken, of batches that are not over."""
        self.num_made = 0

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.folder)

    def pick(self, at: int, *statuses: Status) -> Batch | None:
        fitting = [b for b in self.store.open_batches() if b.status in statuses]
        return fitting[at % len(fitting)] if fitting else None

    @initialize()
    def begin(self):
        self.add()

    @rule()
    def add(self):
        self.num_made += 1
        file_id = f"file-in{self.num_made}"
        self.store.add_file(a_file(self.store, file_id, jsonl(*(line(f"r{n}") for n in range(NUM_LINES)))))
        batch = self.store.add_batch(a_batch(self.num_made, file_id))
        self.acknowledged[batch.seq] = {}

    @rule(at=st.integers(0, 9))
    def begin_work(self, at):
        batch = self.pick(at, Status.VALIDATING)
        if batch is not None:
            self.store.change(
                batch.seq, lambda b: b.to(Status.IN_PROGRESS, 1, num_lines=NUM_LINES, num_runnable=NUM_LINES))

    @rule(
        at=st.integers(0, 9), lines=st.lists(st.tuples(st.integers(1, NUM_LINES), st.booleans())),
        mark=st.binary(max_size=3))
    def results(self, at, lines, mark):
        batch = self.pick(at, Status.IN_PROGRESS, Status.CANCELLING, Status.FINALIZING)
        if batch is None:
            return
        made = [Result(n, bad, b'{"custom_id":"r%d","mark":"%s"}' % (n - 1, mark.hex().encode())) for n, bad in lines]
        self.store.add_results([(batch.seq, result) for result in made])
        for result in made:
            self.acknowledged[batch.seq].setdefault(result.line, result.body)

    @rule(at=st.integers(0, 9))
    def cancel(self, at):
        batch = self.pick(at, Status.VALIDATING, Status.IN_PROGRESS)
        if batch is not None:
            self.store.change(batch.seq, lambda b: b.to(Status.CANCELLING, 2))

    @rule(at=st.integers(0, 9), where=st.sampled_from(["", "incoming", "renamed", "inserted"]))
    def finish(self, at, where):
        """As a run does it; with ``where`` the process dies on the way, and it is done again."""
        batch = self.pick(at, Status.IN_PROGRESS, Status.CANCELLING, Status.FINALIZING)
        if batch is None:
            return
        if batch.status is Status.IN_PROGRESS:
            batch = self.store.change(batch.seq, lambda b: b.to(Status.FINALIZING, 3))
        is_whole = batch.num_done == batch.num_lines
        is_late = Status.COMPLETED if is_whole else Status.EXPIRED
        ends_as = Status.CANCELLED if batch.status is Status.CANCELLING else is_late
        files = []
        if Status.IN_PROGRESS in batch.reached_at:
            files = write_outcome(self.store, batch, ends_as, 4, 1 << 20)
        ids = {file.is_of_errors: file.id for file in files}
        over = batch.to(ends_as, 4, output_file_id=ids.get(False), error_file_id=ids.get(True))
        if where == "incoming":
            self.store = crash(self.store)
            return
        with pytest.MonkeyPatch.context() as patch:
            if where == "renamed":
                patch.setattr(store_module, "sync_folder", _die)
            if where == "inserted":
                patch.setattr(self.store, "_keep", _die)
            try:
                self.store.end(over, files)
            except _Crash:
                patch.undo()
                self.store = crash(self.store)
                return
        self.check_over(over)

    def check_over(self, over: Batch) -> None:
        """Each line once, with the result that was acknowledged, if one was."""
        known = self.acknowledged.pop(over.seq)
        texts = [
            self.store.path_of(file_id).read_bytes() for file_id in (over.output_file_id, over.error_file_id) if file_id
        ]
        if Status.IN_PROGRESS not in over.reached_at:
            assert not texts
            return
        found = sorted(d["custom_id"] for text in texts for d in documents(text))
        assert found == [f"r{n}" for n in range(NUM_LINES)]
        bodies = {body for text in texts for body in text.splitlines()}
        assert set(known.values()) <= bodies
        kept = self.store.batch("", over.id)
        assert kept.status in OVER
        assert kept.num_completed + kept.num_failed == NUM_LINES

    @rule()
    def dies(self):
        self.store = crash(self.store)

    @precondition(lambda self: self.num_made)
    @rule(more=st.binary(min_size=1, max_size=9))
    def dies_while_uploading(self, more):
        a_file(self.store, "file-half", more)
        self.store = crash(self.store)
        assert not self.store.incoming("file-half").exists()

    @rule(at=st.integers(0, 9))
    def purge(self, at):
        seqs = [seq for (seq,) in self.store.db.execute("SELECT seq FROM batches WHERE is_over = 1")]
        if seqs:
            self.store.purge(seqs[at % len(seqs)])

    @invariant()
    def acknowledged_results_are_there(self):
        for batch in self.store.open_batches():
            kept = {result.line: result.body for result in self.store.results(batch.seq)}
            assert kept == self.acknowledged[batch.seq]
            assert batch.num_done == len(kept)
            assert self.store.done_lines(batch.seq) == set(kept)

    @invariant()
    def files_and_rows_agree(self):
        names = {path.name for path in (self.store.folder / "files").iterdir()}
        assert names == {file.id for file in self.store.files("", 10_000, None, None, newest_first=True)}


def _die(*_):
    raise _Crash


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# --- plain rules


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "batches")
    store.open()
    yield store
    store.close()


def test_a_folder_has_one_owner(store):
    with pytest.raises(ConfigError, match="a server or"):
        Store(store.folder).open()


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--batch-dir .*: "):
        Store(tmp_path / "file" / "batches").open()


def test_what_is_no_database_is_told(tmp_path):
    (tmp_path / "batches.sqlite3").write_bytes(b"something else, and long enough to be read as a header" * 10)
    with pytest.raises(ConfigError, match="not a database"):
        Store(tmp_path).open()


def test_only_this_user_reads_it(store):
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in store.folder.iterdir() if path.is_file()} == {0}


def test_pages_are_in_order_and_end(store):
    for number in range(5):
        store.add_file(a_file(store, f"file-{number}", b"x", owner="me" if number != 2 else "you"))
        store.add_batch(a_batch(number, f"file-{number}", owner="me" if number != 2 else "you"))
    assert [b.id for b in store.batches("me", 2, None)] == ["batch_4", "batch_3"]
    assert [b.id for b in store.batches("me", 9, "batch_3")] == ["batch_1", "batch_0"]
    assert store.batches("me", 9, "batch_2") is None  # another's
    assert [f.id for f in store.files("me", 9, "file-1", None, newest_first=False)] == ["file-3", "file-4"]
    assert store.files("me", 9, None, "batch_output", newest_first=True) == []
    assert store.usage("me") == (4, 4)
    assert store.usage("you") == (1, 1)


def test_a_full_disk_changes_nothing(store):
    """The transaction is undone, and the same results are taken later."""
    store.add_file(a_file(store, "file-1", b"x"))
    batch = store.add_batch(a_batch(1, "file-1"))
    page_count = store.db.execute("PRAGMA page_count").fetchone()[0]
    store.db.execute(f"PRAGMA max_page_count = {page_count}")
    results = [(batch.seq, Result(n, False, b"x" * 4000)) for n in range(1, 9)]
    with pytest.raises(store_module.sqlite3.OperationalError, match="full"):
        store.add_results(results)
    assert store.done_lines(batch.seq) == set()
    store.db.execute("PRAGMA max_page_count = 1000000")
    store.add_results(results)
    assert store.done_lines(batch.seq) == set(range(1, 9))


def test_files_that_do_not_fit_leave_nothing(store, monkeypatch):
    store.add_file(a_file(store, "file-1", jsonl(line("a"))))
    batch = store.add_batch(a_batch(1, "file-1"))
    batch = store.change(batch.seq, lambda b: b.to(Status.IN_PROGRESS, 1, num_lines=1))
    store.add_results([(batch.seq, Result(1, False, b"{}"))])
    batch = store.change(batch.seq, lambda b: b.to(Status.FINALIZING, 2))

    def fail(*_):
        raise OSError(errno.ENOSPC, "no space")

    def left():
        return [path.name for folder in ("files", "incoming") for path in (store.folder / folder).iterdir()]

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no space"):
            write_outcome(store, batch, Status.COMPLETED, 3, 1 << 20)
    assert left() == ["file-1"]
    for broken in ("sync_folder", "_keep"):
        files = write_outcome(store, batch, Status.COMPLETED, 3, 1 << 20)
        with monkeypatch.context() as patch:
            patch.setattr(store_module if broken == "sync_folder" else store, broken, fail)
            with pytest.raises(OSError, match="no space"):
                store.end(batch.to(Status.COMPLETED, 3), files)
        assert left() == ["file-1"]
    store.end(batch.to(Status.COMPLETED, 3), write_outcome(store, batch, Status.COMPLETED, 3, 1 << 20))
    assert len(left()) == 2


@pytest.mark.parametrize("status", Status)
def test_states_follow_as_they_may(status):
    batch = Batch(
        id="b", owner="", endpoint="/v1/completions", input_file_id="f", completion_window="1h", created_at=0,
        expires_at=1, status=status)
    for following in Status:
        if following in FOLLOWS[status]:
            assert batch.to(following, 5).reached_at == {following: 5}
        else:
            with pytest.raises(ValueError, match="cannot become"):
                batch.to(following, 5)
