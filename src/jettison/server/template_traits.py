"""The form in which a chat template takes messages, detected by rendering small conversations and searching their
words.

A template is tried once, when it is loaded. ``conversation`` uses the result; nothing here knows of requests.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jettison.errors import ModelError
from jettison.server.templates import ChatTemplate, LimitError, RefusalError, TemplateError, one_line

Form = Literal["as sent", "string", "parts"]
NoContent = Literal["absent", "null", "empty"]
Message = Mapping[str, Any]

_ORDINARY = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user",))
"""Roles of the trial conversations, the longest first."""
_WORDS = {
    "system": "quietharbour", "developer": "narrowbridge", "user": "yellowmeadow", "assistant": "distantthunder",
    "tool": "coppervalley", "later": "frozenorchard",
}  # fmt: skip
"""Words that no template writes by itself. Small ASCII letters pass unchanged through filters and escapes."""
MAX_TRIAL_S = 5.0
"""Time limit of all trials of a template together."""
_CALL_ID = "callabcde"
"""Nine letters or digits, which some templates require."""
_FUNCTION, _KEY, _VALUE = "findlantern", "silverkey", "goldenvalue"


@dataclass(frozen=True, slots=True)
class Traits:
    """The needs and abilities of a template. The defaults are for a template without any detected."""

    forms: Mapping[str, Form] = field(default_factory=dict)
    """Form of the content by role: a text, a list of parts, or either."""
    knows_developer: bool = False
    """Whether messages of the role ``developer`` are written; else they become ``system``."""
    systems: Literal["anywhere", "leading", "first"] = "anywhere"
    """Where it writes system messages: anywhere, only at the front (``leading``), or only the first message
    (``first``)."""
    no_content: NoContent = "absent"
    """The content that it needs in an assistant's message that only calls tools."""
    wants_text_arguments: bool = False
    """Whether it writes a tool call's arguments unchanged, as text; else they are a mapping."""
    joins_thoughts: bool = False
    """Whether it refuses a message that calls tools with thoughts and content, though it takes either: gpt-oss's, which
    writes either as thoughts."""
    tools: Literal["variable", "system", "nowhere"] = "variable"
    """Where it reads a request's tools: the variable ``tools``, or a field of the system message that has them as JSON
    (``system``: Phi-4-mini's)."""
    lost: tuple[str, ...] = ()
    """Roles with words that it leaves out of the prompt."""
    wants_short_ids: bool = False
    """Whether it refuses ids of tool calls that do not have nine letters and digits: Mistral's."""

    def form_of(self, role: str) -> Form:
        """The form of a message of this role; for an unknown role, that of the user's messages."""
        return self.forms.get(role) or self.forms.get("user", "string")


class _Trial:
    """One template and its constant variables."""

    def __init__(self, template: ChatTemplate, variables: Mapping[str, Any]) -> None:
        self._template = template
        self._spent_s = 0.0
        self._variables = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The rendered text. Raises TemplateError, and ModelError where the trials exceed their limits."""
        began_s = time.monotonic()
        try:
            told = self._variables if tools is None else self._variables | {"tools": tools}
            return self._template.render(messages, told)
        except LimitError as error:
            raise ModelError(f"{self._template.source_name}: {error}") from None
        finally:
            self._spent_s += time.monotonic() - began_s
            if self._spent_s > MAX_TRIAL_S:
                raise ModelError(f"{self._template.source_name}: the chat template takes too long")

    def attempt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
        """The rendered text; None where the template fails or refuses."""
        try:
            return self.render(messages, tools)
        except TemplateError:
            return None


def find_traits(template: ChatTemplate, variables: Mapping[str, Any], told: Form | None = None) -> Traits:
    """The traits of a template. ``told``: the operator's form, which is taken as given.

    Raises ModelError where no ordinary conversation can be rendered, or none shows the user's words: the operator
    should learn that at the start, before clients do. Roles that the template refuses itself (``raise_exception``) are
    no error.
    """
    trial = _Trial(template, variables)
    forms, lost = _content_forms(trial, template, told)
    if "user" in lost and told is None:
        raise ModelError(
            f"{template.source_name}: the chat template leaves out what the user says, as text and as a list of parts;"
            " --chat-template FILE names another, --chat-template-content-format string takes it as it is")
    plain = Traits(forms)
    no_content, wants_text = _tool_calls(trial, plain)
    forms = dict(forms) | {"tool": _tool_form(trial, plain, no_content, wants_text, told)}
    traits = Traits(
        forms, _knows_developer(trial, template, plain), _systems(trial, plain, lost), no_content, wants_text,
        _joins_thoughts(trial, plain, no_content, wants_text), _tools(trial, template, plain), lost,
        _wants_short_ids(trial, plain, no_content, wants_text))
    return traits


def content_of(text: str, form: Form) -> str | list[dict[str, str]]:
    """A text in the given form."""
    return [{"type": "text", "text": text}] if form == "parts" else text


def _message(role: str, form: Form, word: str | None = None) -> dict[str, Any]:
    return {"role": role, "content": content_of(_WORDS[word or role], form)}


def _content_forms(
    trial: _Trial, template: ChatTemplate, told: Form | None
) -> tuple[dict[str, Form], tuple[str, ...]]:
    """Forms by role, and the roles with words that are lost in either form."""
    best = _best_conversation(trial, template)
    if best is None:  # it refuses all of them: its source decides
        default: Form = told or ("parts" if template.walks_over_content else "string")
        return {"system": default, "user": default, "assistant": default}, ()
    forms: dict[str, Form] = {}
    lost = []
    for role, form in best.forms.items():
        other: Form = "string" if form == "parts" else "parts"
        text = trial.attempt(_conversation(best.roles, best.forms | {role: other}))
        shows_other = text is not None and _shows(text, _WORDS[role], other)
        if not best.shown[role] and not shows_other:
            lost.append(role)
        shown = {form: best.shown[role], other: shows_other}
        forms[role] = told or _form(shown["string"], shown["parts"])
    return {"system": forms.get("system", forms["user"]), **forms}, tuple(lost)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A conversation that a template takes, with the words that its output shows."""

    roles: Sequence[str]
    forms: dict[str, Form]
    shown: dict[str, bool]


