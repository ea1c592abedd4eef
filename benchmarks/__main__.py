"""Measurements by family, from the root of a checkout.

    python -m benchmarks                        # the families and their parts
    python -m benchmarks FAMILY                 # a family's parts, a line each
    python -m benchmarks FAMILY PART --help     # what a part measures, and its options
    python -m benchmarks FAMILY PART [OPTIONS]

A family is a folder here, a part a module in it with a function ``main``. Figures that are kept, and what they mean:
benchmarks/results/README.md.
"""

from __future__ import annotations

import ast
import importlib
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def parts_of(folder: Path) -> dict[str, str]:
    """Part -> the first sentence of its module; nothing is imported."""
    found = {}
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[file.stem] = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
    return found


def main(arguments: list[str]) -> int:
    """Run a part, or say what there is; the exit code."""
    folders = (each for each in sorted(HERE.iterdir()) if each.name != "engines")
    families = {folder.name: parts for folder in folders if (parts := parts_of(folder))}
    family, part = [*arguments, "", ""][:2]
    if family not in families:
        print(__doc__)
        for name, parts in families.items():
            print(f"{name:10} {', '.join(parts)}")
        return 2 if family and not family.startswith("-") else 0
    if part not in families[family]:
        for name, told in families[family].items():
            print(f"{family} {name:14} {told}")
        return 2 if part and not part.startswith("-") else 0
    sys.argv = [f"python -m benchmarks {family} {part}", *arguments[2:]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers end with it
    return importlib.import_module(f"benchmarks.{family}.{part}").main() or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
