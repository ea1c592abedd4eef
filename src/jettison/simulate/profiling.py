"""A deployment without a profile: which command makes the profile, and the deployment with it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from jettison.config import KEYS
from jettison.cost.deployment import Deployment
from jettison.cost.hardware import HardwareProfile
from jettison.cost.presets import InstancePreset
from jettison.cost.profile_document import ModelSizes, StoredProfile
from jettison.errors import ConfigError
from jettison.profiles import read_profile

PROFILED_KEYS = (
    "dtype", "quantized_weights", "kernels", "block_size", "page_size", "max_model_len", "max_num_batched_tokens",
    "max_num_seqs",
)
"""Keys of ``jettison serve`` that decide which steps are measured, and how; beside instances and memory."""


def profiling_command(deployment: Deployment, model_dir: str = "MODEL_DIR", out: str | None = None) -> str:
    """What to type for a profile of this deployment; the number of threads, if it was set, is not known here."""
    words = ["jettison", "profile", model_dir, "--instances", str(deployment.num_instances)]
    words += ["--memory", str(deployment.budget_bytes)]
    for name in PROFILED_KEYS:
        value = deployment.settings.get(name)
        if value is not None:
            words += [KEYS[name].flag, str(value)]
    if out is not None:
        words += ["--out", out]
    return shlex.join(words)


def with_profile(deployment: Deployment, path: Path) -> Deployment:
    """The deployment with the profile of a file, wherever that was measured; whether its engine knew one stays.

    Raises ConfigError for a file that is no profile.
    """
    return replace(deployment, profile=read_profile(path).profile)


def profile_of_preset(stored: StoredProfile, instance: InstancePreset, where: str) -> HardwareProfile:
    """What was measured, but over the preset's own host link: links and hops are the preset's, and each instance has a
    GPU of its own. Raises ConfigError where it was measured for another model, and for instances of several GPUs:
    `jettison profile` measures one."""
    wanted, found = ModelSizes.of(instance.model.shape()), stored.sizes
    num_layers = stored.profile.cost.num_layers
    if num_layers != wanted.num_layers or found not in (None, wanted):
        told = f"{num_layers} layers" if found is None else str(found)
        model = instance.model.name
        raise ConfigError(f"{where} was measured for another model than {model}: {told}, and not {wanted}")
    if instance.num_gpus > 1:
        raise ConfigError(f"{where} is of one GPU, and an instance of {instance.name} has {instance.num_gpus}")
    if (weights := stored.fingerprint.weights) != instance.model.weights_name:
        mend = "say cluster.weights as it was measured"
        if "+" in weights:  # as of a file that has its head in 8 bits, and all else in 4
            mend = "a preset's are all of one form; profile a folder whose are"
        raise ConfigError(f"{where} was measured with {weights} weights, and not {instance.model.weights_name}: {mend}")
    inside = stored.profile.device_copy_bytes_per_s or instance.device_copy_bytes_per_s
    return replace(
        stored.profile, host_copy_bytes_per_s=instance.host_link_bytes_per_s, device_copy_bytes_per_s=inside,
        beside_bytes_per_s=None, beside_byte_s=instance.beside_byte_s,
        hop_s=None, contention=1.0, contention_instances=1,
    )


def foreign_profile(deployment: Deployment, path: Path) -> str | None:
    """One line where the profile of a file was measured for something else than this deployment, as far as it says.

    Raises ConfigError for a file that is no profile.
    """
    differences = deployment.foreign_to(read_profile(path).fingerprint)
    if not differences:
        return None
    found = "; ".join(differences)
    return f"the profile {path} is not of {deployment.name} as it was served: it was measured for {found}"
