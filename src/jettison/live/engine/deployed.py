"""What runs here, or would run, as a ``cost.deployment.Deployment``: to be simulated later, or elsewhere."""

from __future__ import annotations

import logging
from pathlib import Path

from jettison.config import KEYS, EngineConfig
from jettison.cost.deployment import Deployment
from jettison.cost.hardware import HardwareProfile
from jettison.live.engine.assembly import Assembly, assemble
from jettison.profiles import AUTO, NONE, read_profile

logger = logging.getLogger(__name__)

_DECIDING = frozenset({
    "", "model", "devices", "memory", "scheduler", "overload", "offline", "packing", "faults", "sleep", "scale",
})
"""Sections whose keys a deployment tells: those of the server and of hosts have addresses, paths and secrets, and
decide nothing that is simulated."""
LEFT_OUT = frozenset({
    "model", "revision", "download_dir", "tokenizer", "tokenizer_revision", "served_model_name",
    "generation_config", "override_generation_config", "instances", "memory", "profile", "num_threads",
    "api_servers", "log_level", "device", "cards", "gpu_memory_utilization", "page_size",
})
"""Keys of these that a deployment says in another way, or that do not decide what it does."""


def describe(config: EngineConfig, *, kv_tokens: int | None = None) -> Deployment:
    """Of an engine that is not running. ``kv_tokens``: memory enough for these beside parameters and workspace.

    Raises ModelError, ConfigError.
    """
    return deployment_of(assemble(config), kv_tokens=kv_tokens)


def deployment_of(assembly: Assembly, *, kv_tokens: int | None = None) -> Deployment:
    """Of an assembled engine, running or not. Raises ConfigError for a profile that cannot be read."""
    if kv_tokens is not None:
        assembly = assembly.sized_for(kv_tokens // assembly.config.memory.block_size)
    config = assembly.config
    known = assembly.load_profile()
    return Deployment(
        name=config.model.served_model_name,
        shape=assembly.shape,
        num_instances=config.instances,
        budget_bytes=config.memory.memory_bytes,
        workspace_bytes=assembly.workspace_bytes,
        page_bytes=assembly.page_bytes,
        max_model_len=assembly.limits.max_model_len,
        profile=known if known is not None else _elsewhere(config),
        core_knows_profile=known is not None,
        settings=settings_of(config),
        fingerprint=assembly.fingerprint,
    )


def settings_of(config: EngineConfig) -> dict[str, object]:
    """What the operator has said of how to serve; no keys of clients, no paths."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in config.flat().items()
        if config.provenance.get(name, "default") != "default"
        and name not in LEFT_OUT and KEYS[name].section in _DECIDING
    }


def _elsewhere(config: EngineConfig) -> HardwareProfile | None:
    """A profile that was named though it was measured on another machine: a simulation may use it, an engine not."""
    if config.profile in (AUTO, NONE):
        return None
    stored = read_profile(Path(config.profile))
    logger.info("the profile %s was measured elsewhere", config.profile)
    return stored.profile