def _best_conversation(trial: _Trial, template: ChatTemplate) -> _Rendered | None:
    """The longest ordinary conversation that is not refused and shows the user's words, in the forms that show most
    words; else one that does not show the user's. None: all are refused.

    Raises ModelError where one fails in every form.
    """
    silent: list[_Rendered] = []
    for roles in _ORDINARY:
        found: list[_Rendered] = []
        failure: TemplateError | None = None
        for forms in _assignments(roles):
            try:
                text = trial.render(_conversation(roles, forms))
            except RefusalError:
                continue
            except TemplateError as error:
                failure = failure or error
                continue
            found.append(_Rendered(roles, forms, {role: _shows(text, _WORDS[role], forms[role]) for role in forms}))
        best = max(found, key=lambda rendered: (rendered.shown["user"], sum(rendered.shown.values())), default=None)
        if best is not None and best.shown["user"]:
            return best
        silent += found
        if failure is not None and not silent:
            raise ModelError(
                f"{template.source_name}: the chat template cannot render a conversation ({', '.join(roles)}):"
                f" {one_line(failure.__cause__ or failure)}")
    return silent[0] if silent else None


def _assignments(roles: Sequence[str]) -> list[dict[str, Form]]:
    """Assignments of forms: all texts, all parts, or parts for the user only."""
    texts: dict[str, Form] = dict.fromkeys(roles, "string")
    parts: dict[str, Form] = dict.fromkeys(roles, "parts")
    return [texts, parts, texts | {"user": "parts"}]


def _conversation(roles: Sequence[str], forms: Mapping[str, Form]) -> list[dict[str, Any]]:
    return [_message(role, forms[role]) for role in roles]


def _shows(text: str, word: str, form: Form) -> bool:
    """Whether a text shows a word as itself; parts written out as Python or JSON do not count."""
    is_there = word in text.lower()
    return is_there and not (form == "parts" and re.search(rf"""['"]text['"]\s*:\s*['"]{word}""", text))


def _form(as_text: bool, as_parts: bool) -> Form:
    if as_text and as_parts:
        return "as sent"
    return "parts" if as_parts else "string"


def _call(arguments: object) -> dict[str, Any]:
    return {"id": _CALL_ID, "type": "function", "function": {"name": _FUNCTION, "arguments": arguments}}


def _calling(traits: Traits, no_content: NoContent, arguments: object) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "tool_calls": [_call(arguments)]}
    if no_content != "absent":
        empty: object = [] if traits.form_of("assistant") == "parts" else ""
        message["content"] = None if no_content == "null" else empty
    return message


