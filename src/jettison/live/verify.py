"""``jettison verify``: the proof table. Same tokens, whatever memory did meanwhile.

Every architecture goes through every memory event on a real cluster (real pages, real moves, in one process); each
token is compared with what ``transformers`` computes from the same history, up to the first difference of a
request. Without ``transformers`` the reference is one instance with ample memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from jettison.device.model.create import create_model
from jettison.device.model.hf_config import read_config
from jettison.device.reference import Reference, TransformersReference, transformers_available
from jettison.errors import ConfigError
from jettison.live.fault_schedules import kills
from jettison.live.safepoints import LIVE_ONLY, NAMES
from jettison.live.scenarios import SCENARIOS, Outcome, Setting
from jettison.live.scenarios_many import MANY
from jettison.live.solo_reference import SoloReference
from jettison.policy.exchange import ExchangeMode
from jettison.report.output import write_whole
from jettison.report.terminal import note_phase, print_whole, progress_bar

MIN_CONTEXT = 160
"""Tokens: the longest prompts of the events, and answers that are still being written when memory moves."""

NUM_OUTPUT_TOKENS = 96
"""Of a request: 8 requests of it an event and architecture."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One small random model."""

    name: str
    arch: str
    tied: bool = False
    rope_scaling: str | None = None
    head_dim: int | None = None


