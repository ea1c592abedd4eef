"""What ``jettison profile`` shows and writes: the table, the profile, the picture, the page.

Measuring is ``live.profile.measure``'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from jettison.config import EngineConfig
from jettison.cost.boundaries import measured_tokens
from jettison.cost.fit import relative_errors
from jettison.cost.shapes import ShapeKind
from jettison.errors import ConfigError
from jettison.live.profile.measure import PREPARING, ProfileResult, run_profile
from jettison.profiles import default_path, save_profile
from jettison.report.cost_report import draw_predictions, render_cost_page
from jettison.report.output import check_writable, write_whole
from jettison.report.plots import to_svg
from jettison.report.terminal import note_phase, print_whole, progress_bar

Rows = list[list[str]]

POOR_FIT = 0.2
"""Mean error on held-out shapes that no quiet machine has shown: 0.02 to 0.04 is usual (docs/cost-model.md)."""


def profile_command(
    config: EngineConfig, *, out: Path | None, json_out: Path | None, html_out: Path | None, quick: bool, seed: int
) -> int:
    """Profile, print, write; returns the exit code. Raises UserError as ``run_profile`` and ``save_profile`` do."""
    console = Console()
    for given in (out, json_out, html_out):
        if given is not None:
            check_writable(given)
    if out is None:
        check_beside_model(Path(config.model.model), "name another place with --out")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with progress_bar(*columns, console=console) as bar:
        task = bar.add_task("loading the model", total=1.0)

        def note(share: float, text: str) -> None:
            if not share and text == PREPARING:
                note_phase("measuring steps and transfers", console)
            bar.update(task, completed=share, description=text)

        result = run_profile(config, quick=quick, seed=seed, progress=note)
    path = out or default_path(Path(config.model.model), result.stored.fingerprint)
    # Files first: a reader of the words may be gone.
    save_profile(path, result.stored)
    figure = draw_predictions(panels(result))
    path.with_suffix(".svg").write_bytes(to_svg(figure))
    if json_out is not None:
        write_whole(json_out, json.dumps(document(result), indent=1) + "\n")
    if html_out is not None:
        title = f"Cost profile of {config.model.served_model_name}"
        write_whole(html_out, render_cost_page(title, tables(result), figure))
    for caption, rows in tables(result).items():
        print_whole(_table(caption, rows), console)
    console.print(
        f"{len(result.measured)} shapes, {result.num_rounds} rounds, {result.elapsed_s:.0f} s; wrote {path} "
        f"and {path.with_suffix('.svg').name}", soft_wrap=True,
    )  # fmt: skip
    errors = result.errors(next(iter(result.models)))
    if errors is not None and errors.mean > POOR_FIT:
        console.print(
            f"[yellow]held-out steps are predicted {errors.mean:.0%} wrong on average, and `jettison serve` would plan "
            "with that: something else kept the machine busy; profile again when it is quiet[/yellow]",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
    return 0


def check_beside_model(model_dir: Path, hint: str) -> None:
    """Raise ConfigError, before a minute of measuring, where no profile can be kept in the model's folder; ``hint``:
    what to do then. Makes neither."""
    if model_dir.is_dir():
        try:
            check_writable(model_dir / "jettison-profile.json")
        except ConfigError as error:
            raise ConfigError(f"{error}; {hint}") from None


def tables(result: ProfileResult) -> dict[str, Rows]:
    """Caption -> rows of text, the heading first."""
    return {
        "Error on held-out shapes": error_rows(result),
        "Fitted terms": term_rows(result),
        "Speeds": speed_rows(result),
        "Decode throughput of a pipeline, and its batch limit": batch_rows(result),
        "Prefill tokens beside a batch": prefill_rows(result),
    }


def error_rows(result: ProfileResult) -> Rows:
    """Mean and maximum for each model, over all held-out shapes and kind by kind."""
    rows = [["mean / max", "shapes", *result.models]]
    for kind in (None, *ShapeKind):
        errors = [result.errors(name, kind) for name in result.models]
        if errors[0] is not None:
            cells = [f"{e.mean:.1%} / {e.max:.1%}" for e in errors if e is not None]
            rows.append(["all" if kind is None else str(kind), str(errors[0].num_samples), *cells])
    return rows


def term_rows(result: ProfileResult) -> Rows:
    """The coefficients in microseconds, with what each counts."""
    cost = result.stored.profile.cost
    values = [
        ("alpha: query-key pair, a layer", cost.pair_layer_s),
        ("kappa: token of KV read, a layer", cost.kv_token_layer_s),
        ("beta: token, a layer", cost.token_layer_s),
        ("layer", cost.layer_s),
        ("layer, at least, where a host launches it", cost.launch_layer_s),
        ("step", cost.step_s),
        ("first stage", cost.entry_s),
        ("first stage, a token", cost.entry_token_s),
        ("head", cost.head_s),
        ("head and sampling, a row", cost.sample_s),
    ]
    rows = [["term", "microseconds"], *([name, f"{1e6 * value:.4g}"] for name, value in values)]
    rows.append(["gamma: microbatch, all layers", f"{1e6 * cost.gamma_s():.4g}"])
    rows.append(["rows of a tile", str(cost.row_tile)])
    rows.append(["weights take as long as so many tokens", str(cost.weight_tokens)])
    return rows


def speed_rows(result: ProfileResult) -> Rows:
    """Links, remaps, copies."""
    profile = result.stored.profile
    beside = f"{profile.copies_beside_bytes_per_s / 1e9:.2f} GB/s, and a GB adds"
    return [
        ["speed", ""],
        ["link", f"{profile.link_bytes_per_s / 1e9:.2f} GB/s after {1e6 * profile.link_latency_s:.0f} us"],
        ["hop to the controller", f"{1e6 * (profile.hop_s or 0.0):.0f} us"],
        [f"a step while {profile.contention_instances} compute", f"{profile.contention:.2f} times as long"],
        ["remap", f"{1e3 * profile.remap_fixed_s:.2f} ms and {1e12 * profile.remap_s_per_byte:.3g} ms a GB"],
        ["host copy", f"{profile.host_copy_bytes_per_s / 1e9:.2f} GB/s"],
        ["copies beside steps", f"{beside} {1e12 * profile.copies_beside_byte_s:.0f} ms to the steps"],
        ["a link's bytes beside steps", f"a GB adds {1e12 * (profile.link_beside_byte_s or 0.0):.0f} ms to the steps"],
        ["model folder (cached)", f"{profile.disk_bytes_per_s / 1e9:.2f} GB/s"],
    ]


def batch_rows(result: ProfileResult) -> Rows:
    """Best throughput and batch limit by number of stages."""
    profile = result.stored.profile
    rows = [["stages", "tokens/s", "batch limit"]]
    for num_stages in sorted({point.num_stages for point in profile.batch_points}):
        best = profile.group_tokens_per_s(num_stages)
        rows.append([str(num_stages), f"{best or 0.0:.0f}", str(profile.batch_limit(num_stages))])
    return rows


def prefill_rows(result: ProfileResult) -> Rows:
    """With how many tokens beside it a step of a batch lasts 1.1, 1.5 and 2 times as long."""
    points = result.stored.profile.prefill_points
    times = (1.1, 1.5, 2.0)
    rows = [["requests that decode", *(f"{longer:g} times as long" for longer in times)]]
    for size in sorted({point.batch_size for point in points}):
        rows.append([str(size), *(str(measured_tokens(points, size, longer)) for longer in times)])
    return rows


def panels(result: ProfileResult) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Held-out shapes without and with cached tokens, as in the paper's figure."""
    samples = result.held_out()
    parts = {
        "nothing cached": [s for s in samples if s.shape.num_kv_tokens == 0],
        "with cached tokens": [s for s in samples if s.shape.num_kv_tokens > 0],
    }
    return {
        title: {n: [(s.seconds, m.step_cost_s(s.shape)) for s in part] for n, m in result.models.items()}
        for title, part in parts.items()
    }


