"""Files, batches and results on disk: SQLite in WAL mode, and a folder of file contents. The only module that knows
SQL.

Whenever the process dies, acknowledged data is there at the next start, and a line has one result or none. Results are
written in transactions, and a second result of a line is ignored. Files appear under their name complete (written
elsewhere, fsync, rename) and belong to a key by a row; a file without a row is removed at the start.

A store is for one thread at a time (``service`` gives it a thread of its own). Only one process can have a folder open.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from jettison.errors import ConfigError
from jettison.server.batches.records import OVER, Batch, Result, StoredFile

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, num_bytes INTEGER NOT NULL,
    purpose TEXT NOT NULL, data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS files_of ON files (owner, seq);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, is_over INTEGER NOT NULL,
    num_completed INTEGER NOT NULL DEFAULT 0, num_failed INTEGER NOT NULL DEFAULT 0, data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, seq);
CREATE INDEX IF NOT EXISTS batches_open ON batches (is_over, seq);
CREATE TABLE IF NOT EXISTS results (
    batch INTEGER NOT NULL, line INTEGER NOT NULL, is_error INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (batch, line));
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value REAL NOT NULL);
"""

_FILE = "SELECT data FROM files"
_BATCH = "SELECT seq, num_completed, num_failed, data FROM batches"
DATABASE = "batches.sqlite3"
PURGE_ROWS = 500
"""Results of an ended batch removed at one time; short transactions do not delay others."""


