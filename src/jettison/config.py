"""What an engine is told: frozen dataclasses, parsed, validated and resolved from flat keys.

Every key is declared once, beside its field. The command line makes its flags from ``KEYS``, a YAML file
uses the same names (dashes or underscores), and a flag beats the environment, which beats the file, which
beats the default. ``EngineConfig.provenance`` says which one won for each key.

Standard library only. Reading files and printing tables belong to ``jettison.cli``; whether the model folder
can be served, and whether the budget holds its parameters, is for ``jettison.device`` to say.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from jettison.errors import ConfigError

Source = Literal["default", "file", "env", "flag"]
DType = Literal["auto", "float64", "float32", "bfloat16"]
Kernels = Literal["auto", "native", "torch"]
OverloadPolicy = Literal["drop", "recompute", "swap", "migrate", "pipeline"]
Lookahead = Literal["on", "off"]
Planner = Literal["throughput", "memory"]
Exchange = Literal["auto", "transfer", "recompute", "live"]
Launcher = Literal["local"]
LogLevel = Literal["debug", "info", "warning", "error"]

API_KEY_VARIABLE = "JETTISON_API_KEY"
DEFAULT_MAX_NUM_SEQS = 256

Parser = Callable[[object], object]


# --- parsers: one value as a person wrote it -> the value of the field. They raise ValueError, without the key's name.

_UNITS = {
    "": 1, "b": 1,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}


def parse_bytes(value: object) -> int:
    """Bytes from ``268435456``, ``"256MiB"`` or ``"1.5 GiB"``; KB, MB, ... are powers of ten. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)):
        number, unit = match.group(1), match.group(2).lower()
        if unit in _UNITS:
            num_bytes = float(number) * _UNITS[unit] if "." in number else int(number) * _UNITS[unit]
            if num_bytes == int(num_bytes):
                return int(num_bytes)
    raise ValueError(f"needs a size such as 256MiB, 1GiB or a whole number of bytes, not {value!r}")


