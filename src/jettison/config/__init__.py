"""The configuration of an engine: frozen dataclasses, parsed, validated and resolved from flat keys.

Every key is declared once, beside its field (``config.sections``). The command line makes its flags from ``KEYS``, a
YAML file uses the same names (dashes or underscores), and ``config.engine`` resolves them all. ``config.values`` parses
the values as people write them.

Standard library only, but for ``config.files``, which reads YAML. ``jettison.cli`` prints tables. ``jettison.device``
decides whether the model folder can be served, and whether the budget holds its parameters.
"""

from __future__ import annotations

from jettison.config.cores import usable_cores
from jettison.config.engine import KEYS, EngineConfig, Key, Source
from jettison.config.hosts import HostsConfig
from jettison.config.model import ModelConfig
from jettison.config.sections import (
    API_KEY_VARIABLES,
    DEFAULT_MAX_NUM_SEQS,
    SECRET_KEYS,
    FaultsConfig,
    MemoryConfig,
    OverloadConfig,
    PackingConfig,
    SchedulerConfig,
    ServerConfig,
    SleepConfig,
    TemplateConfig,
)
from jettison.config.values import format_bytes, parse_bytes

__all__ = [
    "API_KEY_VARIABLES",
    "DEFAULT_MAX_NUM_SEQS",
    "KEYS",
    "SECRET_KEYS",
    "EngineConfig",
    "FaultsConfig",
    "HostsConfig",
    "Key",
    "MemoryConfig",
    "ModelConfig",
    "OverloadConfig",
    "PackingConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SleepConfig",
    "Source",
    "TemplateConfig",
    "format_bytes",
    "parse_bytes",
    "usable_cores",
]
