"""Words of ``--overload``, known before the code that they name is loaded.

A rung of the core's ladder adds its name here when it is registered (``core.ladder.rung``), so that a user's own policy
is a word like the others.
"""

from __future__ import annotations

from typing import NamedTuple

from jettison.config.values import did_you_mean


class OverloadWord(NamedTuple):
    """The properties of one word that the configuration needs."""

    uses_host_pool: bool = False
    """Whether the rung keeps KV in host memory: ``--host-memory auto`` is then as much as ``--memory``. Without such a
    word it is 0, unless offline checkpoints need the host memory."""


_WORDS: dict[str, OverloadWord] = {
    "drop": OverloadWord(), "recompute": OverloadWord(), "swap": OverloadWord(uses_host_pool=True),
    "migrate": OverloadWord(), "pipeline": OverloadWord(),
}


def add_overload_word(name: str, word: OverloadWord) -> None:
    """Add a word. A known word keeps its properties."""
    _WORDS.setdefault(name, word)


def overload_words(text: str) -> tuple[str, ...]:
    """The words of a list such as ``swap+migrate+drop``, in the order given."""
    return tuple(part.strip() for part in text.split("+"))


def overload_list(value: object) -> str:
    """One word, or several joined with ``+``. Raises ValueError for an unknown word."""
    if not isinstance(value, str):
        raise ValueError(f"must be a word such as drop, or several as swap+drop, not {value!r}")
    for word in overload_words(value):
        if word not in _WORDS:
            *some, last = _WORDS
            raise ValueError(
                f"must be {', '.join(some)} or {last}, or several of them with +, not {value!r}"
                f"{did_you_mean(word, tuple(_WORDS))}"
            )
    return "+".join(overload_words(value))


def uses_host_pool(text: str) -> bool:
    """Whether some word of a list keeps KV in host memory."""
    return any(_WORDS[word].uses_host_pool for word in overload_words(text))
