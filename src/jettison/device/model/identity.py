"""Which weights are being served: digests of the bytes in the slabs, whatever file they came from.

A model folder may be overwritten while it is served. What is read from it later, or comes from a peer, is the same
model only if its bytes are the same; a file's size, time and inode say nothing of that, and only help to name the file
that has changed. The digest is XXH3 of 128 bits, which keeps mistakes out: an operator who may write into the model
folder decides what is served anyway, at the next start.

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
        """Of everything so far."""
        return self._hash.hexdigest()


def digest_of(data: Any) -> Digest:
    """Digest of one piece."""
    digester = Digester()
    digester.update(data)
    return digester.digest()


def config_digest(config: DecoderConfig) -> Digest:
    """Digest of all that was read from ``config.json`` and that the arithmetic depends on: not of how it is spelt."""
    return digest_of(repr(replace(config, max_model_len=config.max_position_embeddings)).encode())


class FileMark(NamedTuple):
    """A file as the file system describes it."""

    num_bytes: int
    modified_ns: int
    """When its bytes were written; a copy that keeps times has its original's."""
    changed_ns: int
    """When it was last put in place, renamed or written, which no copy can set."""
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileMark:
        """Raises OSError."""
        stat = os.stat(path)
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


@dataclass(frozen=True, slots=True)
class WeightsIdentity:
    """What a copy of the weights, or a part of one, is."""

    digests: dict[ShardId, Digest]
    """Of each shard's slab, in the serving dtype and in the kernels' form, with zeros between its tensors."""
    final_norm: bytes
    """Itself: a few KiB, and of no shard."""
    config: Digest
    files: dict[str, FileMark]
    """Weight files in the folder when they were first read, by name."""

    @property
    def summary(self) -> Digest:
        """One digest of everything: two servers with the same one serve the same model in the same dtype."""
        lines = [f"{shard} {digest}" for shard, digest in sorted(self.digests.items())]
        return digest_of("\n".join([*lines, digest_of(self.final_norm), self.config]).encode())


def agreed_identity(model_dir: Path, parts: Iterable[WeightsIdentity]) -> WeightsIdentity:
    """The identity of a whole copy, from workers that have each read their part of the folder.

    Raises ModelError where two have read different bytes: the folder was being written meanwhile.
    """
    parts = list(parts)
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
    """When a file was last changed or put in place, for people, in local time."""
    return datetime.fromtimestamp(mark.changed_ns / 1e9).isoformat(" ", "seconds")


def explain_difference(paths: Iterable[Path], shard: ShardId, at_start: dict[str, FileMark]) -> str:
    """One line on why a shard that was read just now is not the one being served: which file, when it changed, and the
    mend. ``paths``: the files that hold the shard."""
    mend = "put the old file back, or restart the server to serve the new one"
    marks = {path: FileMark.of(path) for path in paths}
    changed = [path for path, mark in marks.items() if at_start.get(path.name) != mark]
    path = max(changed or marks, key=lambda path: marks[path].changed_ns)
    when = f"changed {changed_at(marks[path])}, after this model was loaded" if changed else "read again"
    return f"{path}: {when}; its {shard} is not the one being served: {mend}"
