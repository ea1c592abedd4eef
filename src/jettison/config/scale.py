"""Keys of scaling out and in: how many instances have a process."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from jettison.config.rungs import overload_words
from jettison.config.sections import config_key
from jettison.config.values import int_from
from jettison.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ScaleConfig:
    """Scaling: processes are started where another instance is worth it, and end where they are not needed."""

    min_instances: int | None = config_key(
        None, int_from(1, 1024), "Instances that always have a process (auto: --instances); others give theirs back "
        "once they have slept for as long as a start takes.", metavar="N", unset="auto")
    max_instances: int | None = config_key(
        None, int_from(1, 1024), "Instances that there may be (auto: --instances): further ones are started where "
        "memory, prompts or deadlines press, and filled by those that serve.", metavar="N", unset="auto")

    def why_more_stay(self, min_awake: int) -> str | None:
        """A warning for the operator: more instances stay awake than ``min_instances``, so that never so few are left.
        None: they do not."""
        if self.min_instances is None or self.min_instances == self.max_instances or min_awake <= self.min_instances:
            return None
        return f"--min-awake {min_awake} keeps more instances than --min-instances {self.min_instances}: lower it"


def settle_scale(values: dict[str, Any], given: Container[str]) -> None:
    """Complete and check the numbers of instances; ``given``: the keys that were said. Raises ConfigError for numbers
    that contradict each other, and for what keeps every instance where it is."""
    low, high = values["min_instances"], values["max_instances"]
    if low is None and high is None:
        return
    if low is not None and high is not None and low > high:
        raise ConfigError(f"--min-instances {low} is above --max-instances {high}")
    if "instances" not in given:
        values["instances"] = low or 1
    now = values["instances"]
    if low is not None and now < low:
        raise ConfigError(f"--instances {now} is below --min-instances {low}: it is the number at the start")
    if high is not None and now > high:
        raise ConfigError(f"--instances {now} is above --max-instances {high}: it is the number at the start")
    low, high = values["min_instances"], values["max_instances"] = low or now, high or now
    if low == high:
        return
    limits = f"--min-instances {low} and --max-instances {high}"
    if "pipeline" in overload_words(values["overload"]):
        raise ConfigError(f"--overload pipeline keeps its instances in pairs: it cannot with {limits}")
    if values["sleep"] == "never" and "sleep" in given:
        raise ConfigError(f"--sleep never lets no instance be given back: leave it out with {limits}")
    values["sleep"] = "auto"
    if "min_awake" not in given:
        values["min_awake"] = low
