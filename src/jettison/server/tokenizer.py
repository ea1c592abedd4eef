"""The model folder's tokenizer and chat template: text to token ids and back.

``device.model.tokenizer_files`` finds the tokenizer, ``server.template_files`` the templates. Only templates from the
folder are executed, in their sandbox. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from jettison.device.model.tokenizer_files import byte_tokenizer_files, has_tokenizer, read_tokenizer
from jettison.device.model.vocabulary import token_bytes
from jettison.server.chat_renderer import ChatRenderer, ChatRequest, TemplateSettings
from jettison.server.detokenizer import ByteDetokenizer, Detokenizer, JoinedSpecials, WindowDetokenizer
from jettison.server.template_files import folder_templates
from jettison.server.template_limits import TemplateError

_NOTHING: frozenset[int] = frozenset()


class _TokenBytes(dict[int, bytes]):
    """A cache of the bytes of each token, at most as large as the vocabulary."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, is_byte_level: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._is_byte_level = is_byte_level

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # the model's vocabulary may be padded beyond the tokenizer's
            return b""
        self[token_id] = data = token_bytes(token, is_byte_level=self._is_byte_level)
        return data


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
        cls, model_dir: str | Path, *, max_template_chars: int = 8 << 20, templates: TemplateSettings | None = None,
        byte_tokens: int | None = None,
    ) -> Tokenizer:
        """Load the folder's tokenizer, and try its chat templates. Raises ModelError, one line that names the file.

        ``templates``: the operator's settings for them. Raises ConfigError for invalid ones. ``byte_tokens``: a folder
        without a tokenizer has so many tokens, which are bytes (None: it needs one).
        """
        folder = Path(model_dir)
        if byte_tokens is None or has_tokenizer(folder):
            files = read_tokenizer(folder)
        else:
            files = byte_tokenizer_files(byte_tokens)
        sources = folder_templates(folder, files.config)
        return cls(
            files.backend,
            is_byte_level=files.is_byte_level,
            special_tokens=files.special_tokens,
            chat=ChatRenderer(sources, files.special_tokens, templates or TemplateSettings(), max_template_chars),
            tokenizer_class=str(files.config.get("tokenizer_class", "PreTrainedTokenizerFast")),
        )

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of tokens that are no text."""
        return {self._added_text[token_id]: token_id for token_id in sorted(self.special_ids)}

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
        """Text of token ids; unknown ids are skipped."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = (), *,
        joins_special_tokens: bool = False, shown: Sequence[str] = (),
    ) -> Detokenizer:
        """A text that grows by one token at a time, after the text of a prompt (which is not part of it).

        ``joins_special_tokens``: special tokens that are shown have no space between them, whatever the decoder adds.
        ``shown``: texts of special tokens that are never skipped.
        """
        skipped = self.special_ids if skip_special_tokens else _NOTHING
        if shown and skipped:
            skipped = skipped.difference(self._backend.token_to_id(text) for text in shown)
        if self._is_byte_level:
            return ByteDetokenizer(self._bytes_of, skipped)
        made = WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=False), skipped, prompt_token_ids)
        return JoinedSpecials(made, self._added_text) if joins_special_tokens and not skip_special_tokens else made

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an unknown id."""
        return self._bytes_of[token_id]

    def token_text(self, token_id: int) -> str:
        """A single token as OpenAI shows it: ``bytes:\\xe2\\x80`` where the bytes are no text."""
        data = self._bytes_of[token_id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def turn_end(self) -> int | None:
        """The special token that the template writes after an answer; None: it writes none, or cannot be rendered."""
        words = "jettison"
        turn = [{"role": "user", "content": "words"}, {"role": "assistant", "content": words}]
        try:
            text = self.render_chat(ChatRequest(messages=turn, add_generation_prompt=False))
        except TemplateError:
            return None
        _, found, behind = text.rpartition(words)
        ids = self.encode(behind.lstrip(), add_special_tokens=False) if found else []
        return ids[0] if ids and ids[0] in self.special_ids else None

    def render_chat(self, request: ChatRequest) -> str:
        """Messages as the model's template writes them. Raises TemplateError."""
        return self.chat.render(request)
