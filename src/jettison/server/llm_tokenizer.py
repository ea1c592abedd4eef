"""What ``LLM.get_tokenizer`` gives: the served tokenizer, by the names that Hugging Face's tokenizers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jettison.errors import RequestError
from jettison.server.chat_renderer import ChatRequest
from jettison.server.conversation import checked_messages
from jettison.server.errors import ApiError
from jettison.server.template_limits import TemplateError
from jettison.server.tokenizer import Tokenizer


class ServedTokenizer:
    """Texts to token ids and back, and chats to prompts, as the engine has them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids; unknown ids are skipped."""
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Id of a token given by its vocabulary text; None: there is none."""
        return self._tokenizer.token_id(token)

    def apply_chat_template(
        self, conversation: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, *,
        chat_template: str | None = None, add_generation_prompt: bool = False, continue_final_message: bool = False,
        tokenize: bool = True, **variables: Any,
    ) -> list[int] | str:
        """The prompt that a conversation becomes: token ids, or its text. Other keywords are the template's variables.
        Raises RequestError for messages that the template cannot write."""
        try:
            text = self._tokenizer.render_chat(ChatRequest(
                checked_messages(list(conversation), self._tokenizer.chat.knows),
                add_generation_prompt, continue_final_message, tools, variables=variables, chat_template=chat_template))
        except ApiError as error:
            raise RequestError(error.message, error.param, error.code) from None
        except TemplateError as error:
            raise RequestError(f"{error.param}: {error}", error.param) from None
        return self._tokenizer.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def chat_template(self) -> str | None:
        """Source of the template that ordinary chats use."""
        return self._tokenizer.chat_template

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of tokens that are no text."""
        return sorted(self._tokenizer.special_ids)

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a sequence."""
        return self._tokenizer.bos_token

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a sequence."""
        return self._tokenizer.eos_token

    @property
    def pad_token(self) -> str | None:
        """Text of the padding token."""
        return self._tokenizer.pad_token

    @property
    def bos_token_id(self) -> int | None:
        """Its id."""
        return self._id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Its id."""
        return self._id(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        """Its id."""
        return self._id(self.pad_token)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_id(token)
