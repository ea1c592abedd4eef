"""Trace files out: our own format, whole or not at all. Reading is in ``traces``."""

from __future__ import annotations

import gzip
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from jettison.errors import ConfigError
from jettison.workload.formats import CLASSES, OUR_COLUMNS, OUR_EXTRA_COLUMNS, TENANT_COLUMN
from jettison.workload.rows import Workload


def write_trace(path: Path, workload: Workload) -> None:
    """Write our own format (CSV; gzip if the name ends in ``.gz``): source and notes above the header, then the rows.

    Arrivals keep microseconds. The file appears whole or not at all. Raises ConfigError where it cannot be written.
    """
    if not path.name:  # "." and "/" have none
        raise ConfigError(f"{path}: cannot be written: it is a folder")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as raw:
            # No name and no time inside, so that equal workloads are equal files.
            packed = gzip.GzipFile("", "wb", 6, raw, mtime=0) if path.suffix == ".gz" else raw
            with io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as text:
                _write_rows(text, workload)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def _write_rows(text: IO[str], workload: Workload) -> None:
    about = [f"source: {workload.source}", *(f"note: {note}" for note in workload.notes)]
    if workload.span_s is not None:
        about.append(f"span_s: {workload.span_s!r}")
    text.writelines(f"# {' '.join(line.split())}\n" for line in about)
    columns = workload.columns
    names = OUR_COLUMNS if columns.is_plain else (*OUR_COLUMNS, *OUR_EXTRA_COLUMNS)
    tells_tenants = columns.tenant is not None
    text.write(",".join((*names, TENANT_COLUMN) if tells_tenants else names) + "\n")
    for row in columns:
        line = f"{row.arrival_s:.6f},{row.input_tokens},{row.output_tokens}"
        if not columns.is_plain:
            line += f",{row.cached_tokens},{CLASSES[row.is_offline]}"
        text.write(f"{line},{row.tenant}\n" if tells_tenants else f"{line}\n")
