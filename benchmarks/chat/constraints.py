"""How many schemas and grammars can be compiled, and how long that takes: 300 of our own, and JSON Schema's test suite.

Compiled in this process, as the server's child process does, without the pipe between the two (0.1 ms) and without its
bounds (0.8 s of the processor, 48 MiB). Times are of the processor, as the bound is. ``--bomb`` adds a schema that is
beyond them, through the child, and tells in what time it was refused.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared import keep, machine, parse
from jettison.server.compile_process import Compiler, Job
from jettison.server.compiling import GrammarCompiler
from jettison.server.errors import ApiError
from jettison.server.structured import Constraint

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "server"))

from many_schemas import NUM_OTHERS, NUM_SCHEMAS, other, published, schema

BOMB = Constraint("json", json.dumps({"allOf": [
    {"anyOf": [{"type": "object", "properties": {f"p{at}{one}": {"type": "integer"}}} for one in range(6)]}
    for at in range(14)]}))  # fmt: skip


def jobs() -> dict[str, list[Job]]:
    """By where they are from."""
    own = [Job(kind="json", text=json.dumps(schema(at)), white_space=None) for at in range(NUM_SCHEMAS)]
    others = [other(at) for at in range(NUM_OTHERS)]
    own += [Job(kind=each.kind, text=each.text, white_space=each.whitespace_pattern) for each in others]
    suite = [Job(kind="json", text=json.dumps(each.schema), white_space=None) for each in published()]
    return {"own": own, "suite": suite}


def measured(compiler: Compiler, these: list[Job]) -> dict[str, Any]:
    """Of those that were compiled: the processor's time for each, in milliseconds."""
    spent_ms, refused = list[float](), Counter[str]()
    for job in these:
        start_s = time.process_time()
        made = compiler.compiled(job)
        if made.error is None:
            spent_ms.append((time.process_time() - start_s) * 1e3)
        else:
            refused[made.error[:70]] += 1
    p50, p99 = np.percentile(spent_ms, (50, 99))
    times = {"p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2), "most_ms": round(max(spent_ms), 2)}
    return {"asked": len(these), "compiled": len(spent_ms), **times, "refused": dict(refused.most_common(12))}


async def refused_bomb() -> dict[str, Any]:
    """Through a compiler with its child, which has answered once."""
    compiler = GrammarCompiler({})
    try:
        await compiler.compiled(Constraint("json", "{}"))
        start_s = time.perf_counter()
        try:
            await compiler.compiled(BOMB)
            told = "compiled"
        except ApiError as error:
            told = error.message
        return {"answer": told, "seconds": round(time.perf_counter() - start_s, 3)}
    finally:
        compiler.close()


def main() -> int:
    options = parse(__doc__, bomb=(False, "a schema beyond the bounds, too"))
    compiler = Compiler({})
    compiler.compiled(Job(kind="json", text="{}"))
    document: dict[str, Any] = {name: measured(compiler, these) for name, these in jobs().items()}
    if options.bomb:
        document["bomb"] = asyncio.run(refused_bomb())
    print(json.dumps(document, indent=1))
    keep(options.json, {"machine": machine(), **document}, "server")
    return 0
