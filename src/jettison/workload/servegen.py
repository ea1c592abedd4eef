"""ServeGen-like characterisations: clients with a rate and a variability in each window, and histograms of lengths.

Not a request log: requests are drawn from it. Windows after ServeGen (Xiang et al., arXiv 2505.09999,
alibaba/ServeGen), a window of a client in each line: its folder of one ``chunk-<client>-trace.csv`` a client,
``timestamp,rate,cv,pattern,param1,param2`` without a header, or one file of all clients with a header and ``client_id``
in front. Lengths in a file ``field,tokens,probability`` (docs/workloads.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from jettison.errors import ConfigError, TraceError
from jettison.workload.formats import BadRow, Record, count, number
from jettison.workload.lengths import TokenHistogram
from jettison.workload.rows import Columns, Counts, Floats, Workload, check_number
from jettison.workload.traces import read_csv, stem

WINDOW_COLUMNS = ("client_id", "timestamp", "rate", "cv", "pattern", "param1", "param2")
CHUNK_COLUMNS = WINDOW_COLUMNS[1:]
CHUNK_NAME = re.compile(r"chunk-(\d+)-trace\.csv(\.gz)?")
"""Name of the published file of one client's windows."""

HISTOGRAM_COLUMNS = ("field", "tokens", "probability")
FIELDS = ("input_tokens", "output_tokens")

_ONE_TOKEN = TokenHistogram(np.ones(1, dtype=np.int32), np.ones(1))

LEAST_SHAPES = {"Gamma": 1e-3, "Weibull": 0.05}
"""The known patterns, and the least shape of each. Below it, thousands of requests share one instant for each gap, and
the mean of a Weibull distribution soon exceeds any float. ServeGen's own clients are above 0.01 and 0.2."""


@dataclass(frozen=True, slots=True)
class ClientWindow:
    """One client from ``start_s`` on, for one window."""

    start_s: float
    rate_per_s: float
    pattern: str
    shape: float
    """Shape of the inter-arrival distribution; its scale follows from the rate."""

    def unit_gaps(self, rng: np.random.Generator, count: int) -> Floats:
        """Gaps of mean 1."""
        if self.pattern == "Gamma":
            return rng.gamma(self.shape, 1.0 / self.shape, size=count)
        drawn = rng.weibull(self.shape, size=count)
        return np.asarray(drawn / _weibull_mean(self.shape))


def _weibull_mean(shape: float) -> float:
    return math.gamma(1.0 + 1.0 / shape)


@dataclass(frozen=True, slots=True)
class ServeGenProfile:
    """The measurements of a service: windows by client, in the order of time, and lengths."""

    name: str
    clients: dict[str, tuple[ClientWindow, ...]]
    window_s: float
    inputs: TokenHistogram
    outputs: TokenHistogram
    skipped_rows: tuple[str, ...] = ()
    """As ``Workload.skipped_rows``."""

    @property
    def duration_s(self) -> float:
        """Time of the end of the last window."""
        return max(windows[-1].start_s for windows in self.clients.values()) + self.window_s

    def expected_requests(self, start_s: float, end_s: float) -> float:
        """Expected requests of all clients together in [start_s, end_s)."""
        return sum(
            window.rate_per_s * max(0.0, min(end_s, window.start_s + self.window_s) - max(start_s, window.start_s))
            for windows in self.clients.values()
            for window in windows
        )


    def compressed(self, start_s: float, every_s: float, part_s: float) -> ServeGenProfile:
        """The first ``part_s`` seconds of every ``every_s`` from ``start_s`` on, one after the other: a day shortened
        to its parts. Requests under way at the end of one part run on into the next.

        Raises ConfigError where a part is no part of one window, or does not begin with one.
        """
        for value, what in ((start_s, "start_s"), (every_s, "every_s")):
            if not math.isclose(value / self.window_s, round(value / self.window_s), abs_tol=1e-6):
                raise ConfigError(f"{what} {value:g} s is no multiple of {self.name}'s windows of {self.window_s:g} s")
        if not 0 < part_s <= min(self.window_s, every_s):
            raise ConfigError(
                f"part_s must be above 0 s and at most a window ({self.window_s:g} s) and every_s, got {part_s:g} s"
            )
        places = {
            round(at / self.window_s): index * part_s
            for index, at in enumerate(np.arange(start_s, self.duration_s, every_s).tolist())
        }
        clients = {
            client: tuple(
                replace(window, start_s=places[number])
                for window in windows
                if (number := round(window.start_s / self.window_s)) in places
            )
            for client, windows in self.clients.items()
        }
        clients = {client: windows for client, windows in clients.items() if windows}
        if not clients:
            raise ConfigError(f"{self.name} has no request in the first {part_s:g} s of every {every_s:g} s")
        return replace(self, clients=clients, window_s=part_s)


