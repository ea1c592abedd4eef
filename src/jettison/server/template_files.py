"""The chat templates in a model folder, by name, as ``transformers`` finds them; and the value of ``--chat-template``.

Reads files; compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from jettison.errors import ConfigError, ModelError

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of the template for all requests, and of the one for requests with tools."""
_JINJA = "{}\n"


def folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Name -> (text, the file that holds it). ``config``: the content of tokenizer_config.json.

    Files of their own (``chat_template.jinja``, ``additional_chat_templates/*.jinja``) come before the configuration,
    and ``chat_template.json`` of older folders counts where there is no other. A blank text is no template. Raises
    ModelError.
    """
    path = folder / "tokenizer_config.json"
    found = _named(config.get("chat_template"), path)
    files: dict[str, tuple[str, str]] = {}
    if (path := folder / "chat_template.jinja").exists():
        files |= _named(_text(path), path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files |= _named({path.name.removesuffix(".jinja"): _text(path)}, path)
    if files:  # without a default among the files, the configuration's is the default
        found = {name: found[name] for name in (DEFAULT,) if name in found} | files
    if not found and (path := folder / "chat_template.json").exists():
        found = _named(_object(path).get("chat_template"), path)
    return found


def _named(value: object, path: Path) -> dict[str, tuple[str, str]]:
    """Templates by name, from one text, a list of named ones, or an object of them."""
    if value is None:
        return {}
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    found: dict[str, tuple[str, str]] = {}
    for name, text in (value if isinstance(value, dict) else {DEFAULT: value}).items():
        if not (isinstance(name, str) and isinstance(text, str)):
            raise ModelError(f"{path}: chat_template must be a text")
        if text.strip():
            found[name] = text, str(path)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ModelError(f"{path} is not UTF-8") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def _object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(_text(path), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise ModelError(f"{path} is not a JSON object") from None


def told_template(told: str) -> tuple[str, str]:
    """The value of ``--chat-template``: the text of a file, or the template itself; and its name in errors.

    Raises ConfigError.
    """
    try:
        return Path(told).read_text(encoding="utf-8"), told
    except UnicodeDecodeError:
        raise ConfigError(f"--chat-template: {told} is not UTF-8") from None
    except (OSError, ValueError) as error:
        if any(char in told for char in _JINJA):
            return told, "--chat-template"
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--chat-template: {told} cannot be read ({reason}), and is no template itself") from None
