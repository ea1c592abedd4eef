"""``jettison verify``: the proof table. Same tokens, whatever memory did meanwhile.

Architectures go through memory events on a real cluster (real pages, real moves, in one process): some through all of
them, each other one through those that layers of its own could break. Each token is compared with what ``transformers``
computes from the same history, up to the first difference of a request. Without ``transformers``, and where one asks
for it, the reference is one instance with ample memory that has each request alone. An event that a model cannot have,
and one that fails or hangs, are rows like the others.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress, TaskID

from jettison.device.model.hf_config import read_config
from jettison.device.model.samples import KEPT, SAMPLES, Sample, make_sample
from jettison.device.reference import Reference, TransformersReference, transformers_available
from jettison.errors import ConfigError, JettisonError, ModelError
from jettison.live.engine.assembly import Assembly, assemble
from jettison.live.machine.memory import memory_limit
from jettison.live.verify import scenarios
from jettison.live.verify.applicable import Has, Needs, why_not
from jettison.live.verify.deaths import death_name, death_plan, is_alone, kills
from jettison.live.verify.proof_table import Conditions, ProofTable, Row, compare, failed, not_applicable, print_table
from jettison.live.verify.scenarios import BLOCK_SIZE, Event, Outcome, Setting, make_config
from jettison.live.verify.scenarios_ahead import AHEAD, AHEAD_TOO
from jettison.live.verify.scenarios_grammars import GRAMMARS
from jettison.live.verify.scenarios_harvest import HARVEST, HARVEST_IN_PIPELINES
from jettison.live.verify.scenarios_many import MANY
from jettison.live.verify.scenarios_migration import MIGRATIONS
from jettison.live.verify.scenarios_packing import PACKING
from jettison.live.verify.scenarios_sleep import SLEEP
from jettison.live.verify.scenarios_steps import STEPS
from jettison.live.verify.scenarios_together import RUNGS_TOGETHER
from jettison.live.verify.solo_reference import SoloReference
from jettison.memory.kvtransfers import ExchangeMode
from jettison.report.terminal import note_phase, progress_bar

log = logging.getLogger(__name__)

MIN_CONTEXT = 128
"""Tokens: the longest prompts of the events, and answers that are still being written when memory moves."""

NUM_OUTPUT_TOKENS = 96
"""Of a request: 8 requests of it an event and architecture."""

SOLO = "one undisturbed instance"
NO_REFERENCE = (
    "transformers is not installed: tokens are compared with what our own kernels compute for each request alone, "
    "which shows less (a fault of the model's arithmetic would be on both sides); pip install transformers"
)


SEED = 0
"""Of prompts, and of the first model."""

SCENARIOS = STEPS | AHEAD | scenarios.SCENARIOS | MIGRATIONS | RUNGS_TOGETHER | HARVEST | SLEEP | PACKING | GRAMMARS
FULL_ONLY = MANY | HARVEST_IN_PIPELINES | AHEAD_TOO

WHOLE = ("Llama 2", "Llama 3", "Mistral", "Qwen2", "Qwen3", "Qwen3-MoE")
ARCHITECTURES = tuple(sample for sample in SAMPLES if sample.name in WHOLE)
"""These go through all events."""
OTHERS = (*(sample for sample in SAMPLES if sample.name not in WHOLE), *KEPT)
"""These through one event of ``BRIEF`` each, in turn; with ``full`` through all of them."""
BRIEF = ("chunked prefill", "swap out + in", "migrate while decoding", "drop + exchange (live)", "restore + split",
         "harvest: freed from checkpoints")  # fmt: skip
"""Chunks, the host pool, another instance, two stages with KV elsewhere, the way back, checkpoints."""


def run_verify(
    model_dir: Path | None, json_out: Path | None, dtype: str = "float64", *, full: bool = False,
    max_model_len: int | None = None, kernels: str = "auto", alone: bool = False, device: str = "cpu",
) -> int:
    """Run the table, print it, write it; 0 if every event that the models can have happened, every request was answered
    in full and nothing differs, else 1; also 1 where that leaves no event. What has been found is in ``json_out`` after
    each event, and is printed however the run ends.

    ``full``: also each architecture through all of ``BRIEF``, three and four instances, offline requests in pipelines,
    events with steps planned ahead, and real worker processes that are killed at every named place of a move in every
    mode of exchange (each of these on one of the architectures in turn).
    ``max_model_len``: context that is served, as ``jettison serve`` has it. ``device``: cpu or cuda, all instances on
    the first card. ``alone``: compare with each request alone, computed by the same kernels, whatever is installed.

    Raises ModelError or ConfigError for a folder or precision that cannot be served, before the first event.
    """
    console = Console()
    has_reference = transformers_available() and not alone
    if not has_reference and not alone:
        console.print(f"[red]{NO_REFERENCE}[/red]")
    with tempfile.TemporaryDirectory(prefix="jettison-verify-") as scratch:
        models = list(_models(model_dir, Path(scratch), device, max_model_len))
        settings = [
            Setting(model.folder, dtype, NUM_OUTPUT_TOKENS, SEED, max_model_len, kernels, device=device)
            for model in models
        ]
        settings = [
            kept_setting(setting) if model.is_kept else setting for model, setting in zip(models, settings, strict=True)
        ]
        num_whole = len(models) if model_dir is not None else len(ARCHITECTURES)
        served = [check_served(setting) for setting in settings]
        of_all = served[0].worker_specs[0]
        against = "transformers" if has_reference else SOLO
        parts_apart = not has_reference and of_all.dtype != "float64"
        conditions = Conditions(of_all.dtype, against, of_all.kernels, max_model_len, parts_apart)
        table = ProofTable(conditions, json_out)
        events_of = [_events_of(i, num_whole, full) for i in range(len(models))]
        deaths = [death_plan(i, num_whole) if full and i < num_whole else [] for i in range(len(models))]
        total = sum(map(len, events_of)) + sum(len(places) for plan in deaths for _, _, places in plan)
        try:
            with progress_bar(console=console) as progress:
                bar = _Bar(progress, progress.add_task("verifying", total=total), console)
                every = zip(models, settings, served, events_of, deaths, strict=True)
                for model, setting, assembly, mine, plan in every:
                    resolved = replace(setting, dtype=of_all.dtype)
                    has, reference = Has(assembly, BLOCK_SIZE, memory_limit()), model.reference(resolved, alone)
                    is_solo = not has_reference or model.is_solo(resolved, alone)
                    run = _Run(model.name, resolved, has, table, bar, reference, is_solo=is_solo)
                    run.events(mine)
                    for mode, instances, places in plan:
                        run.deaths(mode, instances, places)
            table.write(is_complete=True)
        finally:
            print_table(console, table)
    return 0 if table.is_proof else 1


class Verified(NamedTuple):
    """A model that goes through events."""

    name: str
    folder: Path
    exact: Path
    """A folder with the weights that it stands for; the same where they are not kept as integers."""

    @property
    def is_kept(self) -> bool:
        """Whether its weights are kept as integers."""
        return self.exact != self.folder

    def is_solo(self, setting: Setting, alone: bool) -> bool:
        """Whether its tokens are compared with those of an undisturbed instance, whatever is installed. A type that
        cannot hold the exact weights would round them."""
        return alone or (self.is_kept and setting.dtype == "bfloat16")

    def reference(self, setting: Setting, alone: bool) -> Reference:
        """What its tokens are compared with."""
        if self.is_solo(setting, alone):
            return solo_reference(setting)
        return make_reference(setting, self.exact)


def kept_setting(setting: Setting) -> Setting:
    """For weights that are kept as integers: in double only torch's kernels keep them."""
    in_double = setting.dtype == "float64" and setting.device == "cpu" and setting.kernels == "auto"
    return replace(setting, kernels="torch") if in_double else setting


