"""Finds a model's ``generation_config.json``, with its maker's end tokens and sampling defaults.

``--generation-config`` names the place, as for vLLM: ``auto``, the model's folder; ``vllm``, the same, for end tokens
only; else another folder.
"""

from __future__ import annotations

from pathlib import Path

from jettison.device.model.jsonfile import JsonObject
from jettison.device.model.standins import why_not_itself
from jettison.errors import ConfigError

NAME = "generation_config.json"
MODEL_CONFIG = "config.json"
AUTO, NEUTRAL = "auto", "vllm"
"""Values of the setting that are not folders."""


def read_generation(model_dir: Path, place: str) -> JsonObject:
    """The file's contents; for a folder without the file, those of its ``config.json``, where old releases kept the
    same keys.

    Raises ModelError for a broken file, ConfigError for another place without either file.
    """
    folder = model_dir if place in (AUTO, NEUTRAL) else Path(place)
    choices = [folder] if folder.is_file() else [folder / NAME, folder / MODEL_CONFIG]
    for path in choices:
        if path.is_file() or why_not_itself(path) is not None:
            return JsonObject.read(path)
    if folder == model_dir:
        return JsonObject(model_dir / NAME, {})
    raise ConfigError(f"--generation-config {place}: no {NAME} there; it is auto, vllm, or a folder that holds one")
