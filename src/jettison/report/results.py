"""The one result format of every tool: percentiles, one run, and the file that holds runs.

``jettison bench`` (live) and ``jettison simulate`` (virtual time) both build a :class:`RunResult` from
:class:`RequestRecord` rows with :func:`build_run`, so a metric is defined here once and nowhere else.
``docs/results.md`` is the description for readers of the files. Nothing here draws, prints or talks to a server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from jettison.errors import UserError
from jettison.jsontext import text_in_one_line
from jettison.report.output import write_whole

FORMAT_VERSION = 2
READ_VERSIONS = (1, FORMAT_VERSION)
"""Versions that can be read. In version 1 summaries have no ``count``, and nothing precedes the runs."""

Status = Literal["completed", "failed", "cancelled", "rejected"]
SeriesPoint = tuple[float, float]

_SHORTEST_RUN_S = 1e-9
"""Shortest run with rates, to avoid a division by 0."""

METRIC_DEFINITIONS = {
    "ttft_s": "scheduled arrival to the first chunk that carries text or a token; every request that got one",
    "ttft_from_send_s": "as ttft_s, counted from the moment the client really sent the request",
    "first_chunk_s": "scheduled arrival to the first chunk with non-empty choices, text or not (other clients' TTFT)",
    "tpot_s": "mean gap between output tokens of one request: (last - first) / (tokens - 1); completed requests",
    "itl_s": "every single gap between two chunks of one request; all requests",
    "e2e_s": "scheduled arrival to the end of the stream; completed requests",
    "output_tokens_per_s": "output tokens received by all requests / duration_s",
    "duration_s": "start of the workload to the last end of a request",
    "percentiles": "linear interpolation between order statistics (numpy's default)",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """Five figures of a distribution, in its own unit, all None without samples; and the number of samples."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None
    count: int | None = 0
    """Number of samples: requests, or gaps. None for an older file."""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests by how they ended. ``submitted`` is the sum of the other four."""

    submitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    """Requests that the client closed on purpose."""
    rejected: int = 0
    """Requests refused with 429 or 503."""

    @property
    def unanswered(self) -> int:
        """Failed and rejected requests. Percentiles cover the others."""
        return self.failed + self.rejected


TIME_WAS_UP = "the run's time was up"
NOT_SENT = f"not sent: {TIME_WAS_UP}"
SENDERS_ENDED = "not sent: a request of each sender had failed, or was refused"


@dataclass(slots=True)
class RequestRecord:
    """The record of one request; times are seconds since the workload's time zero."""

    index: int
    scheduled_s: float
    input_tokens: int
    wanted_tokens: int
    """Requested output tokens."""
    status: Status = "failed"
    sent_s: float | None = None
    first_s: float | None = None
    """Time of the first token."""
    finished_s: float | None = None
    output_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    error: str | None = None
    is_offline: bool = False
    """Whether the request is offline."""
    longest_gap_s: float | None = None
    """The longest gap, where single gaps are not kept."""
    first_chunk_s: float | None = None
    """Time of the first chunk with choices, where it is recorded apart from the first token."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds from scheduled arrival to first token."""
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def to_first_chunk_s(self) -> float | None:
        """Seconds from scheduled arrival to the first chunk with choices."""
        return self.ttft_s if self.first_chunk_s is None else self.first_chunk_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None below two tokens."""
        if self.first_s is None or self.finished_s is None or self.output_tokens < 2:
            return None
        last_s = self.first_s + math.fsum(self.gaps_s) if self.gaps_s else self.finished_s
        return (last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def max_gap_s(self) -> float | None:
        """The longest time between two of its tokens."""
        return max(self.gaps_s, default=self.longest_gap_s)

    @property
    def e2e_s(self) -> float | None:
        """Seconds from scheduled arrival to the end of the stream."""
        return None if self.finished_s is None else self.finished_s - self.scheduled_s


@dataclass(slots=True)
class RunResult:
    """One run, as stored. See ``docs/results.md`` for each field."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    requests: RequestCounts = field(default_factory=RequestCounts)
    ttft_s: Summary = field(default_factory=Summary)
    ttft_from_send_s: Summary = field(default_factory=Summary)
    tpot_s: Summary = field(default_factory=Summary)
    itl_s: Summary = field(default_factory=Summary)
    e2e_s: Summary = field(default_factory=Summary)
    output_tokens_per_s: float = 0.0
    duration_s: float = 0.0
    events: dict[str, Any] = field(default_factory=dict)
    """Counts by name; ``log`` (optional) is a list of ``{"t": seconds, "kind": name, ...}``."""
    series: dict[str, list[SeriesPoint]] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    """The load generator's figures of itself: ``lag_s`` summary, threads, concurrency reached."""
    goodput: dict[str, Any] | None = None
    requests_detail: list[dict[str, Any]] | None = None
    """A row for each request that latencies cover: the online ones, where there are both classes."""
    classes: dict[str, dict[str, Any]] | None = None
    """Figures by class (``report.classes``); None where no request was offline."""
    first_chunk_s: Summary = field(default_factory=Summary)
    """TTFT as other clients measure it: equal to ``ttft_s`` unless the server opens streams before the first token."""

    def log(self, *kinds: str) -> list[dict[str, Any]]:
        """Records of the event log, by time; of these kinds alone, where some are named. Empty without a log."""
        found = self.events.get("log") or []
        return [event for event in found if event["kind"] in kinds] if kinds else list(found)

    @property
    def opens_early(self) -> bool:
        """Whether the two measures of TTFT differ: some first chunk carried no token."""
        return self.first_chunk_s != self.ttft_s