def document(result: ProfileResult) -> dict[str, Any]:
    """Everything that was measured, for JSON."""
    predicted = {
        name: relative_errors(model, [m.sample for m in result.measured]) for name, model in result.models.items()
    }
    return {
        "fingerprint": asdict(result.stored.fingerprint),
        "num_rounds": result.num_rounds,
        "elapsed_s": result.elapsed_s,
        "errors": {
            name: {
                "all" if kind is None else str(kind): asdict(errors)
                for kind in (None, *ShapeKind)
                if (errors := result.errors(name, kind)) is not None
            }
            for name in result.models
        },
        "profile": asdict(result.stored.profile),
        "shapes": [
            {
                "kind": str(m.kind), "held_out": m.is_held_out, "chunks": [list(c) for c in m.shape.chunks],
                "num_layers": m.shape.num_layers, "is_first": m.shape.is_first, "num_samples": m.shape.num_samples,
                "seconds": list(m.seconds), "spread": m.spread,
                "relative_error": {name: errors[index] for name, errors in predicted.items()},
            }
            for index, m in enumerate(result.measured)
        ],
    }  # fmt: skip


def _table(caption: str, rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=caption, title_justify="left")
    for index, heading in enumerate(rows[0]):
        table.add_column(heading, justify="left" if index == 0 else "right")
    for row in rows[1:]:
        table.add_row(*row)
    return table
