"""Words of ``--overload``, known before anything that they name is loaded.

A rung of the core's ladder makes its name known here when it is registered (``core.ladder.rung``), so that a policy of
one's own is a word like the others.
"""

from __future__ import annotations

from typing import NamedTuple

from jettison.config.values import did_you_mean


class OverloadWord(NamedTuple):
    """What the configuration has to know of one word."""

    uses_host_pool: bool = False
    """It keeps KV in host memory: ``--host-memory auto`` is as much as ``--memory``, and 0 without such a word."""


_WORDS: dict[str, OverloadWord] = {
    "drop": OverloadWord(), "recompute": OverloadWord(), "swap": OverloadWord(uses_host_pool=True),
    "migrate": OverloadWord(), "pipeline": OverloadWord(),
}


def add_overload_word(name: str, word: OverloadWord) -> None:
    """Make a word known. One that is known keeps its meaning."""
    _WORDS.setdefault(name, word)


def overload_words(text: str) -> tuple[str, ...]:
    """Of ``swap+migrate+drop``, in the order given."""
    return tuple(part.strip() for part in text.split("+"))


def overload_list(value: object) -> str:
    """One word, or several with ``+``. Raises ValueError for what is none."""
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
    """Some word of a list keeps KV in host memory."""
    return any(_WORDS[word].uses_host_pool for word in overload_words(text))
