"""Documents stay few, short and true: pages and words are bounded, and every link and path that they name is there.

A line with ``<!-- check -->`` names what is about to come, and is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MOST_PAGES = 16
MOST_WORDS = 60_000
MOST_CHANGES = 120
MOST_COLUMNS = 120

ROOMS = ("cli", "core", "cost", "demo", "device", "live", "memory", "policy", "report", "server", "sim", "transport")
"""Whose modules are looked for; ``config`` and ``workload`` are also keys of specs and results."""

NAMELESS = re.compile(r"\b(who|whoever|whom|nobody|somebody|what is had)\b", re.IGNORECASE)
"""Words behind which an actor hides: a document names the request, worker, tenant, client or operator."""

COMING = "<!-- check -->"

LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*\w)/?`|`((?:[\w.-]+/)+)`")
SCRIPT = re.compile(r"\b((?:benchmarks|tests|examples|papers)/[\w/.-]*\w\.(?:py|json|yaml|md|csv))\b")
"""Also inside of commands and of code."""
WRITTEN = "papers/pages/"
"""By a command that the documents speak of."""
LONE_SCRIPT = re.compile(r"`([\w-]+\.py)`")
BENCHMARK = re.compile(r"-m benchmarks ([a-z]\w*) ([a-z]\w*)")
MODULE = re.compile(rf"`((?:{'|'.join(ROOMS)})(?:\.\w+)+)`")
SPOKEN_OF_IN_SOURCE = re.compile(r"docs/([\w-]+\.md)")


def _documents(root: Path) -> list[Path]:
    return [*(root / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")), *_pages(root)]


def _pages(root: Path) -> list[Path]:
    return sorted((root / "docs").rglob("*.md"))


def _prose(page: Path) -> Iterator[tuple[int, str]]:
    """Lines outside of code, with their numbers."""
    is_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = (line.lstrip("#").strip() for _, line in _prose(page) if re.match(r"#+ ", line))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_and_words_are_few(root: Path) -> None:
    pages = _pages(root)
    assert len(pages) <= MOST_PAGES
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= MOST_WORDS
    assert len((root / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= MOST_CHANGES


def test_a_page_says_first_what_a_reader_can_do_with_it(root: Path) -> None:
    first = {page.name: page.read_text(encoding="utf-8").split("\n\n")[1] for page in _pages(root)}
    assert not [name for name, paragraph in first.items() if not re.search(r"\byou\b", paragraph)]


def test_lines_of_the_architecture_fit(root: Path) -> None:
    lines = (root / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > MOST_COLUMNS and not line.startswith("|")]
    assert not long, "a table's row alone may be longer"


def test_documents_name_their_actors(root: Path) -> None:
    found = [f"{page.name}:{number}: {word[0]}" for page in [*_documents(root), root / "CHANGELOG.md"]
             for number, line in _prose(page) for word in [NAMELESS.search(line)] if word]  # fmt: skip
    assert not found, "\n".join(found)


def test_every_link_leads_somewhere(root: Path) -> None:
    lost = []
    for page in [*_documents(root), root / "CHANGELOG.md", root / "papers" / "setup.md"]:
        for number, line in _prose(page):
            for target in LINK.findall(line):
                path, _, anchor = target.partition("#")
                if ":" in path:
                    continue
                file = (page.parent / path).resolve() if path else page
                if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
                    lost.append(f"{page.name}:{number}: {target}")
    assert not lost, "\n".join(lost)


def test_every_path_and_module_that_a_document_names_is_there(root: Path) -> None:
    lost = [
        f"{page.name}:{number}: {name}"
        for page in _documents(root)
        for number, line in _prose(page)
        if COMING not in line
        for name in _lost_names(root, line)
    ]
    assert not lost, "\n".join(lost)


def _lost_names(root: Path, line: str) -> Iterator[str]:
    for file, folder in FILE.findall(line):
        name = file or folder
        first = name.split("/")[0]
        bases = [base for base in (root, root / "src" / "jettison") if (base / first).is_dir()]
        if bases and not name.endswith(".html") and not any((base / name).exists() for base in bases):
            yield name
    for name in MODULE.findall(line):
        if not _is_in_source(root / "src" / "jettison", name.split(".")):
            yield name


def _is_in_source(folder: Path, parts: list[str]) -> bool:
    """Whether the dotted name is a room, a module, or something that one of these spells out."""
    if not parts:
        return True
    head, rest = parts[0], parts[1:]
    if (folder / head).is_dir():
        return _is_in_source(folder / head, rest)
    module, word = (folder / f"{head}.py", rest[0] if rest else "")
    if not module.is_file():
        module, word = folder / "__init__.py", head
    return module.is_file() and re.search(rf"\b{word}\b", module.read_text(encoding="utf-8")) is not None


def test_every_script_that_a_command_names_is_there(root: Path) -> None:
    lost = [
        f"{page.name}:{number}: {name}"
        for page in [*_documents(root), root / "CHANGELOG.md", root / "papers" / "setup.md"]
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if COMING not in line
        for name in SCRIPT.findall(line)
        if not name.startswith(WRITTEN) and not (root / name).exists()
    ]
    assert not lost, "\n".join(lost)


def test_every_lone_script_and_every_benchmark_is_there(root: Path) -> None:
    files = {file.name for folder in ("src", "tests", "benchmarks", "papers", "examples", "deploy")
             for file in (root / folder).rglob("*.py")}  # fmt: skip
    lost = [
        f"{page.name}:{number}: {name}"
        for page in [*_documents(root), root / "papers" / "setup.md", root / "benchmarks" / "results" / "README.md"]
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for name in [
            *(each for each in LONE_SCRIPT.findall(line) if each not in files),
            *(f"{family} {part}" for family, part in BENCHMARK.findall(line)
              if not (root / "benchmarks" / family / f"{part}.py").is_file()),
        ]
    ]  # fmt: skip
    assert not lost, "\n".join(lost)


def test_every_page_that_the_source_speaks_of_is_there(root: Path) -> None:
    folders = ("src", "tests", "benchmarks", "papers", "examples")
    suffixes = (".py", ".md", ".yaml")
    files = [file for folder in folders for file in (root / folder).rglob("*") if file.suffix in suffixes]
    lost = [
        f"{file.relative_to(root)}: {name}"
        for file in [root / "Makefile", *files]
        for name in SPOKEN_OF_IN_SOURCE.findall(file.read_text(encoding="utf-8"))
        if not (root / "docs" / name).is_file()
    ]
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize("line", ["`core/serving/nothing.py`", "`policy.nothing`", "`core.serving.group.nothing_at`"])
def test_a_name_that_leads_nowhere_is_found(root: Path, line: str) -> None:
    assert list(_lost_names(root, line))


@pytest.mark.parametrize("line", ["`core/serving/group.py`", "`tests/house`", "`policy.batching`", "`a/b`"])
def test_a_name_that_leads_somewhere_is_not(root: Path, line: str) -> None:
    assert not list(_lost_names(root, line))
