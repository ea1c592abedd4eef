"""A line or a mapping of vLLM's flags as one of ours, with all that does not fit told at once.

``translate_line`` takes words of a command line, as vLLM's parser reads them: dashes or underscores, ``--flag=value``,
several values behind one flag, ``--no-`` twins, short names, beginnings of names, ``-O3``, and parts of a JSON value as
``--flag.part value``. ``translate_values`` takes a YAML file's keys or keywords of a call. Our own flags pass through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jettison.config.values import did_you_mean
from jettison.config.vllm.facts import Fact, known_aliases, known_flags, version
from jettison.config.vllm.rules import Drop, Keep, Outcome, Refuse, Rule, Set, is_neutral
from jettison.config.vllm.serving_rules import NO_IMAGES, NO_LORA, NO_POOLING, ONLY_GENERATES
from jettison.config.vllm.table import RULES
from jettison.errors import ConfigError

LEFT_OUT = (
    (("--lora", "--enable-lora", "--max-lora", "--adapter"), NO_LORA),
    (("--pooling", "--embedding", "--rerank"), NO_POOLING),
    (("--mmproj", "--image"), NO_IMAGES),
    (("--embed",), ONLY_GENERATES),
)
"""Beginnings of flags that other servers have for what is left out here, and why there is none."""

_LONG_VALUE = 60
"""Characters from which on a message names a flag without its value."""
_NUMBER = re.compile(r"-\d+(\.\d+)?")


@dataclass(slots=True)
class Reasons:
    """Flags by reason, in the order in which they were met."""

    flags: dict[str, list[str]] = field(default_factory=dict)

    def add(self, why: str, flag: str) -> None:
        """Each flag is told once for a reason."""
        told = self.flags.setdefault(why, [])
        if flag not in told:
            told.append(flag)

    def include(self, others: Reasons) -> None:
        """Add those of another place."""
        for why, told in others.flags.items():
            for flag in told:
                self.add(why, flag)

    def __bool__(self) -> bool:
        return bool(self.flags)

    def __str__(self) -> str:
        return "; ".join(f"{', '.join(flags)}: {why}" for why, flags in self.flags.items())


@dataclass(slots=True)
class Translation:
    """What was said, as our own parser takes it."""

    line: list[str] = field(default_factory=list)
    values: dict[Any, Any] = field(default_factory=dict)
    """Of a mapping, instead of ``line``."""
    origins: dict[Any, Any] = field(default_factory=dict)
    """Key of ``values`` -> the key as it was written, where these differ."""
    notes: Reasons = field(default_factory=Reasons)
    """Without effect, or with another one than in vLLM."""
    refusals: Reasons = field(default_factory=Reasons)

    def check(self) -> None:
        """Raise ConfigError where something does not fit: one line with all of it."""
        if self.refusals:
            raise ConfigError(str(self.refusals))


def note_of(reasons: Reasons) -> tuple[str, ...]:
    """A line for the log; none where there is nothing to say."""
    return (f"flags of vLLM that have another effect here, or none: {reasons}",) if reasons else ()


@dataclass(slots=True)
class _Said:
    rule: Rule
    fact: Fact
    written: str
    values: list[Any]
    is_json: bool = False

    @property
    def value(self) -> Any:
        """The one value, or all of a list."""
        if self.is_json or len(self.values) == 1:
            return self.values[0]
        return self.values or None


def decide(rule: Rule, fact: Fact, value: object, ours: Collection[str]) -> Outcome:
    """What becomes of a flag with a value; ``ours``: flags that there are here."""
    if rule.verdict == "mapped":
        return Drop() if value is None else rule.act(_decoded(value))
    if rule.name in ours:
        return rule.act(value) if rule.verdict == "done" else Keep()
    if rule.verdict == "done":
        return Refuse(f"this build has no {rule.name}")  # never dropped: what it asks for would not be done
    return Drop() if is_neutral(fact, value) else rule.act(_decoded(value))


def _decoded(value: object) -> object:
    """A JSON object that was written as a text."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


# --- command lines