def format_bytes(num_bytes: int) -> str:
    """The shortest exact form that ``parse_bytes`` reads back: ``1073741824`` -> ``"1GiB"``."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit}"
    return str(num_bytes)


def _bytes(minimum: int, *, power_of_two: bool = False) -> Parser:
    def parse(value: object) -> int:
        num_bytes = parse_bytes(value)
        if num_bytes < minimum:
            raise ValueError(f"must be at least {format_bytes(minimum)}, not {format_bytes(num_bytes)}")
        if power_of_two and num_bytes & (num_bytes - 1):
            raise ValueError(f"must be a power of two, not {num_bytes}")
        return num_bytes

    return parse


def _int(minimum: int, maximum: int | None = None) -> Parser:
    wanted = f"a whole number >= {minimum}" if maximum is None else f"a whole number from {minimum} to {maximum}"

    def parse(value: object) -> int:
        number: int | None = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
            number = int(value)
        if number is None or number < minimum or (maximum is not None and number > maximum):
            raise ValueError(f"needs {wanted}, not {value!r}")
        return number

    return parse


def _float(minimum: float, maximum: float | None = None) -> Parser:
    wanted = f"a number >= {minimum:g}" if maximum is None else f"a number from {minimum:g} to {maximum:g}"

    def parse(value: object) -> float:
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < minimum or (maximum is not None and number > maximum):
            raise ValueError(f"needs {wanted}, not {value!r}")
        return number

    return parse


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"needs a text that is not empty, not {value!r}")
    return value


def _bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    raise ValueError(f"needs true or false, not {value!r}")


class _Choice:
    """Parser of one of the words of a Literal."""

    def __init__(self, literal: object) -> None:
        self.words: tuple[str, ...] = get_args(literal)

    def __call__(self, value: object) -> str:
        if isinstance(value, str) and value in self.words:
            return value
        listed = self.words[0] if len(self.words) == 1 else f"{', '.join(self.words[:-1])} or {self.words[-1]}"
        raise ValueError(f"must be {listed}, not {value!r}{_did_you_mean(value, self.words)}")


def _launcher(value: object) -> object:
    if value == "ray":
        raise ValueError("cannot be 'ray': it is not available in this version; workers run as local processes")
    return _Choice(Launcher)(value)


class _Switch(_Choice):
    """Parser of ``on`` or ``off``, which YAML reads as booleans."""

    def __call__(self, value: object) -> str:
        return super().__call__({True: "on", False: "off"}[value] if isinstance(value, bool) else value)


def _texts(value: object) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)):
        raise ValueError("needs a text or a list of texts")
    texts = tuple(_text(item) for item in values)
    if any(text != text.strip() or not text.isascii() for text in texts):
        raise ValueError("needs ASCII texts without spaces around them")
    return texts


def _or_none(parse: Parser, word: str) -> Parser:
    """Accept None, or the word a person writes for it, beside what ``parse`` accepts."""

    def parse_or_none(value: object) -> object:
        if value is None or (isinstance(value, str) and value.strip().lower() == word):
            return None
        return parse(value)

    return parse_or_none


def _did_you_mean(word: object, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, n=1) if isinstance(word, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


# --- the keys, each beside its field


def _key(
    default: object,
    parse: Parser,
    text: str,
    *,
    name: str | None = None,
    metavar: str = "",
    unset: str | None = None,
    bare: object = None,
) -> Any:
    """A field that is a key. Its value passes through ``parse``; ``name`` where the key lacks the field's unit;
    ``unset`` is the word for None. A key that ``resolve`` works out has default None, and the field has ``bare``.
    """
    metadata = {
        "name": name, "default": default, "text": text, "unset": unset,
        "metavar": metavar or ("|".join(parse.words) if isinstance(parse, _Choice) else "TEXT"),
        "parse": parse if unset is None else _or_none(parse, unset),
    }
    return field(default=default if bare is None else bare, repr=name != "api_key", metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, in which precision, computed by which kernels."""

    model: str = _key("", _text, "Model folder (Hugging Face layout).", metavar="DIR")
    served_model_name: str = _key(
        None, _text, "Name clients use for the model (auto: the folder's name).", metavar="NAME", unset="auto", bare="")
    dtype: DType = _key(
        "auto", _Choice(DType), "Precision of weights, activations and KV (auto: the checkpoint's).")
    kernels: Kernels = _key(
        "auto", _Choice(Kernels), "CPU attention: the compiled kernel, plain torch, or (auto) whichever is there.")
    max_model_len: int | None = _key(
        None, _int(1), "Most tokens (prompt and output) of one request (auto: the model's context).",
        metavar="N", unset="auto")
    seed: int | None = _key(
        0, _int(0, 2**63 - 1), "Seed for requests that send none (none: other draws at every start).",
        metavar="N", unset="none")


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """A worker's memory: a hard limit that holds parameters, KV cache and workspace."""

    memory_bytes: int = _key(1 << 30, _bytes(1 << 16), "Memory of each instance.", name="memory", metavar="SIZE")
    page_bytes: int = _key(
        64 << 10, _bytes(4096, power_of_two=True), "Unit in which memory moves between parameters and KV cache.",
        name="page_size", metavar="SIZE")
    block_size: int = _key(16, _int(1, 1024), "Tokens of one KV-cache block.", metavar="N")
    host_memory_bytes: int = _key(
        None, _bytes(0), "Host memory of each instance for swapped KV, with --overload swap (auto: as --memory).",
        name="host_memory", metavar="SIZE", unset="auto", bare=1 << 30)
    enable_prefix_caching: bool = _key(True, _bool, "Reuse the KV cache of equal prompt prefixes.", metavar="BOOL")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How much one step takes on, and when a request is let in."""

    max_num_seqs: int = _key(
        None, _int(1),
        f"Most requests running in one group (auto: {DEFAULT_MAX_NUM_SEQS}, or the token budget where that is less).",
        metavar="N", unset="auto", bare=DEFAULT_MAX_NUM_SEQS)
    max_num_batched_tokens: int = _key(512, _int(1), "Token budget of one step.", metavar="N")
    admission_watermark: float = _key(
        0.01, _float(0.0, 0.9), "Part of the blocks kept free when a request is admitted.", metavar="FRACTION")
    lookahead: Lookahead = _key(
        "on", _Switch(Lookahead), "In a pipeline, form microbatches of equal predicted time from all queued tokens.")
    lookahead_min_tokens: int | None = _key(
        None, _int(1), "Fewest prompt tokens of such a microbatch (auto: from the measured cost of a step).",
        metavar="N", unset="auto")
    max_num_queued_reqs: int | None = _key(
        1000, _int(1), "Waiting requests beyond which a client is told 429 (none: no limit).",
        metavar="N", unset="none")


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """When memory is what binds, and what is done about it."""

    policy: OverloadPolicy = _key(
        "drop", _Choice(OverloadPolicy),
        "Out of KV memory: drop replicated layers and merge instances (drop), or a baseline: preempt and recompute, "
        "swap to the host, migrate between instances, static pipelines of two (docs/baselines.md).", name="overload")
    planner: Planner = _key(
        "throughput", _Choice(Planner),
        "How far a drop merges: as little as frees enough memory, or until the KV cache has doubled.")
    min_wait_ms: int = _key(
        100, _int(0), "How long memory must have kept the head of the queue out before it counts as overload.",
        name="overload_min_wait_ms", metavar="MS")
    check_interval_ms: int = _key(
        100, _int(1), "How often the monitor looks besides at each admission.",
        name="overload_check_interval_ms", metavar="MS")
    horizon_ms: int = _key(
        0, _int(0), "How far ahead memory is foreseen to run out (1000 is the paper's); 0: only what waits counts.",
        name="overload_horizon_ms", metavar="MS")
    rebalance: bool = _key(
        True, _bool, "Requests that a full batch keeps waiting go to groups with a place for them.", metavar="BOOL")
    restore_threshold: float = _key(
        0.5, _float(0.0, 1.0), "Usage, as a part of the undropped KV capacity, below which layers are restored.",
        metavar="FRACTION")
    drop_dwell_ms: int = _key(
        500, _int(0), "Least time between a finished restore and the next drop.", metavar="MS")
    restore_dwell_ms: int = _key(
        2000, _int(0), "Least time between a finished drop and its restore.", metavar="MS")
    swap_budget_blocks: int | None = _key(
        None, _int(1), "swap: blocks that a step may carry, in and out (auto: a quarter of its time).",
        metavar="N", unset="auto")
    migrate_threshold: float = _key(
        3.0, _float(0.0), "migrate: free blocks a request below which an instance gives, above which it takes.",
        metavar="BLOCKS")
    migrate_period_ms: int = _key(50, _int(1), "migrate: how often instances are compared.", metavar="MS")
    exchange: Exchange = _key(
        "auto", _Choice(Exchange),
        "Running requests after a drop: send their KV, compute it again, attend to it remotely while it moves (live), "
        "or (auto) what is predicted to cost each of them least.")
    exchange_piece_bytes: int | None = _key(
        None, _bytes(4096),
        "Bulk transfers are cut into pieces of this size; activations go in between (auto: what the link carries in "
        "one stage's time).", metavar="SIZE", unset="auto")
    coordinate_links: bool = _key(
        True, _bool, "Bulk transfers are cut up and yield to activations; no: for experiments only.", metavar="BOOL",
        name="coordination")


@dataclass(frozen=True, slots=True)
class FaultsConfig:
    """What counts as a dead worker, and what is done about one."""

    worker_heartbeat_timeout_s: float = _key(
        1.5, _float(0.0), "A worker silent for so long counts as hung and is replaced (0: never).",
        name="worker_heartbeat_timeout", metavar="SECONDS")
    worker_step_timeout_s: float = _key(
        300.0, _float(0.0), "A worker in one step, layout or load for so long counts as hung (0: never).",
        name="worker_step_timeout", metavar="SECONDS")
    max_worker_restarts: int = _key(
        5, _int(0), "A worker that dies more often than this in five minutes stays down.", metavar="N")
    outage_timeout_s: float = _key(
        60.0, _float(0.0), "How long accepted requests wait when no worker lives; then they end with an error.",
        name="outage_timeout", metavar="SECONDS")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP front end."""

    host: str = _key("127.0.0.1", _text, "Address to listen on.", metavar="ADDRESS")
    port: int = _key(8000, _int(0, 65535), "Port to listen on (0: any free one).", metavar="PORT")
    api_keys: tuple[str, ...] = _key(
        (), _texts, f"Key that clients must send; may be given more than once (also: {API_KEY_VARIABLE}).",
        name="api_key", metavar="KEY")
    shutdown_timeout_s: float = _key(
        30.0, _float(0.0), "Seconds that running requests get to finish after SIGTERM.",
        name="shutdown_timeout", metavar="SECONDS")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is told. Make one with ``resolve``; it is validated and nothing in it is left open."""

    model: ModelConfig = field(default_factory=ModelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    overload: OverloadConfig = field(default_factory=OverloadConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    instances: int = _key(1, _int(1, 1024), "Full copies of the model, each with a worker of its own.", metavar="N")
    num_threads: int = _key(
        None, _int(1, 1024), "Compute threads of each worker (auto: cores / instances).", metavar="N", unset="auto",
        bare=1)
    profile: str = _key(
        "auto", _text, "What `jettison profile` wrote: a file, the one beside the model (auto), or nothing (none).",
        metavar="FILE")
    launcher: Launcher = _key(
        "local", _launcher, "Where workers run: local, as processes on this machine; nothing else in this version.",
        metavar="local")
    log_level: LogLevel = _key("info", _Choice(LogLevel), "Least severe message logged.")
    provenance: Mapping[str, Source] = field(
        default_factory=lambda: MappingProxyType({}), compare=False, repr=False)
    """Key -> where its value came from."""

    @classmethod
    def resolve(
        cls,
        *,
        file: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        num_cores: int | None = None,
        needs_model: bool = True,
        **flags: object,
    ) -> EngineConfig:
        """Parse, validate and complete: ``EngineConfig.resolve(model="dir", instances=2, memory="256MiB")``.

        ``flags`` are flat keys as in ``KEYS``, each a value or a text to parse; ``file`` is a parsed YAML
        mapping of the same keys; ``environ`` is looked up for the API key only, and only when given;
        ``num_cores`` defaults to the cores this process may use; without ``needs_model`` a missing model
        folder is let through (to show a configuration). Raises ConfigError: one line that names the key.
        """
        given: dict[str, tuple[object, Source]] = {}
        for source, mapping in _sources(file, environ, flags):
            given |= {name: (raw, source) for name, raw in _named(mapping, source).items()}
        values: dict[str, Any] = {}
        for name, key in KEYS.items():
            values[name] = _parsed(key, *given[name]) if name in given else key.default
        if needs_model and not values["model"]:
            raise ConfigError("no model folder given: `jettison serve MODEL_DIR`, or `model: DIR` in the file")
        _complete(values, num_cores or _usable_cores())
        provenance: dict[str, Source] = {name: given[name][1] if name in given else "default" for name in KEYS}
        sections = {
            section: factory(**{key.field: values[key.name] for key in KEYS.values() if key.section == section})
            for section, factory in _SECTIONS.items()
        }
        own = {key.field: values[key.name] for key in KEYS.values() if not key.section}
        return cls(**sections, **own, provenance=MappingProxyType(provenance))

    def flat(self) -> dict[str, Any]:
        """Key -> value, in the order of ``KEYS``: ``resolve(**config.flat()) == config``, also by way of JSON."""
        return {
            key.name: getattr(getattr(self, key.section) if key.section else self, key.field) for key in KEYS.values()
        }


_SECTIONS: dict[str, Callable[..., Any]] = {
    "model": ModelConfig,
    "memory": MemoryConfig,
    "scheduler": SchedulerConfig,
    "overload": OverloadConfig,
    "faults": FaultsConfig,
    "server": ServerConfig,
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its flag is ``--`` plus the name with dashes."""

    name: str
    section: str
    """Attribute of EngineConfig that holds the field; empty for EngineConfig itself."""
    field: str
    default: object
    parse: Parser
    text: str
    metavar: str
    unset: str | None
    """What a person writes for None."""

    @property
    def flag(self) -> str:
        """As it is written on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        """Whether the flag takes no value and has a ``--no-`` twin."""
        return isinstance(self.default, bool)

    @property
    def is_repeatable(self) -> bool:
        """Whether the flag may be given more than once."""
        return isinstance(self.default, tuple)

    def show(self, value: object) -> str:
        """A value of this key as a person would write it."""
        if value is None:
            return self.unset or ""
        if self.metavar == "SIZE" and isinstance(value, int):
            return format_bytes(value)
        if isinstance(value, bool):
            return str(value).lower()
        return ", ".join(value) if isinstance(value, (tuple, list)) else str(value)


def _collect_keys() -> dict[str, Key]:
    keys: dict[str, Key] = {}
    for section, owner in (*_SECTIONS.items(), ("", EngineConfig)):
        for item in fields(owner):  # type: ignore[arg-type]  # _SECTIONS holds classes, seen as callables
            if "parse" in item.metadata:
                name = item.metadata["name"] or item.name
                details = {key: value for key, value in item.metadata.items() if key != "name"}
                keys[name] = Key(name=name, section=section, field=item.name, **details)
    return keys


KEYS: Mapping[str, Key] = MappingProxyType(_collect_keys())
"""Every key by name, in the order in which they are shown."""


# --- resolving


def _sources(
    file: Mapping[str, object] | None, environ: Mapping[str, str] | None, flags: Mapping[str, object]
) -> list[tuple[Source, Mapping[str, object]]]:
    """Weakest first."""
    sources: list[tuple[Source, Mapping[str, object]]] = [("file", file or {})]
    if environ and environ.get(API_KEY_VARIABLE):
        sources.append(("env", {"api_key": environ[API_KEY_VARIABLE]}))
    sources.append(("flag", flags))
    return sources


def _named(mapping: Mapping[str, object], source: Source) -> dict[str, object]:
    """The mapping under the keys' own names, dashes made underscores; refuses unknown and doubled ones."""
    where = "the configuration file: " if source == "file" else ""
    named: dict[str, object] = {}
    for written, raw in mapping.items():
        name = written.replace("-", "_") if isinstance(written, str) else written
        if name not in KEYS:
            hint = _did_you_mean(name, tuple(KEYS))
            raise ConfigError(f"{where}unknown key {written!r}{hint}; `jettison config show` lists all keys")
        if name in named:
            raise ConfigError(f"{where}key {name!r} is given twice")
        named[name] = raw
    return named