class Store:
    """See the module. ``open`` acquires, ``close`` releases; both idempotent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._db: sqlite3.Connection | None = None
        self._lock_fd: int | None = None

    def open(self) -> None:
        """Make the folder or open it, and remove the incomplete files of a killed process. Raises ConfigError."""
        if self._db is not None:
            return
        try:
            for folder in (self.folder, self.folder / "files", self.folder / "incoming"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The folder holds prompts and answers, even where it existed before and other users may enter it.
            os.close(os.open(self.folder / DATABASE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            # Opened in one thread, used in another, never in two at the same time.
            self._db = sqlite3.connect(self.folder / DATABASE, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            self._clear_away()
        except BlockingIOError:
            self.close()
            raise ConfigError(f"--batch-dir {self.folder}: a server or `jettison batch run` works on it") from None
        except OSError as error:
            self.close()
            raise ConfigError(f"--batch-dir {self.folder}: {error.strerror or error}") from None
        except sqlite3.Error as error:
            self.close()
            raise ConfigError(f"--batch-dir {self.folder}: {error}") from None

    def close(self) -> None:
        """Close the database; everything is on disk already."""
        db, self._db = self._db, None
        if db is not None:
            db.close()
        lock_fd, self._lock_fd = self._lock_fd, None
        if lock_fd is not None:
            os.close(lock_fd)

    @property
    def is_open(self) -> bool:
        """Whether the store is open."""
        return self._db is not None

    @property
    def db(self) -> sqlite3.Connection:
        """The connection, while open."""
        assert self._db is not None, "open() comes first"
        return self._db

    def _clear_away(self) -> None:
        for path in (self.folder / "incoming").iterdir():
            path.unlink()
        known = {file_id for (file_id,) in self.db.execute("SELECT id FROM files")}
        for path in (self.folder / "files").iterdir():
            if path.name not in known:
                path.unlink()
        over = "SELECT seq FROM batches WHERE is_over = 1"
        self.db.execute(f"DELETE FROM results WHERE batch IN ({over}) OR batch NOT IN (SELECT seq FROM batches)")

    # --- files

    def path_of(self, file_id: str) -> Path:
        """The path of the bytes of a known file."""
        return self.folder / "files" / file_id

    def incoming(self, name: str) -> Path:
        """The path of bytes that are not a file yet."""
        return self.folder / "incoming" / name

    def add_file(self, file: StoredFile) -> None:
        """Add a file; its bytes are in ``incoming`` under its id, written and synced."""
        with self._appearing([file]):
            self._insert_file(file)

    @contextmanager
    def _appearing(self, files: Sequence[StoredFile]) -> Iterator[None]:
        """A transaction that adds incoming files, or leaves none of them."""
        try:
            for file in files:
                os.rename(self.incoming(file.id), self.path_of(file.id))
            sync_folder(self.folder / "files")
            with self._transaction():
                yield
        except (sqlite3.Error, OSError):
            for file in files:
                self.path_of(file.id).unlink(missing_ok=True)
                self.incoming(file.id).unlink(missing_ok=True)
            raise

    def _insert_file(self, file: StoredFile) -> None:
        self.db.execute(
            "INSERT INTO files (id, owner, num_bytes, purpose, data) VALUES (?, ?, ?, ?, ?)",
            (file.id, file.owner, file.num_bytes, file.purpose, msgspec.json.encode(file)))

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        """None also where it is another's."""
        row = self.db.execute(f"{_FILE} WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=StoredFile)

    def files(
        self, owner: str, limit: int, after: str | None, purpose: str | None, *, newest_first: bool
    ) -> list[StoredFile] | None:
        """A page of files after ``after``; None where that is no file of this owner."""
        start = self._seq_of("files", owner, after)
        if after is not None and start is None:
            return None
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        sql, values = f"{_FILE} WHERE owner = ?", [owner]
        if start is not None:
            sql += f" AND seq {sign} {start:d}"
        if purpose is not None:
            sql, values = f"{sql} AND purpose = ?", [*values, purpose]
        rows = self.db.execute(f"{sql} ORDER BY seq {order} LIMIT {limit:d}", values)
        return [msgspec.json.decode(data, type=StoredFile) for (data,) in rows]

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Remove a file; returns whether it existed. The caller asks ``is_needed`` before."""
        with self._transaction():
            found = self.db.execute("DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner)).rowcount
        if found:
            self.path_of(file_id).unlink(missing_ok=True)
        return bool(found)

    def is_needed(self, file_id: str) -> bool:
        """Whether a batch that is not over reads this file."""
        return any(batch.input_file_id == file_id for batch in self.open_batches())

    def usage(self, owner: str) -> tuple[int, int]:
        """Files of an owner, and their bytes."""
        sql = "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM files WHERE owner = ?"
        count, num_bytes = self.db.execute(sql, (owner,)).fetchone()
        return count, num_bytes

    # --- batches

    def add_batch(self, batch: Batch) -> Batch:
        """The batch with its number."""
        with self._transaction():
            cursor = self.db.execute(
                "INSERT INTO batches (id, owner, is_over, data) VALUES (?, ?, 0, ?)",
                (batch.id, batch.owner, msgspec.json.encode(batch)))
        assert cursor.lastrowid is not None
        return msgspec.structs.replace(batch, seq=cursor.lastrowid)

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        """None also where it is another's."""
        row = self.db.execute(f"{_BATCH} WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
        return None if row is None else _batch(row)

    def batches(self, owner: str, limit: int, after: str | None) -> list[Batch] | None:
        """A page of batches after ``after``, newest first; None where that is no batch of this owner."""
        start = self._seq_of("batches", owner, after)
        if after is not None and start is None:
            return None
        behind = "" if start is None else f"AND seq < {start:d}"
        rows = self.db.execute(f"{_BATCH} WHERE owner = ? {behind} ORDER BY seq DESC LIMIT {limit:d}", (owner,))
        return [_batch(row) for row in rows]

    def known_batch(self, seq: int) -> Batch:
        """The present state of the batch with this number, which exists."""
        return _batch(self.db.execute(f"{_BATCH} WHERE seq = ?", (seq,)).fetchone())

    def open_batches(self) -> list[Batch]:
        """The batches that are not over, oldest first."""
        return [_batch(row) for row in self.db.execute(f"{_BATCH} WHERE is_over = 0 ORDER BY seq")]

    def change(self, seq: int, change: Callable[[Batch], Batch]) -> Batch:
        """Read a batch, change it and store it in one transaction. Exceptions of ``change`` pass through."""
        with self._transaction():
            batch = change(self.known_batch(seq))
            self._keep(batch)
        return batch

    def _keep(self, batch: Batch) -> None:
        values = (batch.status in OVER, msgspec.json.encode(batch), batch.seq)
        self.db.execute("UPDATE batches SET is_over = ?, data = ? WHERE seq = ?", values)

    def end(self, batch: Batch, files: Sequence[StoredFile]) -> None:
        """Store a batch as over together with its files, all or nothing. Their bytes are in ``incoming``."""
        with self._appearing(files):
            for file in files:
                self._insert_file(file)
            self._keep(batch)
            # Lines that never ran have no results; they are in the error file and count as failed.
            failed = batch.num_lines - batch.num_completed
            self.db.execute("UPDATE batches SET num_failed = ? WHERE seq = ?", (failed, batch.seq))

    # --- results

    def add_results(self, results: Sequence[tuple[int, Result]]) -> None:
        """Add results, each with its batch's number. A line with a result keeps it; a batch that is over takes none."""
        with self._transaction():
            for seq, result in results:
                added = self.db.execute(
                    "INSERT OR IGNORE INTO results SELECT seq, ?, ?, ? FROM batches WHERE seq = ? AND is_over = 0",
                    (result.line, result.is_error, result.body, seq)).rowcount
                if added:
                    count = "num_failed" if result.is_error else "num_completed"
                    self.db.execute(f"UPDATE batches SET {count} = {count} + 1 WHERE seq = ?", (seq,))

    def done_lines(self, seq: int) -> set[int]:
        """Lines of a batch that have a result."""
        return {line for (line,) in self.db.execute("SELECT line FROM results WHERE batch = ?", (seq,))}

    def purge(self, seq: int) -> bool:
        """Remove some results of a batch that is over; returns whether there are more."""
        some = f"SELECT rowid FROM results WHERE batch = ? LIMIT {PURGE_ROWS}"
        return self.db.execute(f"DELETE FROM results WHERE rowid IN ({some})", (seq,)).rowcount == PURGE_ROWS

    def results(self, seq: int) -> Iterator[Result]:
        """All results of a batch, by line, read through a connection of its own: safe beside this store's thread."""
        with closing(sqlite3.connect(self.folder / DATABASE)) as db:
            rows = db.execute("SELECT line, is_error, body FROM results WHERE batch = ? ORDER BY line", (seq,))
            for line, is_error, body in rows:
                yield Result(line, bool(is_error), body)

    # --- notes

    def note(self, values: dict[str, float]) -> None:
        """Keep numbers by name."""
        with self._transaction():
            self.db.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?)", values.items())

    def notes(self) -> dict[str, float]:
        """All of them."""
        return dict(self.db.execute("SELECT name, value FROM notes"))

    # ---

    def _seq_of(self, table: str, owner: str, item_id: str | None) -> int | None:
        row = self.db.execute(f"SELECT seq FROM {table} WHERE id = ? AND owner = ?", (item_id, owner)).fetchone()
        return None if row is None else row[0]

    def _transaction(self) -> _Transaction:
        return _Transaction(self.db)


class _Transaction:
    """A transaction that takes its lock at once, so that reads and changes see the same data."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._db.execute("COMMIT" if kind is None else "ROLLBACK")
        except sqlite3.Error:
            if self._db.in_transaction:  # a full disk, while committing
                self._db.execute("ROLLBACK")
            if kind is None:
                raise


def _batch(row: tuple[int, int, int, bytes]) -> Batch:
    seq, num_completed, num_failed, data = row
    batch = msgspec.json.decode(data, type=Batch)
    return msgspec.structs.replace(batch, seq=seq, num_completed=num_completed, num_failed=num_failed)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it are on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
