"""PromQL of alerts and of the dashboard: which metrics it asks for, and what a server's exposition has."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

promql_parser = pytest.importorskip("promql_parser")


def metrics_of(query: str) -> set[str]:
    """Names of the metrics in a query. Raises ValueError where it is none."""
    found: set[str] = set()
    _collect(promql_parser.parse(query), found)
    return found


def _collect(node, found: set[str]) -> None:
    if isinstance(node, promql_parser.VectorSelector):
        found.add(node.name)
        return
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        if (below := getattr(node, name, None)) is not None:
            _collect(below, found)
    for below in getattr(node, "args", None) or ():
        _collect(below, found)


def names_in(exposition: str) -> set[str]:
    """Names of all series."""
    return {sample.name for family in text_string_to_metric_families(exposition) for sample in family.samples}