ARCHITECTURES = (
    Architecture("Llama 2", "llama"),
    Architecture("Llama 3 (scaled rope, tied)", "llama", tied=True, rope_scaling="llama3"),
    Architecture("Mistral", "mistral", head_dim=16),
    Architecture("Qwen2", "qwen2"),
    Architecture("Qwen3", "qwen3", head_dim=16),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    architecture: str
    event: str
    tokens_compared: int
    mismatches: int
    ties: int
    """Differences where both tokens' logits are a few ulps apart (never in float64): not a mismatch."""
    incomplete: int
    """Requests that ended early though nobody cancelled them: what is missing was not compared."""
    happened: bool
    evidence: str


def run_verify(
    model_dir: Path | None, json_out: Path | None, dtype: str = "float64", seed: int = 0, *, full: bool = False
) -> int:
    """Run the table, print it, write it; 0 if every event happened, every request was answered in full and nothing
    differs, else 1.

    ``full``: also three and four instances, and real worker processes that are killed at every named place
    of a move in every mode of exchange (each of these on one of the architectures in turn).

    Raises ModelError or ConfigError for a folder or precision that cannot be served.
    """
    console = Console()
    rows: list[Row] = []
    reference_name = "transformers" if transformers_available() else "one undisturbed instance"
    with tempfile.TemporaryDirectory(prefix="jettison-verify-") as scratch:
        models = list(_models(model_dir, Path(scratch), seed))
        with progress_bar(console=console) as progress:
            events = SCENARIOS | MANY if full else SCENARIOS
            deaths = [death_plan(i, len(models)) if full else [] for i in range(len(models))]
            num_deaths = sum(len(names) for plan in deaths for _, _, names in plan)
            task = progress.add_task("verifying", total=len(models) * len(events) + num_deaths)
            for index, (name, folder) in enumerate(models):
                reference: Reference = (
                    TransformersReference(folder, dtype) if transformers_available() else SoloReference(folder, dtype)
                )
                setting = Setting(folder, dtype, NUM_OUTPUT_TOKENS, seed)
                for event, scenario in events.items():
                    _note(progress, task, f"{name}: {event}", console)
                    rows.append(compare(name, event, scenario(setting), reference))
                    progress.advance(task)
                for mode, instances, places in deaths[index]:
                    _note(progress, task, f"{name}: kill -9 ({mode}, {instances} instances)", console)
                    for where, outcome in kills(setting, places, exchange=str(mode), instances=instances):
                        event = f"kill -9 {where} ({mode}), {instances} instances"
                        rows.append(compare(name, event, outcome, reference))
                        progress.advance(task)
    _print(console, rows, dtype, reference_name)
    if json_out is not None:
        write_whole(json_out, json.dumps(_document(rows, dtype, reference_name), indent=2, sort_keys=True) + "\n")
    failed = [r for r in rows if r.mismatches or r.incomplete or not r.happened]
    return 1 if failed else 0


def _note(progress: Progress, task: TaskID, text: str, console: Console) -> None:
    """What is tried now: in the bar, or as a line where no bar is seen."""
    progress.update(task, description=text)
    found = progress.tasks[0]
    note_phase(f"{text} ({found.completed:.0f} of {found.total:.0f} done)", console)


def death_plan(index: int, num_models: int) -> list[tuple[ExchangeMode, int, list[str]]]:
    """Deaths that one of the architectures goes through: (mode, instances, safepoints), each on an engine of its own.

    All together: every safepoint in every mode with two instances, and every safepoint once with three and with four.
    """
    plan = []
    for shift, mode in enumerate(ExchangeMode):
        places = [n for n in NAMES if n not in LIVE_ONLY or mode is ExchangeMode.LIVE]
        plan.append((mode, 2, places[(index + shift) % num_models :: num_models]))
    for instances in (3, 4):
        plan.append((ExchangeMode.LIVE, instances, list(NAMES[(index + instances) % num_models :: num_models])))
    return [entry for entry in plan if entry[2]]


def _models(model_dir: Path | None, scratch: Path, seed: int) -> Iterator[tuple[str, Path]]:
    if model_dir is not None:
        config = read_config(model_dir)
        if config.max_model_len < MIN_CONTEXT:
            raise ConfigError(
                f"{model_dir}: a context of {config.max_model_len} tokens is too short for the events; "
                f"verify needs {MIN_CONTEXT}"
            )
        yield config.architecture, model_dir
        return
    for index, a in enumerate(ARCHITECTURES):
        folder = scratch / str(index)
        create_model(
            folder, arch=a.arch, layers=4, hidden=32, heads=4, kv_heads=2, head_dim=a.head_dim, seed=seed + index,
            tied=a.tied, rope_scaling=a.rope_scaling, max_position_embeddings=1024, std=0.2,
            shard_bytes=40_000 if index % 2 else None,
        )
        yield a.name, folder


def compare(architecture: str, event: str, outcome: Outcome, reference: Reference) -> Row:
    """Compare each request with the reference up to its first difference, and count those that are not whole."""
    problems = [r.problem for r in outcome.requests if r.problem]
    num_compared = mismatches = ties = 0
    for request in outcome.requests:
        if not request.output:
            continue
        verdict = reference.check(request.prompt, request.output)
        num_compared += verdict.num_compared
        mismatches += verdict.is_mismatch
        ties += verdict.is_tie
    evidence = "; ".join([outcome.evidence, *problems[:1]])
    return Row(architecture, event, num_compared, mismatches, ties, len(problems), outcome.happened, evidence)


def _print(console: Console, rows: list[Row], dtype: str, reference_name: str) -> None:
    table = Table(title=f"Tokens against {reference_name}, {dtype}")
    for heading, justify in (
        ("architecture", "left"), ("event", "left"), ("tokens compared", "right"), ("mismatches", "right"),
        ("ties", "right"), ("evidence", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        evidence = row.evidence if row.happened else f"[red]did not happen:[/red] {row.evidence}"
        if row.incomplete:
            evidence = f"[red]{row.incomplete} ended early:[/red] {evidence}"
        mark = f"[red]{row.mismatches}[/red]" if row.mismatches else "0"
        table.add_row(row.architecture, row.event, f"{row.tokens_compared:,}", mark, str(row.ties), evidence)
    print_whole(table, console)
    total = sum(r.tokens_compared for r in rows)
    console.print(f"{total:,} tokens compared, {sum(r.mismatches for r in rows)} mismatches")
    if missed := sum(not r.happened for r in rows):
        console.print(f"[red]{missed} of {len(rows)} events did not happen[/red]: their rows prove nothing")
    if cut := sum(r.incomplete for r in rows):
        console.print(f"[red]{cut} requests ended early[/red]: what they lack was not compared")


def _document(rows: list[Row], dtype: str, reference_name: str) -> dict[str, object]:
    return {
        "dtype": dtype,
        "reference": reference_name,
        "rows": [asdict(row) for row in rows],
        "tokens_compared": sum(r.tokens_compared for r in rows),
        "mismatches": sum(r.mismatches for r in rows),
        "incomplete": sum(r.incomplete for r in rows),
    }
