"""What measurements share: options, turns, figures, tables, result files.

Not here: loads and servers (``servers.py``), evidence itself (``evidence.py``), and anything of one family alone.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.evidence import DECIDING, LIVE, REPOSITORY, SERVING, VIRTUAL, write_result
from benchmarks.figures import made, spread, table, text_of

__all__ = ["DECIDING", "LIVE", "REPOSITORY", "SERVING", "SUPPRESS", "VIRTUAL", "Namespace", "spread",
           "table", "text_of"]  # fmt: skip

Row = dict[str, Any]
Item = TypeVar("Item")


# --- the command line


def parse(doc: str | None, **flags: Any) -> Namespace:
    """Options of the command line: ``--json`` (where figures and their evidence are written), and those told.

    A flag is told as its default, which says its type (False is a switch, a list takes several), or as a type where
    there is none; or as a tuple of that, its help, and other words of ``add_argument`` (``positional``: no dashes).
    """
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    for name, told in ({"json": (Path, "where figures and their evidence are written")} | flags).items():
        default, *rest = told if isinstance(told, tuple) else (told,)
        words: dict[str, Any] = {"default": None if isinstance(default, type) else default}
        if default is False:
            words = {"action": "store_true"}
        elif isinstance(default, list):
            words |= {"nargs": "+", "type": type(default[0])}
        elif default is not None:
            words["type"] = default if isinstance(default, type) else type(default)
        for more in rest:
            words |= {"help": more} if isinstance(more, str) else more
        if words.get("action") in ("append", "store_const"):
            words.pop("type", None)
        option = name if words.pop("positional", False) else "--" + name.replace("_", "-")
        parser.add_argument(option, **words)
    return parser.parse_args()


def work_folder(given: Path | None, name: str) -> Path:
    """The folder given, or a new one."""
    folder = given or Path(tempfile.mkdtemp(prefix=f"jettison-{name}-"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def say(text: object) -> None:
    """Progress, to standard error."""
    print(f"  {text}", file=sys.stderr, flush=True)


def again(*arguments: str) -> list[str]:
    """The command of another part, or of this one in a process of its own (``cwd=REPOSITORY``)."""
    return [sys.executable, "-m", "benchmarks", *arguments]


def absolute(python: Path | None) -> Path | None:
    """Not resolved: the interpreter of a virtual environment is a link, and the link is what says which one."""
    return None if python is None else Path(os.path.abspath(python))


def data_dir(given: Path | None) -> Path:
    """Where recorded arrivals are: the option, JETTISON_DATA, or a shared folder beside the checkout."""
    for candidate in (given, os.environ.get("JETTISON_DATA"), REPOSITORY.parent / "shared" / "data"):
        if candidate and (Path(candidate) / "arrivals").is_dir():
            return Path(candidate) / "arrivals"
    raise SystemExit("no traces: give --data DIR or set JETTISON_DATA")


# --- figures


def in_turn(items: Sequence[Item], number: int) -> list[Item]:
    """All of them, in round ``number`` another one first."""
    shift = number % max(1, len(items))
    return [*items[shift:], *items[:shift]]


def ratio(a: float | None, b: float | None) -> float | None:
    """None where either is unknown or there is nothing to divide by."""
    return a / b if a is not None and b else None


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def quantile(values: Iterable[float], share: float) -> float:
    """The value that this share of them is at most; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered), -int(-share * len(ordered) // 1)) - 1)] if ordered else 0.0


def milliseconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Of one call."""
    began_s = clock()
    work()
    return 1e3 * (clock() - began_s)


def percentiles_ms(summary: Any, name: str, *percents: int) -> Row:
    """``{name}_p50_ms`` and so on, of a summary of seconds."""
    return {f"{name}_p{p}_ms": 1e3 * (getattr(summary, f"p{p}") or 0.0) for p in percents}


def machine() -> Row:
    """What figures depend on."""
    import torch

    facts = dict(
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line
    )  # fmt: skip
    told = {key.strip(): value.strip() for key, value in facts.items()}
    known = ("avx2", "f16c", "avx512f", "avx512_bf16", "amx_bf16")
    return {"cpu": told.get("model name", platform.machine()), "cores": os.cpu_count(),
            "flags": [flag for flag in known if flag in told.get("flags", "").split()],
            "kernel": platform.release(), "python": platform.python_version(), "torch": torch.__version__}  # fmt: skip


# --- telling and keeping


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, title: str = "") -> None:
    """As a table, by default with the columns of the first row that hold one value."""
    if not rows:
        return
    shown = columns or [key for key, value in rows[0].items() if not isinstance(value, list | dict)]
    if title:
        print(f"\n{title}\n")
    print(table([name.replace("_", " ") for name in shown], [[row.get(name) for name in shown] for row in rows]))


def print_block(name: str, document: Mapping[str, Any]) -> None:
    """The table that pages have of such a result file."""
    print(made(name, document))


def print_verdicts(verdicts: Iterable[tuple[bool, str]]) -> list[Row]:
    """What had to hold, and whether it does; as a result file has it."""
    told = [{"met": is_met, "text": text} for is_met, text in verdicts]
    for each in told:
        print(f"{'met' if each['met'] else 'MISSED'}: {each['text']}", flush=True)
    return told


def keep(path: Path | None, document: Mapping[str, Any], *rooms: str) -> None:
    """Write figures with their evidence, where a file was asked for."""
    if path is not None:
        write_result(path, dict(document), *rooms)


def settings_of(args: Namespace) -> Row:
    """Options as a result file has them."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "json"}


def read_pieces(files: Sequence[Path], key: Callable[[Row], Any], same: Sequence[str] = ()) -> Row:
    """One document of several files' rows. Raises ValueError where sources (or ``same``) differ, or a row is twice."""
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for name in ("evidence", *same):
        if any(_sources(each[name]) != _sources(documents[0][name]) for each in documents):
            raise ValueError(f"the pieces differ in their {'sources' if name == 'evidence' else name}")
    rows = sorted((row for document in documents for row in document["rows"]), key=key)
    if len({key(row) for row in rows}) != len(rows):
        raise ValueError("a row is twice in the pieces")
    return documents[-1] | {"rows": rows}


def _sources(told: Any) -> Any:
    return told["rooms"] if isinstance(told, dict) and "rooms" in told else told