def _tool_calls(trial: _Trial, traits: Traits) -> tuple[NoContent, bool]:
    """The content of a message that only calls tools, and whether arguments are text: the first form that shows most
    words."""
    user = _message("user", traits.form_of("user"))
    as_mapping, as_text = {_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}'
    best: tuple[int, NoContent, bool] = (-1, "absent", False)
    forms: tuple[NoContent, ...] = ("absent", "null", "empty")
    for no_content in forms:
        for arguments in (as_mapping, as_text):
            text = trial.attempt([user, _calling(traits, no_content, arguments)])
            if text is None:
                continue
            shows = 2 * (_FUNCTION in text) + (_VALUE in text and str(as_mapping) not in text)
            if shows > best[0]:
                best = shows, no_content, arguments is as_text
    return best[1], best[2]


def _tools(trial: _Trial, template: ChatTemplate, traits: Traits) -> Literal["variable", "system", "nowhere"]:
    if "tools" not in template.source:
        return "nowhere"
    parameters = {"type": "object", "properties": {_KEY: {"type": "string", "description": _VALUE}}, "required": [_KEY]}
    tools = [{"type": "function", "function": {
        "name": _FUNCTION, "description": _WORDS["tool"], "parameters": parameters}}]  # fmt: skip
    user = _message("user", traits.form_of("user"))
    text = trial.attempt([user], tools)
    if text is None or _FUNCTION in text:  # one that fails tells the request so
        return "variable"
    system = _message("system", traits.form_of("system")) | {"tools": json.dumps(tools)}
    return "system" if _FUNCTION in (trial.attempt([system, user]) or "") else "nowhere"


def _joins_thoughts(trial: _Trial, traits: Traits, no_content: NoContent, wants_text: bool) -> bool:
    arguments: object = f'{{"{_KEY}": "{_VALUE}"}}' if wants_text else {_KEY: _VALUE}
    bare = _calling(traits, no_content, arguments)
    says = _message("assistant", traits.form_of("assistant"))
    thinks = dict.fromkeys(("thinking", "reasoning_content"), _WORDS["later"])

    def takes(message: Message) -> bool:
        return trial.attempt([_message("user", traits.form_of("user")), message]) is not None

    return not takes(bare | says | thinks) and takes(bare | says) and takes(bare | thinks)


def _wants_short_ids(trial: _Trial, traits: Traits, no_content: NoContent, wants_text: bool) -> bool:
    arguments: object = f'{{"{_KEY}": "{_VALUE}"}}' if wants_text else {_KEY: _VALUE}

    def takes(call_id: str) -> bool:
        calls = _calling(traits, no_content, arguments)
        calls["tool_calls"] = [call | {"id": call_id} for call in calls["tool_calls"]]
        result = _message("tool", "string") | {"tool_call_id": call_id, "name": _FUNCTION}
        return trial.attempt([_message("user", traits.form_of("user")), calls, result]) is not None

    return not takes(f"call_{_CALL_ID}_{_CALL_ID}") and takes(_CALL_ID)


def _tool_form(
    trial: _Trial, traits: Traits, no_content: NoContent, wants_text: bool, told: Form | None
) -> Form:
    """The form of a tool's messages: text unless only parts work, as most templates want text whatever the user's
    form."""
    arguments: object = f'{{"{_KEY}": "{_VALUE}"}}' if wants_text else {_KEY: _VALUE}
    before = [_message("user", traits.form_of("user")), _calling(traits, no_content, arguments)]
    forms: tuple[Form, ...] = ("string", "parts")
    shown: list[bool] = []
    for form in forms:
        message = _message("tool", form) | {"tool_call_id": _CALL_ID, "name": _FUNCTION}
        shown.append(_shows(trial.attempt([*before, message]) or "", _WORDS["tool"], form))
    if told is not None:
        return "parts" if told == "parts" and not shown[0] else "string"
    return _form(*shown)


def _knows_developer(trial: _Trial, template: ChatTemplate, traits: Traits) -> bool:
    """Whether its source names the role ``developer``, and its output shows the developer's words."""
    if "developer" not in template.words:
        return False
    form = traits.form_of("system")
    text = trial.attempt([_message("developer", form), _message("user", traits.form_of("user"))])
    return text is not None and _WORDS["developer"] in text.lower()


def _systems(trial: _Trial, traits: Traits, lost: Sequence[str]) -> Literal["anywhere", "leading", "first"]:
    if "system" in lost:
        return "anywhere"
    system, user, assistant = (_message(role, traits.form_of(role)) for role in ("system", "user", "assistant"))
    later = _message("system", traits.form_of("system"), "later")

    def writes(*messages: Message) -> bool:
        text = (trial.attempt(messages) or "").lower()
        return _WORDS["system"] in text and (later not in messages or _WORDS["later"] in text)

    if writes(system, user, assistant, later, user):
        return "anywhere"
    if writes(system, later, user):
        return "leading"
    return "first" if writes(system, user) else "anywhere"  # a template that takes none at all raises by itself
