"""The identity of the served weights: digests of the bytes in the slabs, whatever file they came from.

A model folder may be overwritten while it is served. Bytes read from it later, or sent by a peer, belong to the same
model only if they are equal. A file's size, time and inode do not prove that, and only help to name a changed file. The
digest is XXH3 of 128 bits, which detects mistakes, not attacks: an operator with write access to the model folder
decides what is served anyway, at the next start.

No torch: peers' bytes are hashed as they arrive.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from jettison.device.bytesview import as_numpy_uint8
from jettison.device.model.hf_config import DecoderConfig
from jettison.errors import ModelError
from jettison.types import ShardId

Digest = str
"""Hexadecimal."""


class Digester:
    """A digest of bytes that come in pieces, in order."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, data: Any) -> None:
        """The next bytes: a contiguous tensor, an array or bytes."""
        self._hash.update(memoryview(data) if isinstance(data, bytes) else as_numpy_uint8(data).data)

    def digest(self) -> Digest:
        """The digest of all bytes so far."""
        return self._hash.hexdigest()


def digest_of(data: Any) -> Digest:
    """Digest of one piece."""
    digester = Digester()
    digester.update(data)
    return digester.digest()


def config_digest(config: DecoderConfig) -> Digest:
    """Digest of the values of ``config.json`` that the arithmetic depends on, independent of their spelling."""
    return digest_of(repr(replace(config, max_model_len=config.max_position_embeddings)).encode())


class FileMark(NamedTuple):
    """A file as the file system describes it."""

    num_bytes: int
    modified_ns: int
    """Time of the last write; a copy that keeps times has its original's."""
    changed_ns: int
    """Time at which it was last put in place, renamed or written, which no copy can set."""
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileMark:
        """Raises OSError."""
        stat = os.stat(path)
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


@dataclass(frozen=True, slots=True)
class WeightsIdentity:
    """The identity of a copy of the weights, or of a part of one."""

    digests: dict[ShardId, Digest]
    """Digest of each shard's slab, in the serving dtype and in the kernels' form, with zeros between its tensors."""
    final_norm: bytes
    """The norm itself: a few KiB, which belong to no shard."""
    config: Digest
    files: dict[str, FileMark]
    """Weight files in the folder when they were first read, by name."""

    @property
    def summary(self) -> Digest:
        """One digest of everything: two servers with equal digests serve the same model in the same dtype."""
        lines = [f"{shard} {digest}" for shard, digest in sorted(self.digests.items())]
        return digest_of("\n".join([*lines, digest_of(self.final_norm), self.config]).encode())


def agreed_identity(model_dir: Path, parts: Iterable[WeightsIdentity]) -> WeightsIdentity:
    """The identity of a whole copy, from workers that have each read a part of the folder.

    Raises ModelError where two workers have read different bytes, because the folder was being written meanwhile, and
    where none has read any.
    """
    parts = list(parts)
    if not parts:
        raise ModelError(f"{model_dir}: no host that a worker runs on has this folder; one must have it")
    digests: dict[ShardId, Digest] = {}
    for part in parts:
        for shard, digest in part.digests.items():
            if digests.setdefault(shard, digest) != digest:
                raise _changed_meanwhile(model_dir, shard, part)
        if part.final_norm != parts[0].final_norm:
            raise _changed_meanwhile(model_dir, "the final norm", part)
    return replace(parts[0], digests=digests)


def _changed_meanwhile(model_dir: Path, what: str, part: WeightsIdentity) -> ModelError:
    newest = max(part.files, key=lambda name: part.files[name].changed_ns)
    when = changed_at(part.files[newest])
    return ModelError(
        f"{model_dir / newest}: changed {when}; two workers have read different bytes of {what}, so the folder was "
        "being changed while it was loaded: start again when it is complete"
    )


def changed_at(mark: FileMark) -> str:
    """Time of a file's last change or placement, for people, in local time."""
    return datetime.fromtimestamp(mark.changed_ns / 1e9).isoformat(" ", "seconds")


def explain_difference(paths: Iterable[Path], shard: ShardId, at_start: dict[str, FileMark]) -> str:
    """One line on why a shard just read differs from the served one: the file, the time of its change, and the remedy.
    ``paths``: the files that hold the shard."""
    mend = "put the old file back, or restart the server to serve the new one"
    marks = {path: FileMark.of(path) for path in paths}
    changed = [path for path, mark in marks.items() if at_start.get(path.name) != mark]
    path = max(changed or marks, key=lambda path: marks[path].changed_ns)
    when = f"changed {changed_at(marks[path])}, after this model was loaded" if changed else "read again"
    return f"{path}: {when}; its {shard} is not the one being served: {mend}"
