"""Tables of pages, made from result files: what stands between the markers of a page is what its file says.

A page names a block by ``<!-- figures: NAME -->`` and ends it by ``<!-- end -->``; ``make claims ARGS=--write`` writes
all of them anew, and a test compares them with the files. So a page cannot say another figure than its file.

Not here: README's claims (``claims.py``), and reasons, which people write beside the blocks.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"
PAGES = (RESULTS / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))

Document = dict[str, Any]
Block = Callable[[Document], str]

_BLOCK = re.compile(r"(<!-- figures: (?P<name>[a-z0-9_]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_MADE: dict[str, tuple[str, Block]] = {}
"""Block -> the file without its ending, and what makes the block of its document."""


def block(file: str, name: str | None = None) -> Callable[[Block], Block]:
    """Enter a block under ``name`` (by itself the file's)."""

    def enter(make: Block) -> Block:
        _MADE[name or file] = file, make
        return make

    return enter


def load(name: str) -> Document:
    """A result file. Raises FileNotFoundError."""
    document: Document = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return document


def made(name: str, document: Any) -> str:
    """One block. Raises KeyError where nothing makes it."""
    return _MADE[name][1](document)


def with_figures(page: str) -> str:
    """The page with each block of its file as it is. Raises KeyError for a block that nothing makes."""

    def made(found: re.Match[str]) -> str:
        file, make = _MADE[found["name"]]
        document = load(f"{file}.json")
        kept = document["evidence"]
        return f"{found[1]}{make(document)}\n*{file}.json: commit {kept['commit']}, {kept['date']}.*\n{found[3]}"

    return _BLOCK.sub(made, page)


def stale_pages(pages: Iterable[Path] = PAGES) -> list[tuple[Path, str]]:
    """Pages that say something else than their files, and what they would say."""
    told = [(page, page.read_text(encoding="utf-8")) for page in pages]
    return [(page, anew) for page, text in told if (anew := with_figures(text)) != text]


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown; numbers with three figures."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(map(text_of, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def text_of(value: object) -> str:
    """As a cell of a table has it: three figures, thousands with commas, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def spread(values: Sequence[float]) -> str:
    """Median and range, or the one value that there is."""
    if len(values) == 1:
        return text_of(values[0])
    lowest, middle, highest = min(values), statistics.median(values), max(values)
    return f"{text_of(middle)} ({text_of(lowest)} to {text_of(highest)})"


def medians(rows: Sequence[Document], keys: Sequence[str]) -> list[float]:
    """Of each column."""
    return [float(statistics.median(row[key] for row in rows)) for key in keys]


@block("demo_seeds")
def _demo_seeds(document: Document) -> str:
    keys = ["mean_load", "recompute_p99_ttft_s", "drop_p99_ttft_s", "p99_ratio", "p50_ratio", "throughput_ratio",
            "tpot_p50_ratio", "drops", "restores"]  # fmt: skip
    names = ["mean load", "P99 TTFT recompute, s", "drop, s", "P99 ratio", "P50 ratio", "throughput",
             "P50 TPOT drop / recompute", "drops", "restores"]  # fmt: skip
    burst = [row for row in document["rows"] if row["label"] == "burst"]
    if all("oracle_p99_ttft_s" in row for row in document["rows"]):
        keys += ["e2e_ratio", "oracle_p99_ttft_s", "share_of_gain"]
        names += ["mean end to end drop / recompute", "P99 TTFT oracle, s", "part of its gain, log"]
    shown = [[row["label"], row["seed"], *(row[key] for key in keys)] for row in document["rows"]]
    return table(("burst", "seed", *names), [*shown, ["burst", "median", *medians(burst, keys)]])


@block("constraints")
def _constraints(document: Document) -> str:
    names = {"own": "our own schemas and grammars", "suite": "JSON Schema's test suite"}
    keys = ("asked", "compiled", "p50_ms", "p99_ms", "most_ms")
    shown = [[name, *(document[part][key] for key in keys)] for part, name in names.items()]
    return table(("constraints", "asked for", "compiled", "P50, ms", "P99, ms", "most, ms"), shown)


@block("coserving")
def _coserving(document: Document) -> str:
    names = {"alone": "chat alone, the same objectives", "alone512": "chat alone, steps of 512 tokens",
             "harvest": "`harvest`", "priority": "`priority`"}  # fmt: skip
    rows = []
    for found in document["experiments"]:
        base = found["arms"]["alone"]["p99_ttft_s"]
        for arm, name in names.items():
            of = found["arms"][arm]
            counts = of["counts"]
            rows.append([
                found["instances"], name, of["p50_ttft_s"], of["p99_ttft_s"], of["p99_ttft_s"] / base, of["p50_itl_s"],
                of["p99_itl_s"], of["p99_itl_s"] / found["objectives_s"][1], of["tokens_per_s"],
                counts["checkpoint_frees"], counts["checkpointed_bytes"] / 1e9, counts["recomputed_tokens"],
            ])  # fmt: skip
    return table(
        ("instances", "arm", "P50 TTFT, s", "P99 TTFT, s", "over alone", "P50 gap, s", "P99 gap, s",
         "over its objective", "tokens/s", "freed from checkpoints", "copied, GB", "tokens computed again"), rows,
    )  # fmt: skip


@block("overload_beside_batch")
def _overload_beside_batch(document: Document) -> str:
    keys = ("alone P99 s", "beside P99 s", "ratio", "noise", "drops", "frees", "pauses", "abandoned", "compared tokens",
            "mismatches")  # fmt: skip
    rows = document["rows"]
    return table(
        ("seed", "P99 TTFT alone, s", "beside the batch, s", "beside / alone", "alone again / alone", "drops",
         "freed from checkpoints", "pauses", "steps given up", "tokens compared", "lines that differ"),
        [*([row["seed"], *(row[key] for key in keys)] for row in rows), ["median", *medians(rows, keys)]],
    )  # fmt: skip


@block("safepoints")
def _safepoints(document: Document) -> str:
    rows = [
        [name, of["abandoned"], of["waited_p50_ms"], of["waited_p99_ms"], of["layers_ms"]]
        for name, of in document["arrivals"].items()
    ]
    looks = table(("step", "takes, ms", "looks add, ms", "share of the step"),
                  [[name, of["step_ms"], of["added_ms"], f"{of['added_share']:.2%}"]
                   for name, of in document["steps"].items()])  # fmt: skip
    waits = table(("safepoints", "steps given up", "from an arrival to the step's end, P50, ms", "P99, ms",
                   "layers to a safepoint, ms"), rows)  # fmt: skip
    return f"One look at the flag takes {document['look_ns']:.0f} ns (the paper: 988,000).\n\n{waits}\n{looks}"


@block("slices")
def _slices(document: Document) -> str:
    rows = [
        [name, of["arrivals"], of["shed"], of["waited_p50_ms"], of["waited_p99_ms"], of["allowed_ms"],
         of["beyond_p99_ms"]]
        for name, of in document["arrivals"].items()
    ]  # fmt: skip
    return table(
        ("`--offline-slices`", "arrivals", "steps that shed rows", "from an arrival to the step's end, P50, ms",
         "P99, ms", "layers and online rows, ms", "beyond these, P99, ms"), rows,
    )  # fmt: skip


@block("beside")
def _beside(document: Document) -> str:
    copies = table(
        ("step", "copies", "alone, ms", "beside, ms", "ratio (median)", "spread", "copied, GB/s"),
        [[r["step"], r["copies"], r["alone_ms"], r["beside_ms"], r["ratio"], r["ratio_spread"], r["bytes_per_s"] / 1e9]
         for r in document["rows"]],
    )  # fmt: skip
    victims = table(
        ("`--offline`", "victims", "of them with a complete checkpoint", "freed in, P50, ms", "P99, ms",
         "tokens computed again"),
        [[r["offline"], r["preemptions"], r["checkpoint_frees"], r["free_p50_ms"], r["free_p99_ms"],
          r["recomputed_tokens"]] for r in document["victims"]],
    )  # fmt: skip
    return f"{copies}\n{victims}"


@block("interactive_beside_batch")
def _interactive(document: Document) -> str:
    rows = []
    for arm in dict.fromkeys(row["arm"] for row in document["rows"]):
        of = [row for row in document["rows"] if row["arm"] == arm]
        columns = ("ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms", "offline_total_per_s")
        rows.append([arm, *(spread([float(row[key]) for row in of]) for key in columns)])
    return table(("arm", "TTFT P50, ms", "P99, ms", "gap P99, ms", "offline tokens/s"), rows)


@block("masks")
def _masks(document: Document) -> str:
    times_ms = {kind: [row["tpot_p50_ms"] for row in document["rows"] if row["kind"] == kind]
                for kind in ("free", "schema")}  # fmt: skip
    ratios = [schema / free for free, schema in zip(times_ms["free"], times_ms["schema"], strict=True)]
    return table(("rounds", "without, TPOT P50, ms", "under a schema", "schema over without"),
                 [[len(ratios), spread(times_ms["free"]), spread(times_ms["schema"]), spread(ratios)]])  # fmt: skip


@block("remap")
def _remap(document: Document) -> str:
    return table(
        ("MiB to KV", "drop, ms (worst)", "pages", "mappings", "first touch, ms", "second touch, ms",
         "restore mapping, ms"),
        [[row["bytes_to_kv"] / 2**20, f"{row['drop_ms']:.1f} ({row['drop_ms_worst']:.1f})", row["num_pages"],
          row["num_map_calls"], row["first_touch_ms"], row["second_touch_ms"], row["restore_map_ms"]]
         for row in document["rows"]],
    )  # fmt: skip


@block("overload_vllm")
def _overload_vllm(document: Document) -> str:
    rows = []
    for run in document["runs"]:
        name = run["name"].partition(": ")[0]
        drop = next((other for other in document["runs"] if other["name"] == f"{name}: drop"), None)
        over = run["ttft_s"]["p99"] / drop["ttft_s"]["p99"] if drop else None
        tpot = run["tpot_s"]
        rows.append([run["name"], run["ttft_s"]["p50"], run["ttft_s"]["p99"], tpot["p50"] * 1e3, tpot["p99"] * 1e3,
                     run["output_tokens_per_s"], over])  # fmt: skip
    return table(("run", "P50 TTFT, s", "P99 TTFT, s", "P50 TPOT, ms", "P99 TPOT, ms", "tokens/s",
                  "P99 TTFT over drop's"), rows)  # fmt: skip


@block("packing_twelve")
def _packing_twelve(document: Document) -> str:
    """Medians over the rounds, by arm."""
    keys = ("awake_mean", "used_mean", "used_peak", "memory", "evictions", "moves_kv", "moves_tokens", "ttft_p50_ms",
            "ttft_p99_ms", "tpot_p50_ms")  # fmt: skip
    rows = document["rows"]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    shown = []
    for arm in arms:
        own = [row for row in rows if row["arm"] == arm]
        shown.append([f"`{arm}`", len(own), *medians(own, keys), sum(row["mismatches"] for row in own)])
    return table(("arm", "rounds", "awake", "in use, mean", "peak", "memory held", "evictions", "moves, KV",
                  "as tokens", "P50 TTFT, ms", "P99, ms", "P50 TPOT, ms", "answers that differ"), shown)  # fmt: skip


@block("overload_trained")
def _overload_trained(document: Document) -> str:
    rows = []
    for row in document["rows"]:
        times = [row[f"{name}_p{percent}_s"] for name in ("ttft", "tpot", "e2e") for percent in (50, 99)]
        times[2:4] = [1e3 * seconds for seconds in times[2:4]]
        rows.append([row["seed"], row["contender"], *times, row["tokens_per_s"], row["ttft_p99_s_over_drop"],
                     row["e2e_p50_s_over_drop"], row["drops"], row["preemptions"], row.get("answers_differ")])
    return table(("seed", "contender", "TTFT P50, s", "P99, s", "TPOT P50, ms", "P99, ms", "end to end P50, s",
                  "P99, s", "tokens/s", "P99 TTFT over drop's", "P50 end to end over drop's", "drops", "preemptions",
                  "answers that differ from recompute's"), rows)  # fmt: skip


@block("ray_hosts")
@block("ray_hosts_starved")
def _ray_hosts(document: Document) -> str:
    keys = ("scene", "arrivals", "requests", "unanswered", "answers", "differ", "drops_total", "restores_total",
            "migrations_total", "worker_losses_total", "lost_after_s", "told_after_s", "away_s")  # fmt: skip
    return table(("scene", "arrivals", "requests", "without an answer", "answers, with the batch's", "that differ",
                  "drops", "restores", "migrations", "workers lost", "the host, after s", "/health says so after, s",
                  "Ray is joined again after, s"),
                 [[row.get(key) for key in keys] for row in document["rows"]])  # fmt: skip


@block("wire")
def _wire(document: Document) -> str:
    columns = (
        "wire, Mbit/s", "there and back, ms", "encrypted", "carried, of the wire", "an activation, median, ms", "worst",
    )  # fmt: skip
    keys = ("mbit", "delay_ms", "tls", "share_of_wire", "activation_p50_ms", "activation_worst_ms")
    return table(columns, ([text_of(row[key]) for key in keys] for row in document["rows"]))


@block("hosts")
def _hosts(document: Document) -> str:
    columns = (
        "move", "struck", "streams", "tokens", "streams that differ", "the host, after s", "near, Mbit/s", "far",
        "not as asked",
    )  # fmt: skip
    keys = ("move", "way", "streams", "tokens", "wrong", "lost_after_s", "near_mbit", "far_mbit")
    return table(columns, ([*(text_of(row[key]) for key in keys), len(row["problems"])] for row in document["rows"]))


@block("controller_killed")
def _controller_killed(document: Document) -> str:
    keys = ("round", "open_at_the_kill", "failed", "wrong", "tokens_compared", "workers_kept", "ready_s", "gap_p50_s",
            "gap_max_s")  # fmt: skip
    return table(("kill", "streams open", "failed", "tokens wrong", "compared", "workers kept", "serves again after, s",
                  "gap of a stream, P50, s", "longest, s"),
                 [[row[key] for key in keys] for row in document["rows"]])  # fmt: skip


@block("overload_trained_light")
def _overload_trained_light(document: Document) -> str:
    rows = [
        [row["seed"], row["contender"], row["ttft_p50_s"], row["ttft_p99_s"], 1e3 * row["tpot_p50_s"],
         row["e2e_mean_s"], row["ttft_p99_s_over_drop"], row["e2e_mean_s_over_drop"], row["drops"], row["preemptions"],
         row.get("answers_differ")]
        for row in document["rows"]
    ]  # fmt: skip
    return table(("seed", "contender", "TTFT P50, s", "P99, s", "TPOT P50, ms", "end to end, mean, s",
                  "P99 TTFT over drop's", "mean end to end over drop's", "drops", "preemptions",
                  "answers that differ from recompute's"), rows)  # fmt: skip


@block("overload_sweep")
def _overload_sweep(document: Document) -> str:
    keys = ("cells", "memory_binds", "half_of_gain", "median_share_of_gain", "slower_than_5_percent",
            "worst_e2e_ratio", "drops", "needless_drops", "median_forecast_error")  # fmt: skip
    rows = [[name, *(document[name].get(key) for key in keys)] for name in ("now", "beside") if name in document]
    return table(("rules", "cells", "memory binds", "share of these with half of the oracle's gain",
                  "median share of the gain", "cells over 5 % slower", "slowest", "drops", "needless",
                  "median error of forecasts"),
                 rows)  # fmt: skip


@block("overload_scale")
def _overload_scale(document: Document) -> str:
    rows = document["rows"]
    return table(("t, s", "what"), [[row["t"], row["what"]] for row in rows if "what" in row])


@block("demo_day")
def _demo_day(document: Document) -> str:
    rows = [
        [row["seed"], row["requests"], row["baseline"]["p99_ttft_s"], row["day"]["p99_ttft_s"], row["day"]["device_s"],
         row["device_seconds_over_baseline"], f"{row['day']['num_done']} of {row['day']['num_lines']}",
         ", ".join(str(row["events"][key]) for key in ("drops", "restores", "sleeps", "wakes"))]
        for row in document["rows"]
    ]  # fmt: skip
    return table(("seed", "users' requests", "P99 TTFT all awake, s", "Jettison, s", "device-seconds", "of all awake",
                  "lines", "drops, restores, sleeps, wakes"), rows)  # fmt: skip


@block("faults")
@block("faults_of_three")
@block("faults_of_moves")
@block("faults_of_offline")
def _deaths(document: Document) -> str:
    keys = ("schedules", "reached_failpoint", "requests", "tokens_compared")
    return table(("schedules", "met their place", "requests", "tokens compared", "problems"),
                 [[*(document[key] for key in keys), len(document["problems"])]])  # fmt: skip


@block("models")
def _models(document: Document) -> str:
    rows = [
        [row["architecture"], f"`{row['model_type']}`", row["models"], "; ".join(row["switches"]), row["tokens"],
         row["differ"], row["largest"], row["stock"]]
        for row in document["rows"]
    ]
    moves = document["moves"]
    happened = sum(move["happened"] for row in document["rows"] for move in row["moves"].values())
    told = table(
        ("architecture", "`model_type`", "models", "what sets it apart", "tokens", "differ",
         "largest difference", "stock float32"), rows,
    )  # fmt: skip
    return (
        f"{told}\n{document['tokens']:,} tokens through {'; '.join(moves)}: {happened} of "
        f"{len(moves) * len(rows)} moves happened; transformers {document['transformers']}.\n"
    )


@block("verify_full")
@block("verify_alone_bfloat16")
@block("verify_smollm2")
def _verify(document: Document) -> str:
    rows = document["rows"]
    return table(
        ("rows", "events that did not happen", "tokens compared", "differ", "missing",
         "differ, of requests that ran as their KV moved", "reference"),
        [[len(rows), sum(not row["happened"] for row in rows), document["tokens_compared"], document["mismatches"],
          document["incomplete"], document.get("in_parts"), document["reference"]]],
    )  # fmt: skip


@block("peers_16_64_5th")
@block("peers_2048_5th")
@block("peers_moe")
@block("peers_beside")
def _peers(document: Document) -> str:
    loads = document["workloads"]
    engines = dict.fromkeys(name for of in loads.values() for name in of)
    rows = []
    for engine in engines:
        cells: list[object] = [engine]
        for of in loads.values():
            found = of.get(engine)
            told = [found[key] for key in ("tokens_per_s", "ratio_to_reference")] if found else [[], []]
            cells += [spread(values) if values else None for values in told]
        rows.append(cells)
    reference = {"vllm": "vLLM"}.get(name := document.get("reference") or "vllm", name)
    return table(("engine", *(column for load in loads for column in (load, f"of {reference}"))), rows)


@block("quantized_peers")
def _quantized_peers(document: Document) -> str:
    speeds, ratios = document["tokens_per_s"], document["times_as_fast"]
    over = {name: name for name in speeds} | dict.fromkeys(("llama-server", "llama-batched-bench"), "llama.cpp")
    rows = []
    for name, of in speeds.items():
        cells: list[object] = [name]
        for number in ratios:
            values = ratios[number].get(over[name], [])
            cells += [spread(of[number]) if number in of else None, spread(values) if values else None]
        rows.append(cells)
    titles = [title for n in ratios for title in (f"{n} x decoding, tokens/s", "int4 is times as fast")]
    return table(("engine", *titles), rows)


@block("agreement")
def _agreement(document: Document) -> str:
    rows = [[row["engine"], row["same"], f"{row['share']:.2%}", row["mean_difference"], row["largest_difference"]]
            for row in document["rows"]]  # fmt: skip
    number = document["rows"][0]["tokens"]
    shown = table(("engine", f"the same token, of {number:,}", "share", "log-probabilities differ by, mean", "at most"),
                  rows)  # fmt: skip
    return f"{shown}\nOf logits in bfloat16 the two largest are equal at {document['equal']}.\n"


@block("perplexity")
def _perplexity(document: Document) -> str:
    keys = ("mean_difference", "largest_difference")
    rows = [[row["engine"], f"{row['perplexity']:.4f}", f"{row['over_reference']:.4f}", *(row[key] for key in keys)]
            for row in document["rows"]]  # fmt: skip
    shown = table(("engine", "perplexity", "over transformers' in float32", "log-probabilities differ by, mean",
                   "at most"), rows)  # fmt: skip
    return f"{document['tokens']:,} tokens of {document['windows']} windows.\n\n{shown}"


@block("shared_card")
def _shared_card(document: Document) -> str:
    return table(
        ("bins", "epochs overrun", "most queued, of the bound", "longest stop, ms", "all arrived, s"),
        [[row["bins"], row["epochs_overrun"], max(row["card_load"]), row["stop_max_ms"], row["arrived_s"]]
         for row in document["rows"]],
    )  # fmt: skip


@block("reproduction")
@block("reproduction_conserve")
@block("reproduction_mell")
@block("reproduction_ladder")
def _reproduction(document: Document) -> str:
    """The judged claims of each figure, those of one metric and system together, at all points of a sweep: the ranges
    of all of them."""
    judged_rows = [row for row in document["rows"] if row["band"] is not None and row["ours"] is not None]
    points = Counter(
        (row["figure"], stem, row["system"]) for row in judged_rows if (stem := _stem(row["metric"])) != row["metric"]
    )
    found: dict[tuple[str, str, str], list[Document]] = {}
    for row in judged_rows:
        swept = row["figure"], _stem(row["metric"]), row["system"]
        found.setdefault(swept if points[swept] > 1 else (row["figure"], row["metric"], row["system"]), []).append(row)
    rows = []
    for (figure, metric, system), of in found.items():
        against = ", ".join(dict.fromkeys(row["baseline"] for row in of if row["baseline"]))
        paper = [row["paper"] for row in of if row["paper"] is not None]
        judged = [row["in_band"] for row in of if row["in_band"] is not None]
        inside = f"{sum(judged)} of {len(judged)}" if judged else "nothing dropped"
        unit = of[0]["unit"]
        rows.append([figure, metric, system, against, _stated(paper, unit), _range([row["ours"] for row in of], unit),
                     inside])  # fmt: skip
    return table(("figure", "claim", "system", "against", "paper", "ours", "inside"), rows)


def _stem(metric: str) -> str:
    """A metric without the point of a sweep that it is at, which a number names."""
    stem, _, point = metric.rpartition(", ")
    return stem if stem and any(c.isdigit() for c in point) else metric


def _stated(bands: Sequence[Sequence[float | None]], unit: str) -> str:
    """What the paper states of several rows: one range of numbers, and each bound that is open on one side."""
    closed = [end for low, high in bands if low is not None and high is not None for end in (low, high)]
    lows = [f">= {_range([low], unit)}" for low, high in bands if high is None and low is not None]
    highs = [f"<= {_range([high], unit)}" for low, high in bands if low is None and high is not None]
    return ", ".join(dict.fromkeys([*([_range(closed, unit)] if closed else []), *lows, *highs]))


def _range(numbers: Sequence[float], unit: str) -> str:
    ends = list(dict.fromkeys(f"{number:.3g}" for number in (min(numbers), max(numbers))))
    return " to ".join(ends) + (unit if unit == "x" else f" {unit}" if unit else "")


PLAIN: dict[str, tuple[str, str, dict[str, str]]] = {
    "upload_beside_chat": ("upload_beside_chat", "verdicts", {
        "turn": "beside the chat", "ratio": "P99 gap over alone (median of rounds)", "lowest": "lowest",
        "highest": "highest"}),
    "real_traces": ("real_traces.slices", "pooled", {
        "load": "load", "binds": "binds", "slices": "slices", "requests": "requests", "drops": "drops a round",
        "p50_ratio": "P50 TTFT", "p99_ratio": "P99 TTFT", "e2e_ratio": "mean end to end"}),
    "batch_deadlines": ("batch_deadlines", "rows", {
        "lines": "lines", "all_awake_s": "all awake, s", "window_s": "window, s", "factor": "times",
        "status": "status", "took_s": "took, s", "late_lines": "lines late", "wakes": "wakes",
        "awake_mean": "awake, mean of 2"}),
    "epoch_pass": ("epoch_pass", "rows", {
        "devices": "devices", "requests": "requests", "still_ms": "still, ms", "decoding_ms": "decoding, ms",
        "decoding_max_ms": "most", "epoch_median_ms": "epoch, ms (median)", "epoch_max_ms": "most",
        "apply_median_ms": "of which the planner"}),
    "simulator_million": ("simulator_million", "rows", {
        "requests": "requests", "wall_s": "wall, s", "us_per_request": "µs a request", "events": "events",
        "peak_mib": "peak MiB", "ttft_p99_s": "P99 TTFT, s"}),
    "reach": ("reach", "rows", {
        "step_ahead": "step ahead", "instances": "instances", "code": "code", "steps_a_s": "steps a second",
        "tokens_a_s": "tokens a second",
        "requests_a_s": "requests a second", "controller_share": "of a core", "us_a_step": "µs a step",
        "us_a_token": "µs a token", "gap_p50_ms": "gap P50, ms", "gap_p99_ms": "P99"}),
    "front_ends": ("front_ends", "rows", {
        "fronts": "front ends", "streams": "streams", "controller_us_a_token": "controller, µs a token",
        "front_ends_us_a_token": "front ends", "us_a_token": "together", "over_none": "of none",
        "itl_p50_ms": "ITL P50, ms", "itl_p99_ms": "P99"}),
}  # fmt: skip
"""Blocks that show rows as they are: file, where its rows are, and which columns under which titles."""

for _name, (_file, _rows, _titles) in PLAIN.items():
    block(_file, _name)(lambda document, rows=_rows, titles=_titles: table(  # type: ignore[misc]
        list(titles.values()), [[row[key] for key in titles] for row in document[rows]]))
