"""What a flag of vLLM becomes here: one of four verdicts, with the reason.

``done``: our flag of the same name means the same. ``mapped``: the value is said in another way here. ``harmless``:
answers, API and protection are the same without it; the log says so in one line. ``refused``: they would not be.
A value that is vLLM's own default is never refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from jettison.config.vllm.facts import Fact

Verdict = Literal["done", "mapped", "harmless", "refused"]


@dataclass(frozen=True, slots=True)
class Keep:
    """The flag is one of ours, and stays as it was written."""


@dataclass(frozen=True, slots=True)
class Set:
    """A value for one of our keys."""

    key: str
    value: object
    note: str = ""
    """What the log is to say of it; empty for nothing."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Without effect here."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The caller has to leave it out, or say something else."""

    why: str


Outcome = Keep | Set | Drop | Refuse
Act = Callable[[object], Outcome]
"""Takes the value: a text or a value of YAML, a list of them, or whether a switch is on."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One flag of vLLM."""

    name: str
    verdict: Verdict
    meaning: str
    """What it is for, in a few words of our own."""
    answer: str
    """For the table: why it is without effect or refused, or what it becomes."""
    act: Act


def done(flags: Mapping[str, str], answer: str = "") -> tuple[Rule, ...]:
    """Flags that are ours."""
    return tuple(Rule(name, "done", meaning, answer, lambda _: Keep()) for name, meaning in flags.items())


def harmless(why: str, flags: Mapping[str, str]) -> tuple[Rule, ...]:
    """Flags without effect, for one reason."""
    return tuple(Rule(name, "harmless", meaning, why, lambda _: Drop(why)) for name, meaning in flags.items())


def refused(why: str, flags: Mapping[str, str]) -> tuple[Rule, ...]:
    """Flags that do not fit, for one reason."""
    return tuple(Rule(name, "refused", meaning, why, lambda _: Refuse(why)) for name, meaning in flags.items())


def mapped(name: str, meaning: str, answer: str, act: Act) -> Rule:
    """A flag whose value is said in another way."""
    return Rule(name, "mapped", meaning, answer, act)


def by_word(taken: Mapping[str, Outcome], why: str) -> Act:
    """By the value as a word in lower case; every other value is refused with ``why``."""
    return lambda value: taken.get(str(value).strip().lower(), Refuse(why))


def renamed(key: str) -> Act:
    """The value, as it is, under our key."""
    return lambda value: Set(key, value)


def is_neutral(fact: Fact, value: object) -> bool:
    """Whether the value is what vLLM takes without the flag."""
    if fact.kind in ("switch", "boolean"):
        return value == bool(fact.default)
    if value is None or value in ("", "None", "{}", {}, []):
        return True
    if fact.default is None:
        return False
    if isinstance(fact.default, (int, float)) and not isinstance(fact.default, bool):
        try:
            return float(str(value)) == fact.default
        except ValueError:
            return False
    return str(value).strip().lower() == str(fact.default).lower()
