"""Writes jettison.json, the dashboard for Grafana: ``python deploy/grafana/make_dashboard.py``.

Edit this file, not that one. Needs grafana-foundation-sdk, which ``pip install -e '.[dev]'`` brings.
"""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

FILE = Path(__file__).with_name("jettison.json")
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WHERE = 'instance=~"$instance"'

Queries = dict[str, str]
"""Legend -> query; ``{W}`` stands for the choice of servers, ``[R]`` for the time that rates are taken over."""


def quantile(rank: float, name: str) -> str:
    """Of a histogram, over all servers."""
    return f"histogram_quantile({rank}, sum by (le) (rate({name}_bucket{{W}}[R])))"


def rate(name: str) -> str:
    """Of a counter, a second."""
    return f"sum(rate({name}{{W}}[R]))"


def share(part: str, whole: str) -> str:
    """Of two counters."""
    return f"{rate(part)} / {rate(whole)}"


LOAD: dict[str, tuple[str, Queries]] = {
    "Requests": ("short", {
        "running": "sum(vllm:num_requests_running{W})", "waiting": "sum(vllm:num_requests_waiting{W})",
        "on the move": "sum(jettison:group_requests_moving{W})",
    }),
    "Ended and refused, a second": ("reqps", {
        "{{finished_reason}}": "sum by (finished_reason) (rate(vllm:request_success_total{W}[R]))",
        "refused: {{reason}}": "sum by (reason) (rate(jettison:sheds_total{W}[R]))",
    }),
    "Tokens a second": ("short", {
        "of answers": rate("vllm:generation_tokens_total"), "of prompts": rate("vllm:prompt_tokens_total"),
        "of batches' answers": rate("jettison:offline_output_tokens_total"),
    }),
    "Time to the first token": ("s", {
        "median": quantile(0.5, "vllm:time_to_first_token_seconds"),
        "P90": quantile(0.9, "vllm:time_to_first_token_seconds"),
        "P99": quantile(0.99, "vllm:time_to_first_token_seconds"),
    }),
    "Between tokens": ("s", {
        "median": quantile(0.5, "vllm:inter_token_latency_seconds"),
        "P99": quantile(0.99, "vllm:inter_token_latency_seconds"),
    }),
    "Wait in the queue": ("s", {
        "median": quantile(0.5, "vllm:request_queue_time_seconds"),
        "P99": quantile(0.99, "vllm:request_queue_time_seconds"),
    }),
    "Within the objectives": ("percentunit", {
        "requests": share("jettison:slo_online_requests_within_total", "jettison:slo_online_requests_total"),
    }),
}  # fmt: skip

MEMORY: dict[str, tuple[str, Queries]] = {
    "Memory by use": ("bytes", {"{{use}}": "sum by (use) (jettison:worker_memory_bytes{W})"}),
    "Borrowed from weights for KV": ("bytes", {"instance {{worker}}": "jettison:dropped_parameter_bytes{W}"}),
    "KV blocks in use": ("percentunit", {
        "group {{group}}": "jettison:kv_blocks_used{W} / jettison:kv_blocks_total{W}"}),
    "Prefix cache hits": ("percentunit", {
        "share": share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")}),
}  # fmt: skip

MOVES: dict[str, tuple[str, Queries]] = {
    "Rungs at work, a minute": ("short", {
        name: f"60 * {rate(metric)}" for name, metric in {
            "drops": "jettison:drops_total", "restores": "jettison:restores_total",
            "migrations": "jettison:migrations_total", "preemptions": "vllm:num_preemptions_total",
            "sleeps": "jettison:sleeps_total", "wakes": "jettison:wakes_total",
            "offline pauses": "jettison:offline_pauses_total",
        }.items()
    }),
    "Bytes moved, a second": ("Bps", {
        "KV after drops": rate("jettison:exchanged_bytes_total"), "weights": rate("jettison:pulled_bytes_total"),
        "KV of migrations": rate("jettison:migrated_bytes_total"),
    }),
    "Computed again, tokens a second": ("short", {"tokens": rate("jettison:recomputed_tokens_total")}),
    "Instances": ("short", {
        "awake": "sum(jettison:devices_awake{W})", "asleep": "sum(jettison:devices_asleep{W})",
        "wanted": "sum(jettison:devices_wanted{W})", "groups": "sum(jettison:groups{W})",
    }),
    "Deaths and returns of workers": ("short", {
        "deaths": "sum(increase(jettison:worker_losses_total{W}[R]))",
        "returns": "sum(increase(jettison:worker_joins_total{W}[R]))",
    }),
    "Batches' lines": ("short", {
        "running": "sum(jettison:offline_running{W})", "waiting": "sum(jettison:offline_waiting{W})",
        "with KV in host memory": "sum(jettison:offline_hosted{W})",
    }),
}  # fmt: skip

ROWS = {"Load": LOAD, "Memory": MEMORY, "Moves and instances": MOVES}
STACKED = {"Memory by use"}


def query(text: str) -> str:
    """The query as Grafana sends it, with its variables."""
    return text.replace("{W}", f"{{{WHERE}}}").replace("[R]", "[$__rate_interval]")


def queries() -> list[str]:
    """Of all panels."""
    return [query(text) for row in ROWS.values() for _, told in row.values() for text in told.values()]


def _panel(number: int, title: str, unit: str, told: Queries) -> timeseries.Panel:
    panel = (
        timeseries.Panel().title(title).unit(unit).datasource(SOURCE).span(8).height(7).min(0)
        .draw_style(GraphDrawStyle.LINE).fill_opacity(60 if title in STACKED else 8).id(number)
        .legend(common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
                .show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )  # fmt: skip
    if title in STACKED:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for at, (legend, text) in enumerate(told.items()):
        target = prometheus.Dataquery().expr(query(text)).legend_format(legend).ref_id(chr(ord("A") + at))
        panel = panel.with_target(target.datasource(SOURCE))
    return panel


def document() -> str:
    """The dashboard as JSON."""
    board = (
        dashboard.Dashboard("Jettison").uid("jettison").tags(["jettison", "llm"]).refresh("10s").time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("instance").label("Server").datasource(SOURCE).multi(True).include_all(True).all_value(".*")
            .query("label_values(jettison:groups, instance)").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))
    )  # fmt: skip
    number = 0
    for name, row in ROWS.items():
        number += 1
        board = board.with_row(dashboard.Row(name).id(number))
        for title, (unit, told) in row.items():
            number += 1
            board = board.with_panel(_panel(number, title, unit, told))
    return JSONEncoder(sort_keys=True, indent=1).encode(board.build()) + "\n"


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