@dataclass(slots=True)
class _Windows:
    """The windows read from the lines of a characterisation."""

    clients: dict[str, list[ClientWindow]] = field(default_factory=dict)
    """Windows with requests, in the order of the lines."""
    starts_s: set[float] = field(default_factory=set)
    """Starts of all windows, idle ones included."""

    def take(self, client: str, record: Record) -> None:
        """Add one line. Raises BadRow."""
        start_s, rate_per_s = number(record, "timestamp"), number(record, "rate")
        pattern = str(record["pattern"])
        if pattern and pattern not in LEAST_SHAPES:
            raise BadRow(f"pattern is {pattern!r}, {' or '.join(LEAST_SHAPES)} is expected")
        if not pattern or rate_per_s == 0:
            self.starts_s.add(start_s)
            return  # an idle window: published without a fit
        shape, least = number(record, "param1"), LEAST_SHAPES[pattern]
        if not shape >= least:
            raise BadRow(f"param1 is {record['param1']!r}, a {pattern} shape of at least {least:g} is expected")
        self.starts_s.add(start_s)
        self.clients.setdefault(client, []).append(ClientWindow(start_s, rate_per_s, pattern, shape))


def read_servegen(windows: Path, histograms: Path | None, *, skip_bad_rows: bool = False) -> ServeGenProfile:
    """Read windows (a folder of ``chunk-<client>-trace.csv``, or a file of all clients) and histograms, gzip or plain.

    A window without a pattern or with rate 0 is idle. Without histograms every length is a token, for the caller to
    draw others. Raises TraceError for bad rows (line numbers, nothing
    half-loaded; with ``skip_bad_rows`` they are left out, and the profile says which), windows that overlap, a folder
    without such files, and histograms that are empty or do not sum to 1.
    """
    read, skipped = _read_windows(windows, skip_bad_rows)
    if not read.clients:
        raise TraceError(f"{windows}: no window has a rate above 0")
    ordered = {client: tuple(sorted(found, key=lambda w: w.start_s)) for client, found in read.clients.items()}
    inputs, outputs, also_skipped = (
        (_ONE_TOKEN, _ONE_TOKEN, []) if histograms is None else _read_histograms(histograms, skip_bad_rows)
    )
    name = windows.resolve().name if windows.is_dir() else stem(windows)
    return ServeGenProfile(
        name, ordered, _width_s(windows, ordered, read.starts_s), inputs, outputs, (*skipped, *also_skipped)
    )


def _read_windows(windows: Path, skip_bad_rows: bool) -> tuple[_Windows, list[str]]:
    """The windows of all files, and a line for each file with bad rows that were left out."""
    read = _Windows()
    if windows.is_dir():
        told = [
            read_csv(path, CHUNK_COLUMNS, partial(read.take, client), has_header=False, skip_bad_rows=skip_bad_rows)
            for client, path in _chunks(windows).items()
        ]
    else:
        told = [read_csv(
            windows, WINDOW_COLUMNS, lambda record: read.take(str(record["client_id"]), record),
            skip_bad_rows=skip_bad_rows,
        )]  # fmt: skip
    return read, [each for each in told if each is not None]


def _read_histograms(path: Path, skip_bad_rows: bool) -> tuple[TokenHistogram, TokenHistogram, list[str]]:
    """The histograms of inputs and outputs, and the lines on bad rows that were left out."""
    tokens: dict[str, list[tuple[int, float]]] = {name: [] for name in FIELDS}

    def take_bin(record: Record) -> None:
        if record["field"] not in FIELDS:
            raise BadRow(f"field is {record['field']!r}, {' or '.join(FIELDS)} is expected")
        tokens[str(record["field"])].append((count(record, "tokens"), number(record, "probability")))

    skipped = read_csv(path, HISTOGRAM_COLUMNS, take_bin, skip_bad_rows=skip_bad_rows)
    inputs, outputs = (_histogram(path, name, tokens[name]) for name in FIELDS)
    return inputs, outputs, [skipped] if skipped else []


def _chunks(folder: Path) -> dict[str, Path]:
    """The published files by client, in the order of their numbers. Raises TraceError."""
    found: dict[int, Path] = {}
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise TraceError(f"{folder}: cannot be read: {error.strerror or error}") from error
    for path in paths:
        if match := CHUNK_NAME.fullmatch(path.name):
            other = found.setdefault(int(match[1]), path)
            if other is not path:
                raise TraceError(f"{folder}: client {int(match[1])} has two files, {other.name} and {path.name}")
    if not found:
        raise TraceError(f"{folder}: no file of this folder is named chunk-<client>-trace.csv")
    return {str(client): found[client] for client in sorted(found)}


