"""What a grammar's masks do to the time between tokens: requests with and without a schema, on a trained model.

    python -m benchmarks chat masks [--requests 16] [--rounds 5] [--json masks.json]

One server of SmolLM2-135M-Instruct (49,152 words) in bfloat16. Each round opens so many streams at once, first of one
kind and then of the other, in turn: ``free`` takes whatever the model says, ``schema`` asks for a list of at least a
thousand records under ``response_format``, so that no answer ends before its length. Both have as many tokens, greedy.
A round's figure is the median over its requests of their TPOT (last token less first, over the steps between).
Judged: the median over rounds of ``schema`` over ``free`` is at most 1.05.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path

from benchmarks.evidence import LIVE
from benchmarks.servers import ServerProcess
from benchmarks.shared import (
    Namespace,
    Row,
    in_turn,
    keep,
    machine,
    parse,
    print_block,
    print_verdicts,
    say,
    settings_of,
    work_folder,
)
from jettison.modelfiles.fetching import fetch_model

TEXT = b'"delta":{"content":"'
KINDS = ("free", "schema")
LIMIT = 1.05
SCHEMA: Row = {
    "type": "array", "minItems": 1000,
    "items": {
        "type": "object", "additionalProperties": False, "required": ["name", "kind", "count"],
        "properties": {"name": {"type": "string", "maxLength": 40}, "count": {"type": "integer"},
                       "kind": {"enum": ["plant", "animal", "stone"]}},
    },
}  # fmt: skip


def main() -> None:
    args = parse(
        __doc__, requests=(16, "streams at once"), tokens=(200, "of each answer"), rounds=5, threads=2, work=Path,
    )  # fmt: skip
    work = work_folder(args.work, "masks")
    folder, _ = fetch_model("smollm2", say)
    flags: dict[str, object] = {
        "num_threads": args.threads, "dtype": "bfloat16", "memory": "2GiB", "max_model_len": 1024,
        "max_num_seqs": args.requests,
    }  # fmt: skip
    with ServerProcess(folder, flags, work / "server.log") as server:
        rows = measure(server.port, args)
    ratios = ratios_of(rows)
    found = {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    print_block("masks", {"rows": rows, "verdict": found})
    print_verdicts([(found["ratio"] <= LIMIT, f"P50 TPOT with masks {found['ratio']:.3f} of without, at most {LIMIT}")])
    setting = settings_of(args) | {"machine": machine()}
    keep(args.json, {"setting": setting, "rows": rows, "verdict": found}, *LIVE)


def measure(port: int, args: Namespace) -> list[Row]:
    """All rounds; one goes before that is not counted, and compiles the schema."""
    rows: list[Row] = []
    for number in range(-1, args.rounds):
        for kind in in_turn(KINDS, max(number, 0)):
            tpots_s = asyncio.run(at_once(port, kind, args))
            if number >= 0:
                rows.append({"round": number, "kind": kind, "tpot_p50_ms": statistics.median(tpots_s) * 1e3})
                say(rows[-1])
    return rows


def ratios_of(rows: list[Row]) -> list[float]:
    """Of each round: ``schema`` over ``free``."""
    times_ms = {(row["round"], row["kind"]): row["tpot_p50_ms"] for row in rows}
    return [times_ms[number, "schema"] / ms for (number, kind), ms in times_ms.items() if kind == "free"]


async def at_once(port: int, kind: str, args: Namespace) -> list[float]:
    """Seconds between tokens of each request."""
    bodies = [body(kind, index, args.tokens) for index in range(args.requests)]
    return await asyncio.gather(*(stream(port, each, args.tokens) for each in bodies))


def body(kind: str, index: int, max_tokens: int) -> bytes:
    """A request of its own words, so that prompts share nothing but the template's beginning."""
    asked = f"Think of {index + 2} things that are found in a garden. List them, each with a name and a count."
    fields: Row = {"model": "smollm2", "messages": [{"role": "user", "content": asked}], "max_tokens": max_tokens,
                   "temperature": 0, "ignore_eos": True, "stream": True}  # fmt: skip
    if kind == "schema":
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "things", "schema": SCHEMA}}
    return json.dumps(fields).encode()


async def stream(port: int, data: bytes, max_tokens: int) -> float:
    """Seconds between tokens. Raises RuntimeError of an answer that does not end by its length."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    times_s, read = list[float](), b""
    while piece := await reader.read(1 << 16):
        read += piece
        if TEXT in piece:
            times_s.append(time.perf_counter())
    writer.close()
    if b'"finish_reason":"length"' not in read:
        raise RuntimeError(f"does not end by its length: {read[:300]!r} ... {read[-300:]!r}")
    return (times_s[-1] - times_s[0]) / (max_tokens - 1)
