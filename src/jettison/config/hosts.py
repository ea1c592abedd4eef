"""Keys of clusters that span hosts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from jettison.config.sections import config_key
from jettison.config.values import Choice, float_from, host_and_port
from jettison.errors import ConfigError

Launcher = Literal["local", "ray"]
RayPlacement = Literal["pack", "spread"]


@dataclass(frozen=True, slots=True)
class HostsConfig:
    """Hosts: where workers run, and how one counts as lost."""

    launcher: Launcher = config_key(
        "local", Choice(Launcher), "Where workers run: local, as processes on this machine; ray, on the hosts of a Ray "
        "cluster, which only finds room for them (needs the extra jettison[ray]).")
    ray_address: str | None = config_key(
        None, host_and_port, "The Ray cluster that there is, of which this machine must be a node (none: one is "
        "started here, and ends with the server).", metavar="HOST:PORT", unset="none")
    ray_placement: RayPlacement = config_key(
        "pack", Choice(RayPlacement), "With ray: workers on few hosts, which have the fastest links, or spread over "
        "many, of which one may be lost.")
    lease_s: float = config_key(
        2.0, float_from(0.5), "With ray: a host that is cut off counts as lost after so long; its workers have ended "
        "before.",
        name="lease", metavar="SECONDS")

    @property
    def are_this_machine(self) -> bool:
        """Whether every worker runs on this machine."""
        return self.launcher == "local" or self.ray_address is None


def check_hosts(values: dict[str, Any]) -> None:
    """Raises ConfigError for a key of other hosts without them."""
    if values["launcher"] == "ray":
        return
    for field in fields(HostsConfig):
        name = field.name.removesuffix("_s")
        if name != "launcher" and values[name] != field.default:
            raise ConfigError(f"--{name.replace('_', '-')} is for --launcher ray, and workers run on this machine")
