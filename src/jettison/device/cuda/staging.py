"""How a step's arrays reach the card, and what it makes the host: pinned buffers each way, one copy a step in.

Two steps may be under way, so there are two pinned buffers, taken in turn. On the card there is one: a step's layers
are launched before the next step's copy, which comes behind them.

An array has the same place in each step where those before it have the same shapes, so what a graph reads may lie here:
it is put first. ``generation`` changes where the buffer had to grow and all places are new.

Not here: what the arrays mean (``rows``), and streams or events (``card``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jettison.device.cuda.card import Card, Event
from jettison.device.cuda.running import wait_for

_ALIGNMENT = 64
_STEPS_UNDER_WAY = 2
_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float64): torch.float64,
}  # fmt: skip


class Staging:
    """For two steps at a time. It takes memory when it is first used."""

    def __init__(self, card: Card, num_bytes: int) -> None:
        """``num_bytes``: what most steps need, unless ``reserve`` says more."""
        self.generation = 0
        self._card = card
        self._num_bytes = num_bytes
        self._pinned: list[Tensor] = []
        self._there = torch.empty(0, dtype=torch.uint8)
        self._copied: list[Event | None] = [None] * _STEPS_UNDER_WAY
        """Of the last copy from each pinned buffer: until then that is not written."""
        self._turn = 0

    def reserve(self, num_bytes: int) -> None:
        """Before it is used: steps may need as much."""
        self._num_bytes = max(self._num_bytes, num_bytes)

    def put(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
        """Copies on the card, by name; those of the call before are overwritten. Launches one copy, and waits for the
        last but one. Raises WorkerLostError where the card has failed."""
        places, end = _places({name: array.nbytes for name, array in arrays.items()})
        self._turn = turn = (self._turn + 1) % _STEPS_UNDER_WAY
        before = self._copied[turn]
        if before is not None:
            wait_for(before)
        pinned = self._opened(end)[turn]
        staged = pinned.numpy()
        for name, array in arrays.items():
            at = places[name]
            staged[at : at + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        self._card.copy_in(pinned[:end], self._there[:end])
        self._copied[turn] = self._card.record()
        return {
            name: self._there[at : at + arrays[name].nbytes].view(_TORCH_DTYPES[arrays[name].dtype])
            .view(arrays[name].shape)
            for name, at in places.items()
        }  # fmt: skip

    def _opened(self, num_bytes: int) -> list[Tensor]:
        if not self._pinned or num_bytes > self._there.numel():
            while self._num_bytes < num_bytes:
                self._num_bytes *= 2
            for event in filter(None, self._copied):
                wait_for(event)
            self._pinned = [self._card.pinned(self._num_bytes) for _ in range(_STEPS_UNDER_WAY)]
            self._there = self._card.empty(self._num_bytes)
            self.generation += 1
        return self._pinned


class Results:
    """What a step has made, on its way to the host."""

    def __init__(self, card: Card, num_bytes: int) -> None:
        self._card = card
        self._num_bytes = num_bytes
        self._pinned: list[Tensor | None] = [None] * _STEPS_UNDER_WAY
        self._turn = 0

    def fetch(self, tensors: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
        """Arrays on the host, by name, that have their contents once all that was launched is over, and until the call
        after the next one, which comes after that. Launches a copy for each."""
        places, end = _places({name: tensor.nbytes for name, tensor in tensors.items()})
        self._turn = turn = (self._turn + 1) % _STEPS_UNDER_WAY
        pinned = self._pinned[turn]
        if pinned is None or end > pinned.numel():
            self._num_bytes = max(end, self._num_bytes)
            pinned = self._pinned[turn] = self._card.pinned(self._num_bytes)
        fetched = {}
        for name, tensor in tensors.items():
            piece = pinned[places[name] : places[name] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._card.copy_out(tensor.contiguous(), piece)
            fetched[name] = piece.numpy()
        return fetched


def _places(num_bytes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each array begins, and where the last one ends."""
    places, end = {}, 0
    for name, size in num_bytes.items():
        at = -(-end // _ALIGNMENT) * _ALIGNMENT
        places[name], end = at, at + size
    return places, end
