"""Every architecture that is served, beside `transformers` in double throughout, through every move of memory.

    python -m benchmarks models table --json benchmarks/results/models.json
    python -m benchmarks models table --only "Gemma 3" gpt-oss --json piece.json
    python -m benchmarks models table --join piece.json other.json --json models.json

A small random model of each (`jettison.device.model.samples`) answers in a live engine in float64 whose memory moves
meanwhile. All requests are told the log-probabilities of the whole vocabulary at each token. `transformers` then reads
prompt and answer at once: its likeliest token must be the answer's at each position, and its log-probabilities are
compared with ours, up to a request's first other token. So both would have answered alike, and no move is seen.

What `transformers` does in float32 whatever its model's precision (norms, angles, softmax, routing) is done in double
(`jettison.device.reference.InDouble`). Column *stock* says that this changes precision alone: how far the unchanged
library in float32 is from that, on a prompt longer than all windows.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.models.switches import switches
from benchmarks.shared import SERVING, Row, keep, machine, parse, print_block, print_verdicts, read_pieces, say
from jettison.device.model.families import FAMILIES
from jettison.device.model.hf_config import read_config
from jettison.device.model.samples import SAMPLES, Sample, make_sample
from jettison.device.reference import TransformersReference
from jettison.live.verify.run import SCENARIOS
from jettison.live.verify.scenarios import Observed, Setting

MOVES = {
    "chunks": "chunked prefill", "two stages": "static pipeline", "drop": "drop + exchange (transfer)",
    "drop, KV elsewhere": "drop + exchange (live)", "restore": "restore + split",
    "migration of KV": "migrate while decoding", "migration as tokens": "migrate as tokens, instance to instance",
    "host pool": "swap out + in", "checkpoint": "harvest: freed from checkpoints",
}  # fmt: skip
"""What a table calls them, and what `jettison verify` does."""

TOLERANCE, STOCK_TOLERANCE = 1e-9, 2e-3
NUM_OUTPUT_TOKENS = 48
STOCK_TOKENS = 64


def main() -> int:
    """Command line."""
    args = parse(
        __doc__, only=([""], "architectures by their names"), seed=0, tokens=NUM_OUTPUT_TOKENS,
        join=([Path()], "files of some architectures each, of one state of the sources: one table of them"),
    )
    torch.set_num_threads(1)
    names = [sample.name for sample in SAMPLES]
    if args.join != [Path()]:
        rows = read_pieces(args.join, lambda row: names.index(row["architecture"]), ("transformers",))["rows"]
    else:
        rows = []
        for sample in (sample for sample in SAMPLES if sample.name in args.only or args.only == [""]):
            rows.append(row_of(sample, args.seed, args.tokens))
            told = rows[-1]
            say(f"{sample.name}: {told['tokens']} tokens, {told['differ']} differ, {told['largest']:.1e}")
    document = {
        "rows": rows, "moves": MOVES, "tolerance": TOLERANCE, "machine": machine(), "transformers": _version(),
        "tokens": sum(row["tokens"] for row in rows), "verdicts": print_verdicts(verdicts(rows)),
    }  # fmt: skip
    print_block("models", document)
    keep(args.json, document, *SERVING)
    return 0 if all(each["met"] for each in document["verdicts"]) else 1


def verdicts(rows: list[Row]) -> list[tuple[bool, str]]:
    """What had to hold."""
    architectures = {row["model_type"] for row in rows}
    mixtures = {row["model_type"] for row in rows if row["is_mixture"]}
    found = [
        (not sum(row["differ"] for row in rows), "no token differs"),
        (not sum(row["missing"] for row in rows), "no answer ended early"),
        (all(row["largest"] <= TOLERANCE for row in rows), f"log-probabilities differ by at most {TOLERANCE:g}"),
        (all(row["stock"] <= STOCK_TOLERANCE for row in rows), f"stock float32 is within {STOCK_TOLERANCE:g}"),
        (all(move["happened"] for row in rows for move in row["moves"].values()), "each move happened"),
    ]  # fmt: skip
    if len(rows) == len(SAMPLES):
        served = {family.model_type for family in FAMILIES.values() if not family.text_types}
        found.append((architectures == served, "each architecture of the table is here"))
        found.append((len(architectures) >= 18 and len(mixtures) >= 4, "at least 18, of them 4 mixtures of experts"))
    return found


def row_of(sample: Sample, seed: int, num_tokens: int) -> Row:
    """One architecture through all moves."""
    with tempfile.TemporaryDirectory(prefix="jettison-models-") as scratch:
        folder = make_sample(sample, Path(scratch) / "model", seed + 1)
        config = read_config(folder)
        setting = Setting(folder, "float64", num_tokens, seed, num_logprobs=config.vocab_size)
        reference = TransformersReference(folder, "float64")
        moves = {}
        for name, event in MOVES.items():
            outcome = SCENARIOS[event](setting)
            moves[name] = compared(outcome.requests, reference) | {
                "happened": outcome.happened, "evidence": outcome.evidence,
            }  # fmt: skip
        stock = stock_difference(folder, reference, config.vocab_size)
    return {
        "architecture": sample.name, "model_type": sample.arch, "models": sample.models,
        "is_mixture": config.arithmetic.experts is not None, "switches": switches(config), **total(moves),
        "stock": stock, "moves": moves,
    }  # fmt: skip


def total(moves: Mapping[str, Row]) -> Row:
    """Of all moves."""
    found = moves.values()
    counts = {key: sum(move[key] for move in found) for key in ("tokens", "differ", "missing")}
    return counts | {"largest": max(move["largest"] for move in found)}


def compared(requests: list[Observed], reference: TransformersReference) -> Row:
    """Tokens and log-probabilities of answers beside those of the reference, up to the first that differs."""
    tokens = differ = missing = 0
    largest = 0.0
    for request in requests:
        missing += bool(request.problem)
        if not request.output:
            continue
        logits = reference.logits(request.prompt + request.output[:-1])[len(request.prompt) - 1 :]
        wanted = logits.log_softmax(-1)
        for ours, theirs, row, told in zip(
            request.output, logits.argmax(-1).tolist(), wanted, request.logprobs, strict=True
        ):
            tokens += 1
            if told is None or ours != theirs:
                differ += 1
                break
            ids, values = zip(*told.top, strict=True)
            largest = max(largest, float((row[list(ids)] - torch.tensor(values, dtype=row.dtype)).abs().max()))
    return {"tokens": tokens, "differ": differ, "missing": missing, "largest": largest}


def stock_difference(folder: Path, reference: TransformersReference, vocab_size: int) -> float:
    """Of the library as it is in float32 from what stands for it in double: of log-probabilities, the largest."""
    ids = random.Random(5).choices(range(vocab_size), k=STOCK_TOKENS)
    theirs = TransformersReference(folder, "float32").logits(ids)
    return float((theirs.double().log_softmax(-1) - reference.logits(ids).log_softmax(-1)).abs().max())


def _version() -> str:
    import transformers

    return str(transformers.__version__)
