"""Requests with grammars over real worker processes: a worker dies, a drop and a restore come; all follow theirs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import jsonschema

from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.server.grammar_texts import grammar_text
from jettison.server.tokenizer import Tokenizer
from jettison.types import FinishReason, Grammar, Request, SamplingParams

SCHEMA = {"type": "array", "items": {"enum": ["a", 12, None, True]}, "minItems": 30, "maxItems": 60}
GRAMMAR = Grammar(grammar_text("json", json.dumps(SCHEMA), "[ ]{0,1}", {}))
NUM_REQUESTS = 16


def requests(name: str) -> list[Request]:
    return [
        Request(f"{name}{i}", tuple(range(1 + i, 20 + i)), SamplingParams(
            max_tokens=400, temperature=0.9, seed=i, grammar=GRAMMAR if i % 4 else None, ignore_eos=not i % 4), 0)
        for i in range(NUM_REQUESTS)
    ]  # fmt: skip


async def collect(engine: Engine, request: Request, num_seen: list[int]) -> tuple[list[int], FinishReason | None]:
    tokens: list[int] = []
    async for event in engine.submit(request):
        tokens += [token.token_id for token in event.tokens]
        num_seen[0] += len(event.tokens)
        if event.finish_reason is not None:
            assert event.error is None
            return tokens, event.finish_reason
    raise AssertionError("the stream ended without a terminal event")


async def test_a_death_and_moves_change_no_token_that_follows_a_grammar(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    create_model(
        folder, arch="qwen2", layers=4, hidden=32, heads=4, kv_heads=2, seed=5, max_position_embeddings=512, std=0.2)
    flags: dict[str, object] = {
        "model": str(folder), "instances": 2, "page_size": 4096, "block_size": 4, "max_num_seqs": 64,
        "max_num_batched_tokens": 128, "num_threads": 1, "dtype": "float64", "exchange_piece_bytes": 1 << 14,
        "max_num_queued_reqs": None, "restore_dwell_ms": 100,
    }  # fmt: skip
    memory = assemble(EngineConfig.resolve(**flags)).memory_for_blocks(2000)  # type: ignore[arg-type]
    engine = Engine(EngineConfig.resolve(**flags, memory=memory))  # type: ignore[arg-type]
    try:
        await engine.start()

        async def answers(name: str, num_seen: list[int]) -> list[tuple[list[int], FinishReason | None]]:
            return await asyncio.gather(*(collect(engine, each, num_seen) for each in requests(name)))

        async with asyncio.timeout(240):
            expected = await answers("quiet", [0])
            num_seen = [0]
            moved = asyncio.create_task(answers("moved", num_seen))
            while num_seen[0] < 20 * NUM_REQUESTS:
                await asyncio.sleep(0.001)
            engine.orders.request_drop()
            while num_seen[0] < 50 * NUM_REQUESTS:
                await asyncio.sleep(0.001)
            assert engine._crew is not None
            os.kill(engine._crew.pids[1], signal.SIGKILL)
            assert await moved == expected
            counters = engine.snapshot().counters
            assert counters["worker_losses"] == 1
            assert counters["drops"] == 1
    finally:
        await engine.close()
    tokenizer = Tokenizer.from_dir(folder)
    for i, (tokens, reason) in enumerate(expected):
        if i % 4:
            assert reason is FinishReason.STOP
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), SCHEMA)
        else:
            assert reason is FinishReason.LENGTH and len(tokens) == 400