def translate_line(words: Sequence[str], options: Mapping[str, bool], num_places: int = 1) -> Translation:
    """``options``: our own, each with whether it takes a value; ``num_places``: arguments that are no options.

    Values behind the first of a flag are its own only behind all of these arguments: elsewhere they are one of them.
    """
    found = Translation()
    if any(word in ("-h", "--help") or word.startswith("--help=") for word in words):
        found.line = ["--help"]
        return found
    walk = _Walk(words, options, num_places, found)
    said = walk.run()
    for each in said:
        _settle_said(each, options, walk, found)
    found.line += walk.places + walk.rest
    return found


def _settle_said(each: _Said, options: Mapping[str, bool], walk: _Walk, found: Translation) -> None:
    flag = each.rule.name
    match decide(each.rule, each.fact, each.value, options):
        case Keep():
            found.line += _kept(each)
        case Set("model", value, _):
            if len(walk.places) > walk.num_places:
                found.refusals.add("the model is named twice", each.written)
            elif len(walk.places) < walk.num_places:
                found.refusals.add("what stands before the model is missing", each.written)
            walk.places.append(str(value))
        case Set(key, value, note):
            ours = f"--{key.replace('_', '-')}"
            if ours in walk.own and ours != flag:
                found.notes.add(f"{ours} says it", each.written)
            elif value is not None:
                found.line.append(f"{ours}={_shown(value)}")
            if note:
                found.notes.add(note, each.written)
        case Drop(note):
            if note:
                found.notes.add(note, each.written)
        case Refuse(why):
            found.refusals.add(why, each.written)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _kept(each: _Said) -> list[str]:
    if each.fact.kind in ("switch", "boolean"):
        name = each.rule.name
        return [name if each.value else f"--no-{name.removeprefix('--')}"]
    return [f"{each.rule.name}={_shown(value)}" for value in each.values]


class _Walk:
    """Goes through the words once."""

    def __init__(
        self, words: Sequence[str], options: Mapping[str, bool], num_places: int, found: Translation
    ) -> None:
        self._words = list(words)
        self._at = 0
        self._options = options
        named = any(word == "--model" or word.startswith("--model=") for word in words)
        self.num_places = num_places - named
        """Of arguments that are no options, beside a model that a flag names."""
        self._found = found
        self._said: list[_Said] = []
        self.places: list[str] = []
        """Arguments that are no options."""
        self.rest: list[str] = []
        """``--`` and what stands behind it."""
        self.own: set[str] = set()
        """Our flags that are not vLLM's."""

    def run(self) -> list[_Said]:
        """All of vLLM's flags that were said."""
        while self._at < len(self._words):
            word = self._words[self._at]
            self._at += 1
            if word == "--":
                self.rest = self._words[self._at - 1 :]
                break
            if not word.startswith("-") or word == "-":
                self.places.append(word)
            elif word[:2] in self._options and not word.startswith("--"):
                self._found.line.append(word)
                if len(word) == 2 and self._options[word] and self._at < len(self._words):
                    self._found.line.append(self._next())
            elif word.startswith("-O") and not word.startswith("--"):
                self._optimization(word)
            else:
                self._flag(word)
        return self._said

    def _optimization(self, word: str) -> None:
        level = word[2:].removeprefix("=")
        if not level and self._has_value():
            level = self._next()
        name = "--optimization-level"
        self._said.append(_Said(RULES[name], known_flags()[name], word, [level]))

    def _flag(self, word: str) -> None:
        name, has_text, text = word.partition("=")
        name, dot, part = name.partition(".")
        name = name.replace("_", "-")
        known, is_on = self._known(name)
        if known is None:
            self._own_or_unknown(name + dot + part, text if has_text else None)
            return
        rule, fact = RULES[known], known_flags()[known]
        if dot:
            self._part(rule, fact, name, part, text if has_text else None)
        elif fact.kind in ("switch", "boolean"):
            value = is_on if not has_text else text.strip().lower() not in ("false", "0", "no", "off")
            self._said.append(_Said(rule, fact, name if is_on else f"--no-{known.removeprefix('--')}", [value]))
        else:
            values = [text] if has_text else [self._next()] if self._has_value() else []
            while fact.kind == "values" and not has_text and values and len(self.places) >= self.num_places:
                if not self._has_value():
                    break
                values.append(self._next())
            if not values and known != "--hf-token":
                self._found.refusals.add("needs a value", name)
                return
            is_short = bool(values) and len(values[0]) < _LONG_VALUE and not values[0].lstrip().startswith(("{", "["))
            shown = f"{name} {values[0]}" if is_short and not _is_secret(known) else name
            self._said.append(_Said(rule, fact, shown, list(values)))

    def _known(self, name: str) -> tuple[str | None, bool]:
        """The flag of vLLM that a word means, and whether it is switched on by it."""
        flags = known_flags()
        if name in RULES:
            return name, True
        if name in known_aliases():
            return known_aliases()[name], True
        if name.startswith("--no-") and (twin := f"--{name.removeprefix('--no-')}") in flags:
            return (twin, False) if flags[twin].kind == "boolean" else (None, True)
        if name.startswith("--") and name not in self._options and len(name) > 5:
            begun = {flag for flag in (*flags, *self._options) if flag.startswith(name)}
            if len(begun) == 1 and (flag := begun.pop()) in flags:
                return flag, True
        return None, True

    def _own_or_unknown(self, name: str, text: str | None) -> None:
        if name in self._options:
            self.own.add(name)
            self._found.line.append(name if text is None else f"{name}={text}")
            if self._options[name] and text is None:
                if self._has_value():
                    self._found.line.append(self._next())
                else:
                    self._found.refusals.add("needs a value", name)
            return
        reason = next((why for begins, why in LEFT_OUT if name.startswith(begins)), None)
        if reason is None:
            hint = did_you_mean(name, (*self._options, *known_flags()))
            reason = f"no such option, here or in vLLM {version()}{hint}"
        self._found.refusals.add(reason, name)
        if text is None and self._has_value() and len(self.places) >= self.num_places:
            self._next()

    def _part(self, rule: Rule, fact: Fact, name: str, part: str, text: str | None) -> None:
        """A part of a JSON value: ``--flag.a.b value``; with ``+`` at its end more of a list."""
        if text is None:
            text = self._next() if self._at < len(self._words) else ""
        value: Any = text.split(",") if part.endswith("+") else _read(text)
        for key in reversed(part.removesuffix("+").split(".")):
            value = {key: value}
        said = next((each for each in self._said if each.rule is rule and each.is_json), None)
        if said is None:
            said = _Said(rule, fact, name, [{}], is_json=True)
            self._said.append(said)
        _merge(said.values[0], value)

    def _has_value(self) -> bool:
        """Whether the next word can be a value."""
        if self._at >= len(self._words):
            return False
        word = self._words[self._at]
        return not word.startswith("-") or word == "-" or _NUMBER.fullmatch(word) is not None

    def _next(self) -> str:
        self._at += 1
        return self._words[self._at - 1]