def check_served(setting: Setting) -> Assembly:
    """Raise ModelError or ConfigError now for what every event would fail with."""
    assembly = assemble(make_config(setting, BLOCK_SIZE, 1))
    assembly.check()
    context = assembly.limits.max_model_len
    if context < MIN_CONTEXT:
        raise ConfigError(
            f"{setting.model_dir}: a context of {context} tokens is too short for the events; "
            f"verify needs {MIN_CONTEXT}"
        )
    return assembly


def make_reference(setting: Setting, exact: Path) -> Reference:
    """``transformers`` where it is installed, with the weights of ``exact``."""
    if transformers_available():
        return TransformersReference(exact, setting.dtype)
    return solo_reference(setting)


def solo_reference(setting: Setting) -> Reference:
    """Each request alone, by the kernels of the events."""
    return SoloReference(setting.model_dir, setting.dtype, setting.max_model_len, setting.kernels, setting.device)


def _events_of(index: int, num_whole: int, full: bool) -> Mapping[str, Event]:
    """Of a model: all of them where it is one of the first ``num_whole``."""
    if index < num_whole:
        return SCENARIOS | FULL_ONLY if full else SCENARIOS
    names = BRIEF if full else BRIEF[index % len(BRIEF) :][:1]
    return {name: SCENARIOS[name] for name in names if name in SCENARIOS}