def _width_s(path: Path, clients: dict[str, tuple[ClientWindow, ...]], starts_s: set[float]) -> float:
    """The common width of windows: the least distance of two starts. All distances must be multiples of it."""
    starts = np.array(sorted(starts_s))
    if len(starts) < 2:
        raise TraceError(f"{path}: windows of at least two times are needed to know how long one is")
    width_s = float(np.diff(starts).min())
    for client, windows in clients.items():
        if len({window.start_s for window in windows}) < len(windows):
            raise TraceError(f"{path}: client {client} has two windows that start at the same time")
    if not np.allclose(np.diff(starts) / width_s, np.rint(np.diff(starts) / width_s), atol=1e-6):
        raise TraceError(f"{path}: windows do not start at multiples of one width ({width_s:g} s)")
    return width_s


def _histogram(path: Path, name: str, bins: list[tuple[int, float]]) -> TokenHistogram:
    bins.sort()
    total = sum(probability for _, probability in bins)
    if not total > 0:
        raise TraceError(f"{path}: no {name} with a probability above 0")
    if abs(total - 1.0) > 0.01:
        raise TraceError(f"{path}: probabilities of {name} sum to {total:.4g}, 1 is expected")
    return TokenHistogram(
        np.array([tokens for tokens, _ in bins], dtype=np.int32), np.array([p / total for _, p in bins])
    )


def draw_servegen(
    profile: ServeGenProfile,
    seed: int,
    *,
    start_s: float = 0.0,
    duration_s: float | None = None,
    rate_scale: float = 1.0,
) -> Workload:
    """Draw the requests of [``start_s``, ``start_s + duration_s``), all clients' rates times ``rate_scale``.

    Each client is a renewal process of its window's pattern and shape, on a clock that runs at its window's rate: so
    its irregularity is kept whatever the scale. Lengths are independent of each other and of the client. Raises
    ConfigError.
    """
    end_s = profile.duration_s if duration_s is None else start_s + duration_s
    if not (0 <= start_s < end_s and start_s < profile.duration_s):
        raise ConfigError(f"{profile.name} has 0 s to {profile.duration_s:g} s, not {start_s:g} s to {end_s:g} s")
    if not rate_scale > 0:
        raise ConfigError(f"rate scale must be above 0, got {rate_scale:g}")
    expected = profile.expected_requests(start_s, end_s) * rate_scale
    check_number(expected, f"{profile.name}, {start_s:g} s to {end_s:g} s at {rate_scale:g} times its rates")
    seeds = np.random.SeedSequence(seed).spawn(len(profile.clients) + 2)
    arrivals = [
        part
        for child, client in zip(seeds, sorted(profile.clients), strict=False)
        for part in _client(profile, client, np.random.default_rng(child), start_s, end_s, rate_scale)
    ]
    times = np.sort(np.concatenate([*arrivals, np.zeros(0)])) - start_s
    inputs: Counts = profile.inputs.draw(np.random.default_rng(seeds[-2]), len(times))
    outputs: Counts = profile.outputs.draw(np.random.default_rng(seeds[-1]), len(times))
    note = (
        f"drawn from {len(profile.clients)} clients in windows of {profile.window_s:g} s, "
        f"{start_s:g} s to {end_s:g} s, rates times {rate_scale:g}, seed {seed}"
    )
    span_s = min(end_s, profile.duration_s) - start_s
    return Workload(
        Columns(times, inputs, outputs), profile.name, f"servegen ({profile.name})", (note, *profile.skipped_rows),
        span_s, skipped_rows=profile.skipped_rows,
    )


def _client(
    profile: ServeGenProfile, client: str, rng: np.random.Generator, start_s: float, end_s: float, rate_scale: float
) -> Iterator[Floats]:
    """One client's arrivals, by window. The rest of a gap at the end of a window runs on at the next window's rate."""
    left = float(rng.random())  # rest of the first gap, in mean gaps: the client was active before the start
    for window in profile.clients[client]:
        lo, hi = max(window.start_s, start_s), min(window.start_s + profile.window_s, end_s)
        if hi <= lo:
            continue
        rate = window.rate_per_s * rate_scale
        room = rate * (hi - lo)
        if left >= room:
            left -= room
            continue
        events = [np.array([left])]
        while events[-1][-1] < room:
            gaps = window.unit_gaps(rng, max(64, int(1.2 * room)))
            events.append(events[-1][-1] + np.cumsum(gaps))
        clock = np.concatenate(events)
        inside = clock[clock < room]
        left = float(clock[len(inside)] - room)
        yield lo + inside / rate