def percentile(values: Sequence[float], q: float) -> float | None:
    """The ``q``-th percentile (0 to 100) by linear interpolation, None for no values."""
    if len(values) == 0:
        return None
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def summarize(values: Iterable[float | None]) -> Summary:
    """Summary of the values that are not None."""
    known = np.asarray([value for value in values if value is not None], dtype=np.float64)
    if known.size == 0:
        return Summary()
    p50, p90, p99 = (float(value) for value in np.percentile(known, [50, 90, 99]))
    # The mean of equal values may round to an ulp beyond them; a summary must stay ordered.
    mean = min(max(float(known.mean()), float(known.min())), float(known.max()))
    return Summary(mean, p50, p90, p99, float(known.max()), int(known.size))


def goodput(
    records: Sequence[RequestRecord], duration_s: float, *, slo_ttft_s: float | None, slo_tpot_s: float | None
) -> dict[str, Any]:
    """Requests that completed within both objectives, per second and as a share of all submitted.

    A missing objective is not tested. A request of one token has no TPOT and meets that objective.
    """

    def meets(record: RequestRecord) -> bool:
        if record.status != "completed" or record.ttft_s is None:
            return False
        within_ttft = slo_ttft_s is None or record.ttft_s <= slo_ttft_s
        tpot_s = record.tpot_s
        return within_ttft and (slo_tpot_s is None or tpot_s is None or tpot_s <= slo_tpot_s)

    num_good = sum(meets(record) for record in records)
    return {
        "slo_ttft_s": slo_ttft_s,
        "slo_tpot_s": slo_tpot_s,
        "requests_within": num_good,
        "share": num_good / len(records) if records else None,
        "requests_per_s": num_good / duration_s if duration_s > _SHORTEST_RUN_S else None,
    }


def build_run(
    name: str,
    records: Sequence[RequestRecord],
    *,
    config: Mapping[str, Any] | None = None,
    events: Mapping[str, Any] | None = None,
    series: Mapping[str, Sequence[SeriesPoint]] | None = None,
    client: Mapping[str, Any] | None = None,
    slo_ttft_s: float | None = None,
    slo_tpot_s: float | None = None,
    detail: bool = True,
) -> RunResult:
    """Turn per-request rows into one run.

    ``detail`` keeps one row a request (arrival, TTFT, TPOT, ...) for scatter plots and later questions.
    """
    counts = {status: sum(record.status == status for record in records) for status in get_args(Status)}
    completed = [record for record in records if record.status == "completed"]
    duration_s = last_end_s(records)
    num_tokens = sum(record.output_tokens for record in records)
    wants_goodput = slo_ttft_s is not None or slo_tpot_s is not None
    return RunResult(
        name=name,
        config=dict(config or {}),
        requests=RequestCounts(submitted=len(records), **counts),
        ttft_s=summarize(record.ttft_s for record in records),
        ttft_from_send_s=summarize(
            record.first_s - record.sent_s
            for record in records
            if record.first_s is not None and record.sent_s is not None
        ),
        first_chunk_s=summarize(record.to_first_chunk_s for record in records),
        tpot_s=summarize(record.tpot_s for record in completed),
        itl_s=summarize(gap for record in records for gap in record.gaps_s),
        e2e_s=summarize(record.e2e_s for record in completed),
        output_tokens_per_s=num_tokens / duration_s if duration_s > _SHORTEST_RUN_S else 0.0,
        duration_s=duration_s,
        events=dict(events or {}),
        series={key: [(float(t), float(v)) for t, v in points] for key, points in (series or {}).items()},
        client=dict(client or {}),
        goodput=goodput(records, duration_s, slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s) if wants_goodput else None,
        requests_detail=[detail_row(record) for record in records] if detail else None,
    )


