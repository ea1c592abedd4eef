"""The model folder's tokenizer and chat template: text to token ids and back.

Reads ``tokenizer.json``, ``tokenizer_config.json`` and the chat templates beside them; executes nothing from the folder
but a template, in its sandbox. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from jettison.errors import ModelError
from jettison.server.chat_renderer import ChatRenderer, ChatRequest, TemplateSettings
from jettison.server.detokenizer import ByteDetokenizer, Detokenizer, JoinedSpecials, WindowDetokenizer
from jettison.server.template_files import folder_templates

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Those with names, which chat templates see."""
_NOTHING: frozenset[int] = frozenset()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable ones stand for themselves, the rest follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token, looked up once. Never larger than the vocabulary."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, is_byte_level: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._is_byte_level = is_byte_level

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # the model's vocabulary may be padded beyond the tokenizer's
            return b""
        self[token_id] = data = self._of(token)
        return data

    def _of(self, token: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token with other characters stands for itself
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return token.replace("▁", " ").encode()


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


class Tokenizer:
    """Encodes prompts, decodes output, renders chats. Make one with ``from_dir``; safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        is_byte_level: bool,
        special_tokens: Mapping[str, str],
        tokenizer_class: str,
        chat: ChatRenderer | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._is_byte_level = is_byte_level
        self._bytes_of = _TokenBytes(backend, is_byte_level)
        self.chat = chat or ChatRenderer({}, special_tokens, TemplateSettings())
        """The model's chat templates."""
        self._special_tokens = dict(special_tokens)
        self.tokenizer_class = tokenizer_class
        added = backend.get_added_tokens_decoder()
        self._added_text = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_dir(
        cls, model_dir: str | Path, *, max_template_chars: int = 8 << 20, templates: TemplateSettings | None = None
    ) -> Tokenizer:
        """Load what the folder holds, and try its chat templates. Raises ModelError, one line that names the file.

        ``templates``: what the operator says of them. Raises ConfigError where that cannot be.
        """
        folder = Path(model_dir)
        path = folder / "tokenizer.json"
        data = _read(path, f"{path} is missing: a fast tokenizer (tokenizer.json) is needed")
        try:
            parts = msgspec.json.decode(data, type=_TokenizerFile)
            backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # noqa: BLE001  # the library raises plain Exception for a broken file
            raise ModelError(f"{path} is no tokenizer: {_one_line(error)}") from None
        config = _read_object(folder / "tokenizer_config.json")
        special_map = _read_object(folder / "special_tokens_map.json")
        special_tokens = {}
        for name in SPECIAL_TOKENS:
            if (token := _token_text(config.get(name)) or _token_text(special_map.get(name))) is not None:
                special_tokens[name] = token
        sources = folder_templates(folder, config)
        return cls(
            backend,
            is_byte_level=parts.is_byte_level,
            special_tokens=special_tokens,
            chat=ChatRenderer(sources, special_tokens, templates or TemplateSettings(), max_template_chars),
            tokenizer_class=str(config.get("tokenizer_class", "PreTrainedTokenizerFast")),
        )

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a sequence."""
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a sequence."""
        return self._special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """Text of the padding token."""
        return self._special_tokens.get("pad_token")

    @property
    def chat_template(self) -> str | None:
        """Source of the template that ordinary chats use."""
        return self.chat.source

    def token_id(self, token: str) -> int | None:
        """Id of a token given by its vocabulary text."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; unknown ids are passed over."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = (), *,
        joins_special_tokens: bool = False,
    ) -> Detokenizer:
        """A text that grows by one token at a time, behind that of a prompt (which is not part of it).

        ``joins_special_tokens``: those that are shown have no space between them, whatever the decoder says.
        """
        skipped = self.special_ids if skip_special_tokens else _NOTHING
        if self._is_byte_level:
            return ByteDetokenizer(self._bytes_of, skipped)
        made = WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=False), skipped, prompt_token_ids)
        return JoinedSpecials(made, self._added_text) if joins_special_tokens and not skip_special_tokens else made

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an unknown id."""
        return self._bytes_of[token_id]

    def token_text(self, token_id: int) -> str:
        """A token by itself, as OpenAI shows it: ``bytes:\\xe2\\x80`` where the bytes are no text."""
        data = self._bytes_of[token_id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def render_chat(self, request: ChatRequest) -> str:
        """Messages as the model's template writes them. Raises TemplateError."""
        return self.chat.render(request)


def _read(path: Path, missing: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelError(missing) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object from an optional file."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(_read(path, ""), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not a JSON object: {_one_line(error)}") from None


def _token_text(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
