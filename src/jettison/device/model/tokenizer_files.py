"""A model folder's tokenizer as its files together describe it: ``tokenizer.json``, and what is added to it elsewhere.

Files are read, nothing in them is run. How text becomes tokens and back is the front end's; which tokens end a text,
``end_tokens``'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from jettison.device.model.added_tokens import PARTS, added_tokens, token_text
from jettison.device.model.jsonfile import JsonObject
from jettison.device.model.standins import why_not_itself
from jettison.errors import ModelError

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"


class _Decoder(msgspec.Struct):
    type: str | None = None
    decoders: list[dict[str, Any]] = []


class _TokenizerFile(msgspec.Struct):
    """The one part of ``tokenizer.json`` that we read ourselves."""

    decoder: _Decoder | None = None

    @property
    def is_byte_level(self) -> bool:
        """Whether the text of tokens is just the concatenation of their bytes."""
        if self.decoder is None:
            return False
        kinds = [self.decoder.type, *(decoder.get("type") for decoder in self.decoder.decoders)]
        return "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Sequence"}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Everything that a folder says of its tokenizer."""

    backend: tokenizers.Tokenizer
    """With all added tokens."""
    is_byte_level: bool
    config: Mapping[str, Any]
    """Of ``tokenizer_config.json``."""
    special_tokens: Mapping[str, str]
    """Part ("eos_token") -> text, as ``transformers`` has it."""
    said: Mapping[str, Mapping[str, str]]
    """File -> part -> text: the same as each file says it."""
    doubts: tuple[str, ...]
    """Tokens that got other ids than the folder writes down, each a line."""


def read_tokenizer(model_dir: Path) -> TokenizerFiles:
    """Raises ModelError, one line that names the file."""
    path = model_dir / TOKENIZER
    parts, backend = _tokenizer(path)
    config = _optional(model_dir / CONFIG) or JsonObject(model_dir / CONFIG, {})
    special_map = _optional(model_dir / SPECIAL_MAP)
    added = added_tokens(config, special_map, _optional(model_dir / ADDED), backend.get_added_tokens_decoder())
    backend.add_tokens(added.tokens)
    doubts = tuple(
        f"{model_dir}: token {text[:40]!r} is written down as {token_id}, and is {backend.token_to_id(text)} where "
        f"{TOKENIZER} is added to (as transformers numbers it)"
        for text, token_id in added.ids.items() if text and backend.token_to_id(text) != token_id
    )
    said = {file.path.name: _parts(file.values) for file in (config, special_map) if file is not None}
    first, second = said[CONFIG], said.get(SPECIAL_MAP, {})
    is_legacy = "added_tokens_decoder" not in config.values
    return TokenizerFiles(
        backend, parts.is_byte_level, config.values, first | second if is_legacy else second | first, said, doubts
    )


def _tokenizer(path: Path) -> tuple[_TokenizerFile, tokenizers.Tokenizer]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        told = why_not_itself(path) or "a fast tokenizer (tokenizer.json) is needed"
        raise ModelError(f"{path} is missing: {told}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return msgspec.json.decode(data, type=_TokenizerFile), tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # noqa: BLE001  # the library raises plain Exception for a broken file
        told = why_not_itself(path) or " ".join(str(error).split())[:200]
        raise ModelError(f"{path} is no tokenizer: {told}") from None


def _optional(path: Path) -> JsonObject | None:
    if why_not_itself(path) is None and not path.is_file():
        return None
    return JsonObject.read(path)


def _parts(values: Mapping[str, Any]) -> dict[str, str]:
    texts = {part: token_text(values.get(part)) for part in PARTS}
    return {part: text for part, text in texts.items() if text}
