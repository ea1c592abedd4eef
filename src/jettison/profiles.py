"""Profiles on disk: where they lie, what they are valid for on this machine, reading and writing.

A profile that was measured elsewhere, or that is damaged, is no reason not to serve: it is left aside with a warning.
What a document holds is ``cost.profile_document``'s.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from functools import cache
from pathlib import Path

from jettison import __version__
from jettison.config.cards import visible_cards
from jettison.cost.hardware import HardwareProfile
from jettison.cost.profile_document import (
    PLAIN_WEIGHTS,
    Fingerprint,
    ProfileDocumentError,
    StoredProfile,
    from_document,
    to_document,
)
from jettison.device.spec import CUDA
from jettison.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
"""Values of the configuration key ``profile`` that are no path."""


def fingerprint(
    model_dir: Path, dtype: str, num_threads: int, kernels: str, weights: str = PLAIN_WEIGHTS
) -> Fingerprint:
    """What a profile measured here and now is valid for. Raises ModelError when the folder has no configuration.

    ``dtype``: as resolved, never "auto"; ``kernels``: the back end's own name; ``weights``: ``DecoderConfig.weights``.
    A card's are valid for cards of the name of the first that is visible.
    """
    try:
        config = (model_dir / "config.json").read_bytes()
    except OSError as error:
        raise ModelError(f"{model_dir / 'config.json'}: {error.strerror}") from None
    cards = visible_cards() if kernels.startswith(CUDA) else []
    hardware = ", ".join([_hardware(), *(card.name for card in cards[:1])])
    model = hashlib.sha256(config).hexdigest()[:16]
    return Fingerprint(hardware, model, __version__, dtype, num_threads, kernels, weights)


def default_path(model_dir: Path, mark: Fingerprint) -> Path:
    """Beside the model, one file for each fingerprint: machines may share a folder."""
    return model_dir / f"jettison-profile-{mark.digest()}.json"


def save_profile(path: Path, stored: StoredProfile) -> None:
    """Write, replacing what was there in one go. Raises ConfigError when the folder cannot be written."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staged.write_text(json.dumps(to_document(stored), indent=1) + "\n", encoding="utf-8")
        os.replace(staged, path)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the profile {path}: {error.strerror}") from None


def read_profile(path: Path) -> StoredProfile:
    """What a file holds. Raises ConfigError: one line that says what is wrong with it."""
    try:
        return from_document(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    except ProfileDocumentError as error:
        raise ConfigError(f"{path}: {error}") from None


@cache
def _mention_others(model_dir: Path, mark: Fingerprint) -> None:
    """The model has profiles, but none as it is served here: say what differs, once."""
    for path in sorted(model_dir.glob("jettison-profile-*.json")):
        try:
            differences = read_profile(path).fingerprint.differences(mark)
        except ConfigError:
            continue
        logger.warning(
            "profile %s is not used, it was measured for %s; give `jettison profile` the flags that serve gets",
            path, "; ".join(differences),
        )  # fmt: skip


def load_profile(key: str, model_dir: Path, mark: Fingerprint) -> HardwareProfile | None:
    """The profile that the configuration key ``profile`` names (auto, none or a path), if it is valid here.

    A profile of another fingerprint, or a file beside the model that is no profile, is ignored with a warning.
    Raises ConfigError for a path that was named and cannot be read.
    """
    if key == NONE:
        return None
    path = default_path(model_dir, mark) if key == AUTO else Path(key)
    if key == AUTO and not path.exists():
        _mention_others(model_dir, mark)
        return None
    try:
        stored = read_profile(path)
    except ConfigError as error:
        if key != AUTO:
            raise
        logger.warning("profile ignored: %s", error)
        return None
    differences = stored.fingerprint.differences(mark)
    if differences:
        logger.warning("profile %s ignored, it was measured for %s", path, "; ".join(differences))
        return None
    logger.info("cost profile: %s", path)
    return stored.profile


def _hardware() -> str:
    """Processor and cores, as far as the operating system tells."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("model name", "Model")):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: the platform's own name has to do
    return f"{name}, {os.cpu_count()} cores, {platform.machine()}"
