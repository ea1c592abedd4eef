"""``python -m jettison.cli.from_vllm WORD``: vLLM's flags, kept as data, and the page that is made of them.

    page        write docs/from-vllm.md (or the file that is named) anew
    compare     the installed vLLM's own parser beside the data: what is new, gone or otherwise; exit code 1 for any
    facts       write the data anew from the installed vLLM

What a new flag becomes here is decided in ``jettison.config.vllm`` by hand; a test asks for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from jettison.cli.vllm_page import page
from jettison.config.vllm.facts import FACTS_FILE, Fact, Kind, read_facts
from jettison.errors import UserError

PARSERS = (
    ("vllm.entrypoints.launchers.cli_args", "vllm.utils.argparse_utils"),
    ("vllm.entrypoints.openai.cli_args", "vllm.utils.argparse_utils"),
    ("vllm.entrypoints.openai.cli_args", "vllm.utils"),
)
"""Where releases have ``make_arg_parser``, and the class of its argument, newest first."""

_COMPARED = ("kind", "aliases", "default", "choices")

PAGE = Path("docs") / "from-vllm.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jettison.cli.from_vllm", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("word", choices=("page", "compare", "facts"))
    parser.add_argument("file", nargs="?", type=Path)
    told = parser.parse_args(arguments)
    if told.word == "page":
        (told.file or PAGE).write_text(page(), encoding="utf-8")
        return 0
    try:
        version, flags = installed_flags()
    except UserError as error:
        print(f"jettison: {error}", file=sys.stderr)
        return 2
    if told.word == "facts":
        write_facts(told.file or FACTS_FILE, version, flags)
        return 0
    lines = list(differences(version, flags))
    print("\n".join(lines) or f"the flags of vLLM {version} are those of the data")
    return 1 if lines else 0


def installed_flags() -> tuple[str, dict[str, Fact]]:
    """Version and flags of the vLLM that can be imported, by its own parser. Raises UserError where there is none."""
    try:
        vllm = import_module("vllm")
    except ImportError as error:
        raise UserError(f"no vLLM can be imported here: {error}") from None
    version = str(getattr(vllm, "__version__", "unknown"))
    for place, home in PARSERS:
        try:
            make, parser_class = import_module(place).make_arg_parser, import_module(home).FlexibleArgumentParser
        except (ImportError, AttributeError):
            continue
        made = make(parser_class(prog="vllm serve"))
        facts = [fact for action in made._actions if (fact := _fact(action)) is not None]
        return version, {fact.name: fact for fact in facts}
    raise UserError(f"vLLM {version} has its parser in none of {', '.join(place for place, _ in PARSERS)}")


def _fact(action: argparse.Action) -> Fact | None:
    """None for arguments that are no flags, and for the flag that shows help."""
    names = [name for name in action.option_strings if name.startswith("--") and not name.startswith("--no-")]
    if not names or isinstance(action, argparse._HelpAction):
        return None
    kind: Kind = "values" if action.nargs in ("+", "*") else "value"
    if isinstance(action, argparse.BooleanOptionalAction):
        kind = "boolean"
    elif action.nargs == 0:
        kind = "switch"
    aliases = [name for name in action.option_strings if name != names[0] and not name.startswith("--no-")]
    choices = [str(choice) for choice in action.choices or () if choice is not None]
    return Fact(names[0], kind, tuple(aliases), _plain(action.default), tuple(choices))


def _plain(default: Any) -> Any:
    """A default as JSON keeps it; None for objects of vLLM's own, for no values, and for what it hides."""
    if default is argparse.SUPPRESS or default in ([], ()):
        return None
    try:
        return json.loads(json.dumps(default))
    except (TypeError, ValueError):
        return None


def differences(version: str, flags: dict[str, Fact]) -> Iterator[str]:
    """A line for each flag that the data has otherwise."""
    kept_version, kept = read_facts()
    for name in sorted(flags.keys() | kept.keys()):
        new, old = flags.get(name), kept.get(name)
        if old is None:
            yield f"{name}: new in vLLM {version}"
        elif new is None:
            yield f"{name}: in vLLM {kept_version}, gone in {version}"
        elif new != old:
            parts = ((part, getattr(old, part), getattr(new, part)) for part in _COMPARED)
            yield f"{name}: {'; '.join(f'{part} {was!r} is {now!r}' for part, was, now in parts if was != now)}"


def write_facts(path: Path, version: str, flags: dict[str, Fact]) -> None:
    """One flag a line, so that versions can be compared."""
    lines = ",\n".join(json.dumps(fact.to_json()) for fact in flags.values())
    path.write_text(f'{{"version": {json.dumps(version)}, "flags": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
