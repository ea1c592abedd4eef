"""Keys of the devices that instances run on: the processor, or cards, and an instance's share of a card.

``settle`` fills in what follows from the machine; ``jettison.config.cards`` looks at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jettison.config.cards import VISIBLE, Card, card_memory, missing_software, visible_cards
from jettison.config.sections import DEFAULT_MEMORY_BYTES, DEFAULT_PAGE_BYTES, config_key
from jettison.config.values import Choice, format_bytes, machine_list
from jettison.errors import BudgetError, ConfigError

Device = Literal["auto", "cpu", "cuda"]

DEFAULT_UTILIZATION = 0.9
"""vLLM's."""
CONTEXT_BYTES = 1 << 30
"""Of a card, for each process on it: CUDA's context, code of kernels, the libraries' workspaces, captured graphs."""
CARD_PAGE_BYTES = 2 << 20
"""Pages of a card are multiples of this: the driver's granularity on every card that has virtual memory management."""
MOST_HOST_BYTES = 4 << 30
"""Of an instance on a card, where its host memory is not told: beside a card's memory the host's may be small."""

LookForCards = Callable[[], Sequence[Card]]


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """What instances run on."""

    kind: Device = config_key(
        "auto", Choice(Device), "What instances run on (auto: cuda where an NVIDIA card is visible and what it takes "
        "is installed, unless --dtype is float64 or --kernels are the cpu's; else cpu).", name="device", bare="cpu")
    cards: tuple[int, ...] = config_key(
        (), machine_list, f"cuda: the card of each instance, in order (0,0,1,1); card 0 is the first that {VISIBLE} "
        "shows, and instances of one card share it (auto: instance i on card i mod their number).",
        metavar="N,N", unset="auto")


def settle(values: dict[str, Any], look: LookForCards | None) -> tuple[str, ...]:
    """Resolve ``device``, ``cards``, and the keys of memory that depend on them; returns lines for the log.

    ``look`` finds cards for ``auto`` (None: none is looked for) and for ``cuda`` (None: as this process sees them).
    Raises ConfigError, BudgetError. No card need be there: what cannot be known stays as it is, and is asked for where
    an engine is assembled.
    """
    cards: Sequence[Card] = ()
    is_told = values["device"] != "auto"
    if not is_told:
        cards = look() if look is not None and not _is_for_the_cpu(values) else ()
        values["device"] = "cuda" if cards and missing_software() is None else "cpu"
    elif values["device"] == "cuda":
        cards = (look or visible_cards)()
    if values["device"] == "cpu":
        return _settle_processor(values, is_told)
    num_instances = values["max_instances"] or values["instances"]
    if not values["cards"]:
        values["cards"] = tuple(i % len(cards) for i in range(num_instances)) if cards else ()
    elif len(values["cards"]) != num_instances:
        raise ConfigError(f"--cards names {len(values['cards'])} card(s) for --instances {num_instances}")
    elif cards and max(values["cards"]) >= len(cards):
        raise ConfigError(f"--cards names card {max(values['cards'])}, and {len(cards)} are visible: 0 is the first")
    _settle_memory(values, cards)
    page_bytes = values["page_size"]
    if page_bytes is not None and page_bytes % CARD_PAGE_BYTES:
        raise ConfigError(f"--page-size {format_bytes(page_bytes)}: pages of a card are multiples of 2MiB")
    return ()


def _is_for_the_cpu(values: dict[str, Any]) -> bool:
    return values["dtype"] == "float64" or values["kernels"] not in ("auto", "cuda", "cuda-invariant")


def _settle_processor(values: dict[str, Any], is_told: bool) -> tuple[str, ...]:
    """``is_told``: --device cpu was said. Else a share of a card may come from a line for machines that have one."""
    notes: tuple[str, ...] = ()
    if values["gpu_memory_utilization"] and not is_told:
        notes = ("--gpu-memory-utilization is for cards, and none is used: --memory bounds an instance on the cpu",)
        values["gpu_memory_utilization"] = None
    for name, flag in (("cards", "--cards"), ("gpu_memory_utilization", "--gpu-memory-utilization")):
        if values[name]:
            raise ConfigError(f"{flag} is for --device cuda, and instances run on the cpu")
    values["cards"] = ()
    values["memory"] = values["memory"] or DEFAULT_MEMORY_BYTES
    page_bytes = values["page_size"] = values["page_size"] or DEFAULT_PAGE_BYTES
    if page_bytes & (page_bytes - 1):
        raise ConfigError(f"--page-size must be a power of two on the cpu, not {page_bytes}")
    return notes


def _settle_memory(values: dict[str, Any], cards: Sequence[Card]) -> None:
    """The memory of an instance: as told, or its part of what ``gpu_memory_utilization`` leaves."""
    if values["memory"] is not None:
        if values["gpu_memory_utilization"] is not None:
            raise ConfigError("--gpu-memory-utilization and --memory say the same in two ways: give one of them")
        return
    share = values["gpu_memory_utilization"] = values["gpu_memory_utilization"] or DEFAULT_UTILIZATION
    found = [
        _bytes_of_share(share, cards[number], number, num_instances)
        for number, num_instances in Counter(values["cards"]).items() if number < len(cards)
    ]
    values["memory"] = min(found, default=DEFAULT_MEMORY_BYTES)  # without a card nothing starts


def _bytes_of_share(share: float, card: Card, number: int, num_instances: int) -> int:
    memory = card_memory(card)
    if memory is None:
        raise ConfigError(f"NVML does not tell the memory of card {number} ({card.name}): give --memory SIZE")
    room = int(memory.total_bytes * share) - memory.used_bytes
    each = room // num_instances - CONTEXT_BYTES
    if each <= 0:
        raise BudgetError(
            f"--gpu-memory-utilization {share:g} of card {number} ({card.name}, {_gib(memory.total_bytes)}), of which "
            f"{_gib(memory.used_bytes)} are in use, leaves nothing for {num_instances} instance(s), each with "
            f"{_gib(CONTEXT_BYTES)} for its process"
        )
    return each // CARD_PAGE_BYTES * CARD_PAGE_BYTES


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