def last_end_s(records: Iterable[RequestRecord]) -> float:
    """When the last request ended; 0 where none has."""
    return max((record.finished_s for record in records if record.finished_s is not None), default=0.0)


def detail_row(record: RequestRecord) -> dict[str, Any]:
    """One request as stored under ``requests_detail``: single gaps shrink to their largest."""
    return {
        "index": record.index,
        "scheduled_s": record.scheduled_s,
        "sent_s": record.sent_s,
        "ttft_s": record.ttft_s,
        "first_chunk_s": record.to_first_chunk_s,
        "tpot_s": record.tpot_s,
        "max_itl_s": record.max_gap_s,
        "e2e_s": record.e2e_s,
        "input_tokens": record.input_tokens,
        "wanted_tokens": record.wanted_tokens,
        "output_tokens": record.output_tokens,
        "status": record.status,
        "error": record.error,
    }


def first_error(run: RunResult) -> str | None:
    """The error of the first unanswered request, in the order of arrivals; None where it was not kept."""
    offline = (run.classes or {}).get("offline", {}).get("requests_detail")
    rows = [*(run.requests_detail or ()), *(offline or ())]
    return next((row["error"] for row in rows if row["status"] in ("failed", "rejected") and row["error"]), None)


def failures_of(runs: Iterable[RunResult]) -> list[dict[str, Any]]:
    """The first entry of a result file: the runs with unanswered requests; empty where there are none."""
    return [
        {
            "run": run.name,
            "submitted": run.requests.submitted,
            "failed": run.requests.failed,
            "rejected": run.requests.rejected,
            "first_error": first_error(run),
        }
        for run in runs
        if run.requests.unanswered
    ]


def write_results(path: Path, runs: Sequence[RunResult]) -> None:
    """Write a result file. The same runs give the same bytes (sorted keys, no time stamp of writing)."""
    document = {
        "failures": _plain(failures_of(runs)),
        "format_version": FORMAT_VERSION,
        "runs": [_plain(asdict(run)) for run in runs],
    }
    text = json.dumps(document, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False)
    write_whole(path, text_in_one_line(text) + "\n")


