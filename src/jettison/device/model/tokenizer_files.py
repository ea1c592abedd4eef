"""A model folder's tokenizer, from all of its files: ``tokenizer.json``, and the tokens added in others.

Files are read, and nothing in them is run. The front end encodes and decodes; ``end_tokens`` finds the tokens that end
a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from jettison.config.hubcache import download_hint
from jettison.device.model import byte_tokenizer
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
    """The part of ``tokenizer.json`` that is read here directly."""

    decoder: _Decoder | None = None

    @property
    def is_byte_level(self) -> bool:
        """Whether the text of tokens is the concatenation of their bytes."""
        if self.decoder is None:
            return False
        kinds = [self.decoder.type, *(decoder.get("type") for decoder in self.decoder.decoders)]
        return "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Sequence"}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of a folder's tokenizer files."""

    backend: tokenizers.Tokenizer
    """The tokenizer with all added tokens."""
    is_byte_level: bool
    config: Mapping[str, Any]
    """Contents of ``tokenizer_config.json``."""
    special_tokens: Mapping[str, str]
    """Role ("eos_token", or one of the model's own) -> text, by the rules of ``transformers``: what a chat template may
    name."""
    said: Mapping[str, Mapping[str, str]]
    """File -> role -> text: the same in each file."""
    doubts: tuple[str, ...]
    """A line for each token that got another id than the folder states."""

    @property
    def num_ids(self) -> int:
        """One more than the largest id: at least the number of tokens, as there may be gaps."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def has_tokenizer(model_dir: Path) -> bool:
    """Whether a folder has a tokenizer, be it a broken one."""
    return why_not_itself(model_dir / TOKENIZER) is not None or (model_dir / TOKENIZER).exists()


def read_tokenizer(model_dir: Path) -> TokenizerFiles:
    """The tokenizer files of a folder. Raises ModelError, one line that names the file."""
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
    special_tokens = added.own | (first | second if is_legacy else second | first)
    return TokenizerFiles(backend, parts.is_byte_level, config.values, special_tokens, said, doubts)


def byte_tokenizer_files(vocab_size: int) -> TokenizerFiles:
    """What a folder without tokenizer files has instead, where its weights are random: see ``byte_tokenizer``. Raises
    ModelError where a model has too few tokens for it."""
    if vocab_size < byte_tokenizer.MIN_VOCAB_SIZE:
        raise ModelError(f"{vocab_size} tokens are too few for bytes: {TOKENIZER} is needed")
    config = byte_tokenizer.tokenizer_config(max_length=1 << 30)
    parts = _parts(config)
    return TokenizerFiles(byte_tokenizer.byte_level_tokenizer(vocab_size), True, config, parts, {CONFIG: parts}, ())


def _tokenizer(path: Path) -> tuple[_TokenizerFile, tokenizers.Tokenizer]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        told = why_not_itself(path) or f"a fast tokenizer (tokenizer.json) is needed{_hint(path.parent)}"
        raise ModelError(f"{path} is missing: {told}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return msgspec.json.decode(data, type=_TokenizerFile), tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # noqa: BLE001  # the library raises plain Exception for a broken file
        told = why_not_itself(path) or " ".join(str(error).split())[:200]
        raise ModelError(f"{path} is no tokenizer: {told}") from None


def _hint(folder: Path) -> str:
    return "" if folder.exists() else download_hint(str(folder))


def _optional(path: Path) -> JsonObject | None:
    if why_not_itself(path) is None and not path.is_file():
        return None
    return JsonObject.read(path)


def _parts(values: Mapping[str, Any]) -> dict[str, str]:
    texts = {part: token_text(values.get(part)) for part in PARTS}
    return {part: text for part, text in texts.items() if text}