def _is_secret(flag: str) -> bool:
    return flag in ("--hf-token", "--api-key")


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif isinstance(value, list) and isinstance(into.get(key), list):
            into[key] += value
        else:
            into[key] = value


# --- files and keywords


def translate_values(
    mapping: Mapping[Any, Any], ours: Collection[str], place_of: Callable[[object], str] | None = None
) -> Translation:
    """``ours``: names of our keys, with underscores. What no list knows is kept, for our own message about it."""
    found = Translation()
    flags = frozenset(f"--{name.replace('_', '-')}" for name in ours)
    for written, value in mapping.items():
        name = f"--{written.replace('_', '-')}" if isinstance(written, str) else ""
        name = known_aliases().get(name, name)
        if name not in RULES:
            found.values[written] = value
            continue
        where = "" if place_of is None else f" ({place_of(written)})"
        for key, kept in _settle_value(name, written, value, flags, found, where):
            if key != written and any(_same_key(key, other) for other in mapping):
                found.notes.add(f"{key} says it", f"{written}{where}")
            else:
                found.values[key] = kept
                found.origins[key] = written
    return found


def _settle_value(
    name: str, written: str, value: Any, flags: Collection[str], found: Translation, where: str
) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    match decide(RULES[name], known_flags()[name], value, flags):
        case Keep():
            yield written, value
        case Set(key, kept, note):
            if note:
                found.notes.add(note, f"{written}{where}")
            if kept is not None:
                yield (written if _same_key(key, written) else key), kept
        case Drop(note):
            if note:
                found.notes.add(note, f"{written}{where}")
        case Refuse(why):
            found.refusals.add(why, f"{written}{where}")


def _same_key(first: object, second: object) -> bool:
    return str(first).replace("-", "_") == str(second).replace("-", "_")
