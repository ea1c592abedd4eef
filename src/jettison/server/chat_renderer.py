"""From the messages of a request to the text of its prompt: the template, its variables, and the request's additions.

Knows the model's templates and the operator's settings for them; no HTTP, and no tokens.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jettison.config import TemplateConfig
from jettison.config.sections import ContentFormat
from jettison.errors import ModelError
from jettison.server.conversation import Message, bad_arguments, fitted, forms_of, with_tools
from jettison.server.template_files import DEFAULT, WITH_TOOLS, told_template
from jettison.server.template_traits import Form, Traits, find_traits
from jettison.server.templates import ChatTemplate, TemplateError

logger = logging.getLogger(__name__)

MAX_REQUEST_TEMPLATES = 16
"""Most templates of requests that are kept compiled."""
MAX_REQUEST_SOURCE_CHARS = 1 << 16
_FORM_OF: dict[str, Form | None] = {"auto": None, "string": "string", "openai": "parts"}
_TOLD_FORM: dict[Form, str] = {
    "string": "as a text", "parts": "as a list of parts", "as sent": "as a text or as a list of parts"}
_TAG = "HERETHEMODELGOESON "
"""Marks where the final message ends; the space at its end tells whether the template trims it."""
_TOOL = {"type": "function", "function": {
    "name": "ask", "description": "Asks.", "parameters": {
        "type": "object", "properties": {"what": {"type": "string", "description": "What."}}, "required": ["what"]}}}


class TemplateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's settings for chat templates."""

    chat_template: str | None = None
    """A file, or the template itself; None: the model folder's."""
    content_format: ContentFormat = "auto"
    default_kwargs: dict[str, Any] = {}
    """Variables of every rendering, unless the request sets others."""
    trusts_requests: bool = False
    """Whether requests may bring a template of their own."""
    leaves_out_unused_tools: bool = False
    """Whether the tools of a request that forbids their use (``tool_choice: none``) stay out of the prompt."""
    tool_call_parser: str = "auto"
    """The form of tool calls (``parsers.registry``); auto: the one that the template shows."""
    reasoning_parser: str = "auto"
    """The marks of thoughts, likewise."""


def template_settings(config: TemplateConfig) -> TemplateSettings:
    """The settings in an engine's configuration."""
    return TemplateSettings(
        chat_template=config.chat_template,
        content_format=config.content_format,
        default_kwargs=msgspec.json.decode(config.default_kwargs, type=dict[str, Any]),
        trusts_requests=config.trust_requests,
        leaves_out_unused_tools=config.exclude_unused_tools,
        tool_call_parser=config.tool_call_parser if config.enable_auto_tool_choice else "none",
        reasoning_parser=config.reasoning_parser,
    )


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Checked messages, and the other variables of the template."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the prompt ends where the last message does, so that the model continues that message."""
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    """The request's own template, or the name of one in the folder."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A template and the result of its trial."""

    template: ChatTemplate
    traits: Traits
    variables: Mapping[str, Any]
    """Variables that the template always gets."""