def _parsed(key: Key, raw: object, source: Source) -> object:
    try:
        return key.parse(raw)
    except ValueError as error:
        label = {"flag": key.flag, "file": f"the configuration file: {key.name}", "env": API_KEY_VARIABLE}
        raise ConfigError(f"{label.get(source, key.name)} {error}") from None


def _complete(values: dict[str, Any], num_cores: int) -> None:
    """Fill what depends on other keys, and refuse what contradicts them."""
    if values["served_model_name"] is None:
        values["served_model_name"] = os.path.basename(os.path.abspath(values["model"])) if values["model"] else ""
    if values["host_memory"] is None:
        values["host_memory"] = values["memory"]
    if values["num_threads"] is None:
        values["num_threads"] = max(1, num_cores // values["instances"])
    budget = values["max_num_batched_tokens"]
    if values["max_num_seqs"] is None:
        values["max_num_seqs"] = min(DEFAULT_MAX_NUM_SEQS, budget)
    if values["max_num_seqs"] > budget:
        raise ConfigError(
            f"--max-num-seqs {values['max_num_seqs']} is above --max-num-batched-tokens {budget}: "
            "a step could not give every running request its one token")
    if values["memory"] < values["page_size"]:
        raise ConfigError(
            f"--memory {format_bytes(values['memory'])} is less than one page (--page-size "
            f"{format_bytes(values['page_size'])})")


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # absent on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
