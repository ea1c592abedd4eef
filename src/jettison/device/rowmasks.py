"""Grammars of a device's rows (``device.grammars``), loaded for the first row that has one: without any, they cost
nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from jettison.device.model.vocabulary import read_vocabulary
from jettison.device.spec import RANDOM, DeviceSpec
from jettison.device.step import RowMasks, SamplingRow

if TYPE_CHECKING:
    from jettison.device.grammars import Grammars


class DeviceMasks:
    """Of one device."""

    def __init__(self, spec: DeviceSpec, vocab_size: int) -> None:
        self._spec = spec
        self._vocab_size = vocab_size
        self._grammars: Grammars | None = None

    def begin(self, sampling: Sequence[SamplingRow]) -> RowMasks | None:
        """Begin to make the masks of a step; None where none of its rows has a grammar."""
        if not any(row.grammar is not None for row in sampling):
            return None
        if self._grammars is None:
            from jettison.device.grammars import Grammars

            own, told = self._spec.model_dir, self._spec.tokenizer_dir
            byte_tokens = self._vocab_size if self._spec.load_format == RANDOM and told is None else None
            read = partial(read_vocabulary, told or own, byte_tokens)
            self._grammars = Grammars(read, self._vocab_size)
        return self._grammars.begin(sampling)

    def close(self) -> None:
        """Idempotent."""
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None