class ChatRenderer:
    """The templates of one model. Raises ModelError where the one that ordinary requests use cannot be used.

    ``sources``: ``template_files.folder_templates``. ``special_tokens``: name -> text, which templates see.
    """

    def __init__(
        self, sources: Mapping[str, tuple[str, str]], special_tokens: Mapping[str, str],
        settings: TemplateSettings, max_chars: int = 8 << 20,
    ) -> None:  # fmt: skip
        self.settings = settings
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._of_requests: OrderedDict[str, _Tried] = OrderedDict()
        self._sources = dict(sources)
        if settings.chat_template is not None:
            told = settings.chat_template
            self._sources = {DEFAULT: sources[told] if told in sources else told_template(told)}
        self._default = self._load(DEFAULT, None)
        self._with_tools: _Tried | ModelError | None = None
        try:
            self._with_tools = self._load(WITH_TOOLS, [_TOOL])
        except ModelError as error:  # raised for requests with tools; the others do not need it
            logger.warning("%s", error)
            self._with_tools = error
        if self._default is not None:
            logger.info(
                "chat template of %s: a message's content reaches it %s", self._default.template.source_name,
                _TOLD_FORM[self._default.traits.form_of("user")])
        if self._default is not None and self._default.traits.lost:
            logger.warning(
                "%s: the chat template leaves out what is said by: %s", self._default.template.source_name,
                ", ".join(self._default.traits.lost))
        self._tell_of_tools()

    def _tell_of_tools(self) -> None:
        if self.settings.tool_call_parser == "none":  # tools are no matter of this server's
            return
        tried = self._with_tools or self._default
        if isinstance(tried, _Tried) and tried.traits.tools == "nowhere":
            logger.info(
                "%s: the chat template writes no tools, so the model learns of none: --chat-template FILE with one that"
                " does", tried.template.source_name)

    @property
    def source(self) -> str | None:
        """Text of the template of ordinary requests."""
        return None if self._default is None else self._default.template.source

    @property
    def source_with_tools(self) -> str | None:
        """Text of the template of requests with tools."""
        return self._with_tools.template.source if isinstance(self._with_tools, _Tried) else self.source

    @property
    def traits(self) -> Traits | None:
        """Traits of the template of ordinary requests."""
        return None if self._default is None else self._default.traits

    def knows(self, word: str) -> bool:
        """Whether a template of the model names this role or field."""
        tried = (self._default, self._with_tools)
        return any(word in one.template.words for one in tried if isinstance(one, _Tried))

    def knows_variable(self, name: str) -> bool:
        """Whether a template of the model asks for this variable."""
        tried = (self._default, self._with_tools)
        return any(name in one.template.variables for one in tried if isinstance(one, _Tried))

    def render(self, request: ChatRequest) -> str:
        """The prompt's text. Raises TemplateError. Safe to call from several threads."""
        tried = self._tried(request)
        messages = with_tools(fitted(request.messages, tried.traits), request.tools, tried.traits)
        refused: TemplateError | None = None
        for form in forms_of(messages, tried.traits):  # what a template refuses may depend on the conversation
            try:
                return self._render(tried, form, request)
            except TemplateError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _load(self, name: str, tools: Sequence[Mapping[str, Any]] | None) -> _Tried | None:
        if name not in self._sources:
            return None
        return self._try(ChatTemplate(*self._sources[name], self._max_chars), tools)

    def _try(self, template: ChatTemplate, tools: Sequence[Mapping[str, Any]] | None = None) -> _Tried:
        variables = {**self._special_tokens, **self.settings.default_kwargs}
        form = _FORM_OF[self.settings.content_format]
        try:
            return _Tried(template, find_traits(template, {**variables, "tools": tools}, form), variables)
        except ModelError:
            missing = {"bos_token": "", "eos_token": ""}  # a template that concatenates them needs texts
            if missing.keys() <= variables.keys():
                raise
            variables = missing | variables
            return _Tried(template, find_traits(template, {**variables, "tools": tools}, form), variables)

    def _tried(self, request: ChatRequest) -> _Tried:
        if request.chat_template is not None:
            return self._of_request(request.chat_template)
        if request.tools is not None and self._with_tools is not None:
            if isinstance(self._with_tools, ModelError):
                raise TemplateError("the model's chat template for tools is broken", "tools")
            return self._with_tools
        if self._default is not None:
            return self._default
        if self._sources:
            raise TemplateError(f"this model has no default chat template, only: {', '.join(sorted(self._sources))}")
        raise TemplateError("this model has no chat template; use /v1/completions")

    def _of_request(self, told: str) -> _Tried:
        """A request's template, compiled and tried once for as long as it is among the last ones used."""
        with self._lock:
            if told in self._of_requests:
                self._of_requests.move_to_end(told)
                return self._of_requests[told]
        text, name = self._sources.get(told, (told, "chat_template"))
        if len(text) > MAX_REQUEST_SOURCE_CHARS and told not in self._sources:
            raise TemplateError(f"may have at most {MAX_REQUEST_SOURCE_CHARS} characters.", "chat_template")
        try:
            tried = self._try(ChatTemplate(text, name, self._max_chars))
        except ModelError as error:
            raise TemplateError(str(error).removeprefix("chat_template: "), "chat_template") from None
        with self._lock:
            self._of_requests[told] = tried
            while len(self._of_requests) > MAX_REQUEST_TEMPLATES:
                self._of_requests.popitem(last=False)
        return tried

    def _render(self, tried: _Tried, messages: list[Message], request: ChatRequest) -> str:
        variables = {
            "tools": None, "documents": None, **tried.variables, **request.variables,
            "add_generation_prompt": request.add_generation_prompt,
        }  # fmt: skip
        for name, value in (("tools", request.tools), ("documents", request.documents)):
            if value is not None:
                variables[name] = value
        try:
            if not request.continue_final_message:
                return tried.template.render(messages, variables)
            marked, final = _marked(messages, tried.template)
            return _cut(tried.template.render(marked, variables), final)
        except TemplateError as error:
            path = bad_arguments(request.messages)
            if path is None or type(error) is not TemplateError or error.param != "messages":
                raise
            raise TemplateError("is no JSON object, as the chat template wants it.", path) from None


def _marked(messages: list[Message], template: ChatTemplate) -> tuple[list[Message], str]:
    """The messages with a mark at the end of the last one, and its text."""
    message = messages[-1]
    content = message.get("content")
    if content is None or "content" not in template.source:
        raise _cannot_continue("the last message has no content to go on with")
    if isinstance(content, str):
        return [*messages[:-1], message | {"content": content + _TAG}], content
    for at in reversed(range(len(content))):
        if "text" in content[at]:
            text = content[at]["text"]
            parts = [*content[:at], content[at] | {"text": text + _TAG}, *content[at + 1 :]]
            return [*messages[:-1], message | {"content": parts}], text
    raise _cannot_continue("the last message has no text to go on with")


def _cut(rendered: str, final: str) -> str:
    """The text before the mark; without the space at its end where the template has trimmed the message."""
    mark = _TAG.strip()
    if mark not in rendered or final.strip() not in rendered:
        raise _cannot_continue("the chat template does not write the last message as it is")
    at = rendered.rindex(mark)
    before = rendered[:at]
    return before if rendered[at : at + len(_TAG)] == _TAG else before.rstrip()


def _cannot_continue(why: str) -> TemplateError:
    return TemplateError(f"{why}.", "continue_final_message")
