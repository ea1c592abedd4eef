"""YAML files that people write: plain types only, every key once, errors with file and line.

This is the only module of this room that reads files, and the only one that needs more than the standard library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from jettison.errors import ConfigError

_MERGE = "tag:yaml.org,2002:merge"


class _StrictLoader(yaml.SafeLoader):
    """Loads YAML's plain types only. A key given twice is an error, where YAML would take the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, as keys that another mapping brings (`<<: *base`) come in later, and may be given anew.
        node = super().compose_mapping_node(anchor)
        plain = (name for name, _ in node.value if isinstance(name, yaml.ScalarNode) and name.tag != _MERGE)
        names = [self.construct_object(name) for name in plain]
        doubled = sorted({str(name) for name in names if names.count(name) > 1})
        if doubled:
            raise yaml.constructor.ConstructorError(None, None, f"key {doubled[0]!r} is given twice", node.start_mark)
        return node


class YamlMapping(dict[Any, Any]):
    """The mapping in a YAML file, with the line of each of its keys."""

    def __init__(self, content: dict[Any, Any], path: Path, lines: dict[Any, int]) -> None:
        super().__init__(content)
        self._path = path
        self._lines = lines

    def replaced(self, content: dict[Any, Any], origins: dict[Any, Any]) -> YamlMapping:
        """Other content of the same file. ``origins``: the key here that a new key comes from, where it differs."""
        lines = {key: self._lines[origin] for key in content if (origin := origins.get(key, key)) in self._lines}
        return YamlMapping(content, self._path, lines)

    def place_of(self, key: object) -> str:
        """``FILE, line 3``."""
        line = self._lines.get(key)
        return str(self._path) if line is None else f"{self._path}, line {line}"


def read_yaml_mapping(path: Path, what: str = "the configuration file") -> YamlMapping:
    """The mapping in a YAML file; an empty file is an empty mapping. Raises ConfigError naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read {what} {path}: {reason}") from None
    content, lines = _parse(text, str(path))
    if content is None:
        return YamlMapping({}, path, {})
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: needs `key: value` lines, not a {type(content).__name__}")
    return YamlMapping(content, path, lines)


def parse_yaml(text: str, where: str) -> Any:
    """One document, or one value. Raises ConfigError that begins with ``where`` and names the line."""
    return _parse(text, where)[0]


def _parse(text: str, where: str) -> tuple[Any, dict[Any, int]]:
    """The document and, if it is a mapping, the line of each plain key. Raises as ``parse_yaml`` does."""
    try:
        loader = _StrictLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}
            content = loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}, line {mark.line + 1}" if mark is not None else where
        raise ConfigError(f"{place}: {getattr(error, 'problem', None) or 'not YAML'}") from None
    except (ValueError, OverflowError) as error:  # an invalid time stamp, a number out of bounds
        raise ConfigError(f"{where}: {error}") from None
    keys = [name for name, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    return content, {key.value: key.start_mark.line + 1 for key in keys if isinstance(key, yaml.ScalarNode)}
