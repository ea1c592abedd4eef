"""The cards that instances use: which process sees which, what is wrong where there is none, and their memory now.

No call here opens a context on a card (``jettison.config.cards``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jettison.config import EngineConfig
from jettison.config.cards import VISIBLE, Card, card_memory, check_cards, missing_software, visible_cards
from jettison.device.spec import CUDA, HOST
from jettison.errors import ConfigError
from jettison.live.engine.api import WorkerSnapshot
from jettison.memory.kvtransfers import MAX_PIECE_BYTES

BACK_ENDS = {"cpu": HOST, "cuda": CUDA}
"""By ``--device``: the back end of its devices."""
PIECE_BYTES = {"cpu": MAX_PIECE_BYTES, "cuda": 8 << 20}
"""By ``--device``: the most that a bulk piece has where no flag says otherwise. On a card a piece is one launch and one
wait, which take as long as copying some 2 MiB; the whole takes 0.4 ms, which an activation may wait."""


def cards_of(config: EngineConfig) -> list[Card]:
    """The card of each instance; empty on the cpu. Raises ConfigError where there is no such card, or software that a
    worker on it needs is missing."""
    if config.devices.kind == "cpu":
        return []
    cards = visible_cards()
    check_cards(cards)
    numbers = config.devices.cards
    if not numbers:
        raise ConfigError("--device cuda: no card was seen when the settings were read: give --cards")
    if max(numbers) >= len(cards):
        raise ConfigError(f"--cards names card {max(numbers)}, and {len(cards)} are visible: 0 is the first")
    return [cards[number] for number in numbers]


def environment(card: Card | None) -> dict[str, str]:
    """Variables of a worker's process, set before it loads CUDA: it sees its own card, and no other."""
    return {} if card is None else {VISIBLE: card.uuid}


def unused_cards(config: EngineConfig) -> str | None:
    """A warning where ``--device auto`` could not take the cards that there are."""
    if config.devices.kind != "cpu" or config.provenance.get("device", "default") != "default":
        return None
    cards = visible_cards()
    missing = missing_software() if cards else None
    return None if missing is None else f"{len(cards)} card(s) ({cards[0].name}) are not used: {missing}"


@dataclass(frozen=True, slots=True)
class CardUse:
    """A card's memory, in bytes."""

    number: int
    """As in ``--cards``."""
    name: str
    total_bytes: int
    pages_bytes: int
    """Of the instances' pages, whatever they hold."""
    others_bytes: int
    """All else that is in use: contexts of workers, other processes, the driver's own."""

    @property
    def free_bytes(self) -> int:
        """Of no process."""
        return self.total_bytes - self.pages_bytes - self.others_bytes


def watch_cards(config: EngineConfig, workers: Callable[[], Sequence[WorkerSnapshot]]) -> Callable[[], list[CardUse]]:
    """A look at the cards of an engine's instances, to be called again and again. Raises ConfigError like
    ``cards_of``."""
    of_instance = cards_of(config)
    cards = dict(zip(config.devices.cards, of_instance))

    def look() -> list[CardUse]:
        pages_bytes = Counter[int]()
        for worker in workers() if cards else ():
            pages_bytes[config.devices.cards[worker.worker_id]] += worker.held_bytes * worker.alive
        return card_uses(cards, pages_bytes)

    return look


def card_uses(cards: Mapping[int, Card], pages_bytes: Mapping[int, int]) -> list[CardUse]:
    """The cards by number, and what instances have of each; without those that NVML does not tell of."""
    uses = []
    for number, card in sorted(cards.items()):
        if (memory := card_memory(card)) is not None:
            pages = min(pages_bytes.get(number, 0), memory.used_bytes)
            uses.append(CardUse(number, card.name, memory.total_bytes, pages, memory.used_bytes - pages))
    return uses