def read_results(path: Path) -> list[RunResult]:
    """Read and check a result file.

    Raises UserError that names the file and the field of an invalid file: missing file, no JSON, unknown or missing
    keys, counts that do not add up, a series that is no list of pairs.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise UserError(f"{path}: not a JSON result file: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("runs"), list):
        raise UserError(f"{path}: not a result file: an object with a list under 'runs' is expected")
    version = document.get("format_version")
    if version not in READ_VERSIONS:
        known = " and ".join(map(str, READ_VERSIONS))
        raise UserError(f"{path}: format_version is {version!r}, this program reads {known}")
    return [_parse_run(raw, f"{path}: runs[{index}]", version) for index, raw in enumerate(document["runs"])]


_SUMMARY_FIELDS = ("ttft_s", "ttft_from_send_s", "first_chunk_s", "tpot_s", "itl_s", "e2e_s")
_OBJECT_FIELDS = ("config", "events", "client")


def _parse_run(raw: Any, where: str, version: int) -> RunResult:
    if not isinstance(raw, dict):
        raise UserError(f"{where}: an object is expected")
    # Older files have no classes, and only one measure of TTFT, which then stands for both.
    raw = {"classes": None, "first_chunk_s": raw.get("ttft_s"), **raw}
    _check_keys(raw, {item.name for item in fields(RunResult)}, where)
    if not isinstance(raw["name"], str):
        raise UserError(f"{where}.name: a string is expected")
    values: dict[str, Any] = {"name": raw["name"], "goodput": raw["goodput"], "requests_detail": raw["requests_detail"]}
    if not isinstance(raw["classes"], dict | None):
        raise UserError(f"{where}.classes: an object or null is expected")
    values["classes"] = raw["classes"]
    for key in _OBJECT_FIELDS:
        if not isinstance(raw[key], dict):
            raise UserError(f"{where}.{key}: an object is expected")
        values[key] = raw[key]
    for key in _SUMMARY_FIELDS:
        values[key] = _parse_summary(raw[key], f"{where}.{key}", version)
    for key in ("output_tokens_per_s", "duration_s"):
        if not _is_number(raw[key]):
            raise UserError(f"{where}.{key}: a number is expected")
        values[key] = float(raw[key])
    values["requests"] = _parse_counts(raw["requests"], f"{where}.requests")
    if not isinstance(raw["series"], dict):
        raise UserError(f"{where}.series: an object is expected")
    values["series"] = {key: _parse_series(points, f"{where}.series.{key}") for key, points in raw["series"].items()}
    return RunResult(**values)


def _parse_summary(raw: Any, where: str, version: int) -> Summary:
    if version == 1 and isinstance(raw, dict):
        raw = {"count": None, **raw}
    numbers = _numbers(raw, Summary, where)
    count = numbers["count"]
    if count is not None and (not isinstance(count, int) or count < 0):
        raise UserError(f"{where}.count: a whole number of at least 0 is expected")
    return Summary(**numbers)


def _parse_counts(raw: Any, where: str) -> RequestCounts:
    numbers = _numbers(raw, RequestCounts, where)
    if any(not isinstance(value, int) or value < 0 for value in numbers.values()):
        raise UserError(f"{where}: counts must be whole numbers of at least 0")
    counts = RequestCounts(**numbers)
    if counts.submitted != counts.completed + counts.failed + counts.cancelled + counts.rejected:
        raise UserError(f"{where}: submitted must be the sum of completed, failed, cancelled and rejected")
    return counts


def _parse_series(raw: Any, where: str) -> list[SeriesPoint]:
    is_pairs = isinstance(raw, list) and all(
        isinstance(point, list) and len(point) == 2 and all(_is_number(value) for value in point) for point in raw
    )
    if not is_pairs:
        raise UserError(f"{where}: a list of [t, value] pairs is expected")
    return [(float(t), float(value)) for t, value in raw]


def _numbers(raw: Any, shape: type[Summary] | type[RequestCounts], where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise UserError(f"{where}: an object is expected")
    _check_keys(raw, {item.name for item in fields(shape)}, where)
    for key, value in raw.items():
        if not (_is_number(value) or (value is None and shape is Summary)):
            raise UserError(f"{where}.{key}: a number is expected")
    return raw


def _check_keys(raw: Mapping[str, Any], expected: set[str], where: str) -> None:
    missing, unknown = sorted(expected - raw.keys()), sorted(raw.keys() - expected)
    if missing or unknown:
        raise UserError(f"{where}: missing keys {missing}, unknown keys {unknown}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: Any) -> Any:
    """``value`` as JSON's own types; floats keep microsecond-scale precision so that files stay small."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in items]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        # Infinities and NaN are not JSON. They come from a bug upstream, so ``dumps`` may raise.
        return float(f"{value:.9g}") if math.isfinite(value) else value
    if isinstance(value, Path):
        return str(value)
    return value


def met_the_same(other: RunResult, run: RunResult) -> bool:
    """Whether two runs had equal arrivals and lengths, request by request, under equal conditions
    (``shares_conditions``)."""
    return shares_conditions(other, run) and bool(_load(run)) and _load(other) == _load(run)


def has_other_arrivals(other: RunResult, run: RunResult) -> bool:
    """Whether both runs keep their requests one by one, and these differ."""
    return bool(_load(run)) and bool(_load(other)) and _load(other) != _load(run)


def shares_conditions(other: RunResult, run: RunResult) -> bool:
    """Whether two runs share the point of a sweep and, if simulated, the seed: any other difference is one of variants.

    A live run's seed does not count, as it decides the contents of prompts only.
    """
    if (other.config.get("point") or {}) != (run.config.get("point") or {}):
        return False
    are_simulated = other.config.get("simulated", False) and run.config.get("simulated", False)
    return not are_simulated or other.config.get("seed") == run.config.get("seed")


def _load(run: RunResult) -> list[tuple[float, int, int]]:
    return [(row["scheduled_s"], row["input_tokens"], row["wanted_tokens"]) for row in run.requests_detail or []]
