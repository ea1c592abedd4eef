"""The tokens that a folder's configuration adds to its ``tokenizer.json``, by the rules of ``transformers``.

``tokenizer_config.json`` lists tokens by id (``added_tokens_decoder``), names some by their role (``eos_token``, or a
role of the model's own such as ``image_token``) and lists others (``extra_special_tokens``, formerly
``additional_special_tokens``). Folders without the first of these keep roles and lists in ``special_tokens_map.json``,
which then takes precedence, and ids in ``added_tokens.json``. The ids in the files only give the order: the
``tokenizers`` library numbers new tokens from the end of the vocabulary on.

The rules are those of transformers 5.24 (``tokenization_utils_base``, ``tokenization_utils_tokenizers``). Where these
fail on a spelling of older releases (a token as an object without its type), the token is accepted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken

from jettison.device.model.jsonfile import JsonObject

PARTS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles that every tokenizer may have."""

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The tokens to be added, in order."""

    tokens: list[AddedToken]
    ids: dict[str, int] = field(default_factory=dict)
    """Text -> id in the files."""
    own: dict[str, str] = field(default_factory=dict)
    """Role of the model's own -> text."""


@dataclass(frozen=True, slots=True)
class _Named:
    """Tokens by role, the model's own roles included, and tokens without a role."""

    parts: dict[str, AddedToken]
    extra: list[AddedToken]


def added_tokens(
    config: JsonObject, special_map: JsonObject | None, numbered: JsonObject | None, known: Mapping[int, AddedToken]
) -> AddedTokens:
    """The tokens that the files add. ``special_map`` and ``numbered``: contents of ``special_tokens_map.json`` and
    ``added_tokens.json``, if these exist; ``known``: the tokens that ``tokenizer.json`` has added.

    Raises ModelError, one line that names the file and the key.
    """
    listed = config.object("added_tokens_decoder")
    if "added_tokens_decoder" in config.values:
        named = _named(config, None)
        by_id = {} if listed is None else dict(_by_id(listed))
        ids = {token.content: token_id for token_id, token in by_id.items()}
    else:
        named = _named(config, special_map)
        special = {token.content for token in (*named.parts.values(), *named.extra)}
        by_id = {} if numbered is None else dict(_by_text(numbered, special))
        ids = {token.content: token_id for token_id, token in by_id.items()}
        by_id |= known  # for one id, the tokenizer's own token counts
    tokens = [by_id[token_id] for token_id in sorted(by_id)]
    seen = {token.content for token in (*known.values(), *tokens)}
    parts = {token.content for token in named.parts.values()}
    for token in (*named.parts.values(), *named.extra):
        if token.content not in seen:
            seen.add(token.content)
            tokens.append(token)
    own = {key: token.content for key, token in named.parts.items() if key not in PARTS}
    return AddedTokens([_special(token) if token.content in parts else token for token in tokens], ids, own)


def token_text(value: object) -> str | None:
    """The text of a token given as a text or as an object; None where there is none."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _named(config: JsonObject, special_map: JsonObject | None) -> _Named:
    said = dict(config.values)
    key_of_extra = "extra_special_tokens" if said.get("extra_special_tokens") else "additional_special_tokens"
    extra = said.get(key_of_extra)
    own = {
        key: value for key, value in said.items()
        if key.endswith("_token") and key not in PARTS and (isinstance(value, str) or _is_object(value))
    }  # fmt: skip
    source = dict.fromkeys(said, config)
    if special_map is not None:
        for key, value in special_map.values.items():
            if key == "extra_special_tokens" and isinstance(value, list) and isinstance(extra, list):
                extra = [*extra, *value]
            elif key in ("extra_special_tokens", "additional_special_tokens"):
                extra = extra or value
            else:
                said[key], source[key] = value, special_map
    if isinstance(extra, dict):
        own, extra = own | extra, []
    if not isinstance(extra, list | None):
        raise config.wrong(key_of_extra, "a list of tokens or an object of them")
    parts = {}
    for key in PARTS:
        if (value := said.get(key)) is not None:
            parts[key] = _token(source[key], key, value, special=True)
    for key, value in own.items():
        parts[key] = _token(config, key, value, special=True)
    return _Named(parts, [_token(config, key_of_extra, item, special=True) for item in extra or []])


def _is_object(value: object) -> bool:
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _by_id(listed: JsonObject) -> Iterator[tuple[int, AddedToken]]:
    for number, value in listed.values.items():
        if not (number.isascii() and number.isdigit()) or not isinstance(value, dict):
            raise listed.fail(f"added_tokens_decoder: {number[:20]!r} must be an id, and its value an object")
        yield int(number), _token(listed, f"added_tokens_decoder {number[:20]}", value, special=False)


def _by_text(numbered: JsonObject, special: set[str]) -> Iterator[tuple[int, AddedToken]]:
    for text, token_id in numbered.values.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not _is_text(text):
            raise numbered.fail(f"{ascii(text)[:40]} must be a text, and its value an id")
        is_special = text in special
        yield token_id, AddedToken(text, normalized=not is_special, special=is_special)


def _token(file: JsonObject, key: str, value: Any, *, special: bool) -> AddedToken:
    """A token from a text or an object; ``special``: whether it is special by default."""
    text = token_text(value)
    flags = {name: value[name] for name in _FLAGS if value.get(name) is not None} if isinstance(value, dict) else {}
    if not _is_text(text) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise file.fail(f"{key} is no token: a text, or an object with content and flags")
    return AddedToken(text, **{"special": special} | flags)


def _is_text(text: str | None) -> bool:
    """Whether it is a text: half a surrogate pair, which JSON can hold, is not."""
    return text is not None and text.encode("utf-8", "replace").decode() == text


def _special(token: AddedToken) -> AddedToken:
    if token.special:
        return token
    return AddedToken(
        token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
        normalized=token.normalized, special=True,
    )  # fmt: skip
