"""The whole configuration of an engine: all sections together, resolved from flat keys, with the rules between keys.

A flag beats the environment, which beats the file, which beats the default; ``EngineConfig.provenance`` says which one
won for each key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from jettison.config.cores import usable_cores
from jettison.config.devices import MOST_HOST_BYTES, DeviceConfig, LookForCards, settle
from jettison.config.hosts import HostsConfig, check_hosts
from jettison.config.hubcache import model_folder, model_name
from jettison.config.model import ModelConfig
from jettison.config.network import ConnectionsConfig, ConsoleConfig, CorsConfig, TlsConfig, TracesConfig
from jettison.config.offline import harvest_parts
from jettison.config.rungs import uses_host_pool
from jettison.config.scale import ScaleConfig, settle_scale
from jettison.config.sections import (
    API_KEY_VARIABLES,
    DEFAULT_MAX_NUM_SEQS,
    DEFAULT_TOKEN_BUDGET,
    FaultsConfig,
    LogLevel,
    MemoryConfig,
    OfflineConfig,
    OverloadConfig,
    PackingConfig,
    SchedulerConfig,
    ServerConfig,
    SleepConfig,
    TemplateConfig,
    config_key,
)
from jettison.config.values import Choice, Parser, did_you_mean, format_bytes, int_from, nonempty
from jettison.errors import ConfigError, UserError

Source = Literal["default", "file", "env", "flag"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The whole configuration of an engine. Make one with ``resolve``: it is validated, and every value is filled
    in."""

    model: ModelConfig = field(default_factory=ModelConfig)
    devices: DeviceConfig = field(default_factory=DeviceConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    overload: OverloadConfig = field(default_factory=OverloadConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    sleep: SleepConfig = field(default_factory=SleepConfig)
    templates: TemplateConfig = field(default_factory=TemplateConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    cors: CorsConfig = field(default_factory=CorsConfig)
    connections: ConnectionsConfig = field(default_factory=ConnectionsConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    instances: int = config_key(
        1, int_from(1, 1024), "Full copies of the model, each with a worker of its own.", metavar="N")
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    num_threads: int = config_key(
        None, int_from(1, 1024), "Compute threads of each worker (auto: cores / instances).", metavar="N", unset="auto",
        bare=1)
    profile: str = config_key(
        "auto", nonempty, "What `jettison profile` wrote: a file, the one beside the model (auto), or nothing (none).",
        metavar="FILE")
    api_servers: int = config_key(
        0, int_from(0, 64), "Front ends in processes of their own: HTTP, tokenizing, grammars and streams beside the "
        "engine's process (0: in it).", metavar="N")
    log_level: LogLevel = config_key("info", Choice(LogLevel), "Least severe message logged.")
    provenance: Mapping[str, Source] = field(
        default_factory=lambda: MappingProxyType({}), compare=False, repr=False)
    """Key -> the source of its value."""
    places: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)
    """Key -> its file and line, for the keys set by a file."""
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Lines for the log: what was said and has no effect here."""

    @contextmanager
    def placed(self) -> Iterator[None]:
        """A UserError raised inside is raised again with the file and line of the values that it is about. An error is
        about a value where it names the value's flag or key or, where it names none, quotes the value."""
        try:
            yield
        except UserError as error:
            told = str(error)
            # A key of one plain word ("model", "host") may occur in any sentence, and so does not mark what it is
            # about.
            words = {name: [KEYS[name].flag, *([name] if "_" in name else [])] for name in self.places}
            named = [name for name in self.places if _has_word(told, *words[name])]
            shown = {name: KEYS[name].show(self.shown()[name]) for name in self.places}
            about = named or [name for name, value in shown.items() if len(value) > 6 and _has_word(told, value)]
            if not about:
                raise
            raise type(error)(f"{told} ({'; '.join(f'{name}: {self.places[name]}' for name in about)})") from error

    @classmethod
    def resolve(
        cls,
        *,
        file: Mapping[str, object] | None = None,
        place_in_file: Callable[[object], str] | None = None,
        environ: Mapping[str, str] | None = None,
        num_cores: int | None = None,
        look_for_cards: LookForCards | None = None,
        needs_model: bool = True,
        **flags: object,
    ) -> EngineConfig:
        """Parse, validate and complete: ``EngineConfig.resolve(model="dir", instances=2, memory="256MiB")``.

        ``flags`` are flat keys as in ``KEYS``, each a value or a text to parse. ``file`` is a parsed YAML mapping of
        the same keys; ``place_in_file`` maps a key, as written there, to its file and line. ``environ``, if given, is
        searched for the API key only. ``num_cores`` defaults to the cores that this process may use.
        ``look_for_cards``: for ``device`` auto; without it that is the cpu. Without ``needs_model`` a missing model
        folder is accepted (to show a configuration). Raises ConfigError: one line that names the key; BudgetError where
        a card has no room.
        """
        given: dict[str, _Given] = {}
        for source, mapping in _sources(file, environ, flags):
            place = (lambda _: _key_variable(environ) or "") if source == "env" else place_in_file
            given |= _named(mapping, source, place)
        values: dict[str, Any] = {}
        for name, key in KEYS.items():
            values[name] = _parsed(key, given[name]) if name in given else key.default
        if needs_model and not values["model"]:
            raise ConfigError("no model folder: name MODEL_DIR after the command, or `model: DIR` in --config")
        settle_scale(values, given)
        notes = settle(values, look_for_cards)
        check_hosts(values)
        _complete(values, num_cores or usable_cores(), given)
        provenance: dict[str, Source] = {name: given[name].source if name in given else "default" for name in KEYS}
        sections = {
            section: factory(**{key.field: values[key.name] for key in KEYS.values() if key.section == section})
            for section, factory in _SECTIONS.items()
        }
        own = {key.field: values[key.name] for key in KEYS.values() if not key.section}
        places = {name: said.place for name, said in given.items() if said.source == "file"}
        return cls(**sections, **own, provenance=MappingProxyType(provenance), places=MappingProxyType(places),
                   notes=notes)

    @property
    def most_instances(self) -> int:
        """How many instances there may be at one time."""
        return self.scale.max_instances or self.instances

    @property
    def threads_of_a_worker(self) -> int:
        """As told, or an even share of the cores."""
        return self.num_threads or max(1, usable_cores() // self.most_instances)

    def flat(self) -> dict[str, Any]:
        """Key -> value, in the order of ``KEYS``: ``resolve(**config.flat()) == config``, also by way of JSON, where a
        card's memory is in use as it was."""
        values = self.shown()
        if self.memory.gpu_memory_utilization is not None:
            values["memory"] = None  # it follows
        return values

    def shown(self) -> dict[str, Any]:
        """Key -> value, each as it counts, for people."""
        return {
            key.name: getattr(getattr(self, key.section) if key.section else self, key.field) for key in KEYS.values()
        }


_SECTIONS: dict[str, Callable[..., Any]] = {
    "model": ModelConfig,
    "devices": DeviceConfig,
    "memory": MemoryConfig,
    "scheduler": SchedulerConfig,
    "overload": OverloadConfig,
    "offline": OfflineConfig,
    "packing": PackingConfig,
    "faults": FaultsConfig,
    "sleep": SleepConfig,
    "templates": TemplateConfig,
    "server": ServerConfig,
    "cors": CorsConfig,
    "connections": ConnectionsConfig,
    "tls": TlsConfig,
    "console": ConsoleConfig,
    "traces": TracesConfig,
    "hosts": HostsConfig,
    "scale": ScaleConfig,
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
    """The word that a person writes for None."""

    @property
    def flag(self) -> str:
        """The flag, as it is written on the command line."""
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
        if isinstance(value, (tuple, list)):
            return ", ".join(map(str, value)) or (self.unset or "")
        return str(value)


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
    """The sources of values, weakest first."""
    sources: list[tuple[Source, Mapping[str, object]]] = [("file", file or {})]
    variable = _key_variable(environ)
    if environ and variable is not None:
        sources.append(("env", {"api_key": environ[variable]}))
    sources.append(("flag", flags))
    return sources


def _key_variable(environ: Mapping[str, str] | None) -> str | None:
    """The variable that the API key is taken from."""
    return next((name for name in API_KEY_VARIABLES if environ and environ.get(name)), None)


def _has_word(text: str, *words: str) -> bool:
    return any(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) for word in words)


@dataclass(frozen=True, slots=True)
class _Given:
    """The value given for a key, before parsing."""

    raw: object
    source: Source
    place: str
    """File and line of a value from a file, the variable of one from the environment; else empty."""

    def label(self, key: Key) -> str:
        """The key as its source names it, for error messages."""
        return {"flag": key.flag, "file": f"{self.place}: {key.name}", "env": self.place}[self.source]


def _named(
    mapping: Mapping[str, object], source: Source, place_of: Callable[[object], str] | None
) -> dict[str, _Given]:
    """The mapping under the keys' own names, dashes made underscores. Raises ConfigError for an unknown or repeated
    key."""
    named: dict[str, _Given] = {}
    for written, raw in mapping.items():
        place = ""
        if source != "flag":
            place = "the configuration file" if place_of is None else place_of(written)
        where = f"{place}: " if place else ""
        name = written.replace("-", "_") if isinstance(written, str) else written
        if name not in KEYS:
            hint = did_you_mean(name, tuple(KEYS))
            raise ConfigError(f"{where}unknown key {written!r}{hint}; `jettison config show` lists all keys")
        if name in named:
            raise ConfigError(f"{where}key {name!r} is given twice")
        named[name] = _Given(raw, source, place)
    return named


def _parsed(key: Key, given: _Given) -> object:
    try:
        return key.parse(given.raw)
    except ValueError as error:
        raise ConfigError(f"{given.label(key)} {error}") from None


def _complete(values: dict[str, Any], num_cores: int, given: Mapping[str, _Given]) -> None:
    """Fill in the values that depend on other keys. Raises ConfigError for values that contradict each other."""

    def told(name: str) -> str:
        """``--memory 1MiB``, or ``memory 1MiB (FILE, line 3)``."""
        key, value = KEYS[name], KEYS[name].show(values[name])
        place = given[name].place if name in given and given[name].source == "file" else ""
        return f"{key.name} {value} ({place})" if place else f"{key.flag} {value}"

    _find_tokenizer(values)
    if values["model"]:
        values["model"] = model_folder(values["model"], values["revision"], values["download_dir"])
        values["served_model_name"] = values["served_model_name"] or (model_name(values["model"]),)
    if values["host_memory"] is None:
        uses_pool = uses_host_pool(values["overload"]) or "checkpoint" in harvest_parts(values["offline"])
        most = MOST_HOST_BYTES if values["device"] == "cuda" else values["memory"]
        values["host_memory"] = min(values["memory"], most) if uses_pool else 0
    if "rebalance" not in given:
        # A dispatcher that counts connections, as a proxy does, sees no queues.
        values["rebalance"] = values["dispatch"] == "freest"
    if values["num_threads"] is None:
        values["num_threads"] = max(1, num_cores // (values["max_instances"] or values["instances"]))
    if values["max_num_batched_tokens"] is None:
        values["max_num_batched_tokens"] = max(DEFAULT_TOKEN_BUDGET, values["max_num_seqs"] or 0)
    budget = values["max_num_batched_tokens"]
    if values["max_num_seqs"] is None:
        values["max_num_seqs"] = min(DEFAULT_MAX_NUM_SEQS, budget)
    if values["max_num_seqs"] > budget:
        raise ConfigError(
            f"{told('max_num_seqs')} is above {told('max_num_batched_tokens')}: "
            "a step could not give every running request its one token")
    if values["max_awake"] is not None and "min_awake" not in given:
        values["min_awake"] = min(values["min_awake"], values["max_awake"])
    if values["max_awake"] is not None and values["min_awake"] > values["max_awake"]:
        raise ConfigError(f"{told('min_awake')} is above {told('max_awake')}")
    if values["page_size"] is not None and values["memory"] < values["page_size"]:
        raise ConfigError(f"{told('memory')} is less than one page ({told('page_size')})")


def _find_tokenizer(values: dict[str, Any]) -> None:
    """The folder of a tokenizer that is not the model's own; None for its own. Before the model's folder is found."""
    named, revision = values["tokenizer"], values["tokenizer_revision"]
    if named in (None, values["model"]) and revision in (None, values["revision"]):
        values["tokenizer"] = None
    elif named or values["model"]:
        values["tokenizer"] = model_folder(named or values["model"], revision, values["download_dir"])
