"""A model folder on this machine as a deployment: what a live engine started from the same words would be.

The one module of this room that needs the model's sizes from the device, and so torch.
"""

from __future__ import annotations

from pathlib import Path

from jettison.config import EngineConfig
from jettison.cost.deployment import Deployment
from jettison.errors import ConfigError
from jettison.live.engine.deployed import describe
from jettison.simulate.spec import ClusterSpec, Settings


def local_deployment(cluster: ClusterSpec, settings: Settings, base_dir: Path) -> Deployment:
    """Read the folder, and what was measured for it here. Raises ModelError, ConfigError."""
    config = local_config(cluster, settings, base_dir)
    return describe(config, kv_tokens=cluster.kv_tokens)


def local_config(cluster: ClusterSpec, settings: Settings, base_dir: Path) -> EngineConfig:
    """What ``jettison serve`` is told, without a policy. Raises ConfigError."""
    keys = {**settings, "model": str(model_folder(cluster, base_dir)), "profile": cluster.profile}
    if cluster.instances is not None:
        keys["instances"] = cluster.instances
    if cluster.memory_bytes is not None:
        keys["memory"] = cluster.memory_bytes
    try:
        return EngineConfig.resolve(**keys)
    except ConfigError as error:
        raise ConfigError(f"cluster: {error}") from None


def model_folder(cluster: ClusterSpec, base_dir: Path) -> Path:
    """The folder, made if the spec says how and it is not there. Raises ConfigError."""
    assert cluster.model is not None
    for path in (Path(cluster.model), base_dir / cluster.model):
        if (path / "config.json").is_file():
            return path
    if cluster.create is None:
        raise ConfigError(f"cluster.model: there is no model folder {cluster.model} (and no cluster.create to make it)")
    from jettison.device.model.create import create_model

    path = Path(cluster.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    create_model(path, **cluster.create)
    return path
