"""House words: docstrings and comments name the actor (a request, a worker, a tenant), never *who* or *nobody*."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

BANNED = re.compile(r"\b(who|whoever|nobody|somebody)\b", re.IGNORECASE)


def prose_lines(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, strings behind fields included, and of every comment."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, last = node.lineno, node.end_lineno or node.lineno
            yield from enumerate(lines[first - 1 : last], first)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def complaints(source: str) -> list[tuple[int, str]]:
    """Lines of prose with a banned word."""
    return sorted((line, text.strip()) for line, text in prose_lines(source) if BANNED.search(text))


def test_prose_names_the_actor(sources) -> None:  # type: ignore[no-untyped-def]
    found = [
        f"{module.at(line)}: {text}"
        for module in sources
        for line, text in complaints(module.path.read_text(encoding="utf-8"))
    ]
    assert not found, "say which request, worker or tenant:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('"""Who waits."""', 1),
        ("x = 1  # nobody reads it", 1),
        ('def f():\n    """Two lines,\n    and somebody in the second."""', 3),
        ('class C:\n    x: int = 0\n    """Whoever has it."""', 3),
    ],
)
def test_the_rule_bites(source: str, line: int) -> None:
    assert [at for at, _ in complaints(source)] == [line]


@pytest.mark.parametrize("source", ['x = "who"', "def _nobody(): ...", '"""The whole request waits."""', "# a holder"])
def test_the_rule_does_not_bite_the_innocent(source: str) -> None:
    assert not complaints(source)
