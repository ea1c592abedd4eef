"""The NVIDIA cards of this machine: seen through NVML, or the kernel's files, so that no context is opened on a card.

A context takes half a gigabyte of a card and a second of time, and a process that has one cannot fork: the controller
never opens one. Cards are numbered as ``nvidia-smi`` lists them, and ``CUDA_VISIBLE_DEVICES`` counts as it does for
CUDA. Not here: which instance uses which card (``jettison.config.devices``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from importlib import util
from pathlib import Path
from typing import NamedTuple

from jettison.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_EXTRA = "pip install 'jettison[cuda]'"


class Card(NamedTuple):
    """One card, or one part of a card that was divided (MIG)."""

    uuid: str
    """By which CUDA knows it everywhere: a value of ``CUDA_VISIBLE_DEVICES``."""
    name: str


class CardMemory(NamedTuple):
    """A card's memory now, in bytes."""

    total_bytes: int
    used_bytes: int
    """By all processes, and by the driver."""


def visible_cards(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[Card]:
    """The cards that CUDA shows to this process; empty where there is no driver. Numbers count in the order of the bus,
    as with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; CUDA's own default puts the fastest card first where cards are unlike.

    ``root``: of the file system that has ``proc``, asked where NVML is missing.
    """
    nvml = _nvml()
    cards = _cards_of_proc(root) if nvml is None else nvml.cards()
    told = environ.get(VISIBLE)
    return cards if told is None else _chosen(cards, told)


def _chosen(cards: list[Card], told: str) -> list[Card]:
    """As CUDA reads the variable: up to the first entry that is none of the cards, or that has been named before."""
    chosen: list[Card] = []
    for word in (part.strip() for part in told.split(",")):
        if word.isdecimal():
            found = cards[int(word) :][:1]
        elif word.startswith("MIG-"):  # NVML lists whole cards
            found = [Card(word, "MIG device")] if cards else []
        else:
            found = [card for card in cards if word and card.uuid.startswith(word)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen


def card_memory(card: Card) -> CardMemory | None:
    """None where NVML does not tell."""
    nvml = _nvml()
    return None if nvml is None else nvml.memory(card.uuid)


def missing_software() -> str | None:
    """What a worker on a card needs and this installation lacks, in one line; None where nothing is missing. Imports
    nothing."""
    torch = util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "PyTorch is not installed"
    if not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():  # versions do not always tell
        return "PyTorch is built without CUDA: install one that has it"
    try:
        has_bindings = util.find_spec("cuda.bindings") is not None
    except ImportError:  # there is no package ``cuda``
        has_bindings = False
    lacks = [name for name, has in (("triton", util.find_spec("triton")), ("cuda-bindings", has_bindings)) if not has]
    return f"{' and '.join(lacks)} not installed: {_EXTRA}" if lacks else None


def check_cards(cards: list[Card], environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where none of ``cards`` could be used: no driver, none visible, or software that is missing."""
    if not cards:
        told = environ.get(VISIBLE)
        seen = visible_cards({})
        if seen and told is not None:
            raise ConfigError(f"--device cuda: {VISIBLE}={told!r} shows none of the {len(seen)} cards of this machine")
        raise ConfigError("--device cuda: no NVIDIA driver and card on this machine (is nvidia-smi silent, too?)")
    if (missing := missing_software()) is not None:
        raise ConfigError(f"--device cuda: {missing}")


# --- NVML


class _MemoryInfo(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Nvml:
    """An initialised library. Calls that fail give nothing."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def cards(self) -> list[Card]:
        count = ctypes.c_uint(0)
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        cards = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                break  # a card that is lost: CUDA counts differently from here on
            cards.append(Card(self._text("nvmlDeviceGetUUID", handle), self._text("nvmlDeviceGetName", handle)))
        return cards

    def memory(self, uuid: str) -> CardMemory | None:
        handle, info = ctypes.c_void_p(), _MemoryInfo()
        if self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return None
        if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(info)):
            return None
        return CardMemory(info.total, info.used)

    def _text(self, name: str, handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(96)
        return "" if getattr(self._library, name)(handle, text, len(text)) else text.value.decode(errors="replace")


@cache
def _nvml() -> _Nvml | None:
    """The driver's library for management, opened once; None where there is none, or no driver that answers it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else _Nvml(library)


def _cards_of_proc(root: Path) -> list[Card]:
    """What the kernel's module shows, in the order of the bus."""
    cards = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = dict(line.partition(":")[::2] for line in file.read_text(errors="replace").splitlines())
        if uuid := lines.get("GPU UUID", "").strip():
            cards.append(Card(uuid, lines.get("Model", "").strip()))
    return cards