class _Bar:
    """What is tried now: in the bar, or as a line where no bar is seen."""

    def __init__(self, progress: Progress, task: TaskID, console: Console) -> None:
        self._progress, self._task, self._console = progress, task, console

    def begin(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        found = self._progress.tasks[0]
        note_phase(f"{text} ({found.completed:.0f} of {found.total:.0f} done)", self._console)

    def advance(self) -> None:
        self._progress.advance(self._task)


class _Run:
    """One model's way through the events."""

    def __init__(
        self, name: str, setting: Setting, has: Has, table: ProofTable, bar: _Bar, reference: Reference, *,
        is_solo: bool,
    ) -> None:
        """``is_solo``: the reference is an undisturbed instance."""
        self._name, self._setting, self._has = name, setting, has
        self._table, self._bar = table, bar
        self._reference, self._is_solo = reference, is_solo

    def events(self, events: Mapping[str, Event]) -> None:
        """One after the other; one that fails is a row that says so, and the others are run."""
        for name, event in events.items():
            self._bar.begin(f"{self._name}: {name}")
            if (lack := why_not(event.needs, self._has)) is not None:
                self._add(not_applicable(self._name, name, *lack))
            else:
                self._add(self._attempt(name, lambda e=event: e(self._setting)))  # type: ignore[misc]

    def deaths(self, mode: ExchangeMode, instances: int, places: Sequence[str]) -> None:
        """A worker dies at each of the places that the model has."""
        left = []
        for place in places:
            needs = Needs(1 if is_alone(place) else 2, instances)
            if (lack := why_not(needs, self._has)) is None:
                left.append(place)
            else:
                self._add(not_applicable(self._name, death_name(place, mode, instances), *lack))

        def on_row(place: str, outcome: Outcome) -> None:
            left.remove(place)
            self._add(self._attempt(death_name(place, mode, instances), lambda: outcome))

        while left:
            self._bar.begin(f"{self._name}: kill -9 ({mode}, {instances} instances)")
            try:
                kills(self._setting, tuple(left), on_row, exchange=str(mode), instances=instances)
            except (JettisonError, AssertionError) as error:  # the engine's start or end, or the core's own checks
                place = left.pop(0) if left else "of the engine"
                self._add(failed(self._name, death_name(place, mode, instances), error))

    def _attempt(self, event: str, scenario: Callable[[], Outcome]) -> Row:
        """What goes wrong in an event is its row; what is wrong with the model is no event's affair (ModelError)."""
        begun_s = time.monotonic()
        try:
            parts_apart = self._is_solo and self._setting.dtype != "float64"
            row = compare(self._name, event, scenario(), self._reference, parts_apart=parts_apart)
            if self._is_solo and self._table.conditions.reference != SOLO:
                row = replace(row, evidence=f"{row.evidence}; compared with {SOLO}")
        except ModelError:
            raise
        except JettisonError as error:
            row = failed(self._name, event, error)
        except Exception as error:
            log.exception("%s: %s", self._name, event)
            row = failed(self._name, event, error)
        return replace(row, seconds=round(time.monotonic() - begun_s, 2))

    def _add(self, row: Row) -> None:
        self._table.add(row)
        self._bar.advance()


def _models(
    model_dir: Path | None, scratch: Path, device: str, max_model_len: int | None
) -> Iterator[Verified]:
    if model_dir is not None:
        yield Verified(read_config(model_dir, max_model_len).architecture, model_dir, model_dir)
        return
    for index, sample in enumerate((*ARCHITECTURES, *OTHERS)):
        in_shards = 40_000 if index % 2 else None
        folder = scratch / str(index)
        yield make_own(sample, folder, SEED + index, shard_bytes=in_shards, is_for_cards=device == "cuda")


def make_own(
    sample: Sample, folder: Path, seed: int, *, shard_bytes: int | None = None, is_for_cards: bool = False
) -> Verified:
    """One of the models that are verified where none is named."""
    make_sample(sample, folder, seed, shard_bytes=shard_bytes, is_for_cards=is_for_cards)
    if sample not in KEPT:
        return Verified(sample.name, folder, folder)
    exact = folder.with_name(f"{folder.name}-exact")
    make_sample(sample, exact, seed, shard_bytes=shard_bytes, is_for_cards=is_for_cards, is_widened=True)
    return Verified(sample.name, folder, exact)
