"""Sampling defaults of the model's maker or the operator, for fields that a request leaves out.

As in vLLM: ``generation_config.json`` of the model's folder, or of another (``--generation-config``), and over it
``--override-generation-config``. A request's own fields beat both. ``do_sample`` is ignored, as in vLLM: a maker that
wants greedy answers sets ``temperature`` to 0.

Pure but for reading that file. Errors in it are raised before the model is loaded.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jettison.device.model.generation_file import AUTO, NEUTRAL, read_generation
from jettison.device.model.jsonfile import JsonObject, short_repr
from jettison.errors import ConfigError, ModelError
from jettison.server.fields import GenerationFields

logger = logging.getLogger(__name__)

Fields = TypeVar("Fields", bound=GenerationFields)

OVERRIDE = "--override-generation-config"
_MEND = f"mend it, or start with --generation-config {NEUTRAL}"
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0), "top_k": (-1, math.inf), "top_p": (math.nextafter(0.0, 1.0), 1.0), "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0),
    "max_new_tokens": (1, math.inf),
}  # fmt: skip
"""Lowest and highest value, as for a request."""
_WHOLE = ("top_k", "max_new_tokens")


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values for fields that a request leaves out; None: OpenAI's defaults."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    """Default length of a chat's answer; a completion has OpenAI's 16."""
    max_tokens_bound: int | None = None
    """The operator's bound on the length of every answer; None: no bound."""
    origin: str = ""
    """Source of the values, for people."""

    def under(self, fields: Fields) -> Fields:
        """A request's fields, with these values for missing ones."""
        missing = {name: value for name in _FIELDS if (value := getattr(self, name)) is not None
                   and getattr(fields, name) is None}  # fmt: skip
        return msgspec.structs.replace(fields, **missing) if missing else fields

    def bounded(self, max_tokens: int) -> int:
        """A requested or default length, cut to the operator's bound."""
        return max_tokens if self.max_tokens_bound is None else min(max_tokens, self.max_tokens_bound)

    @property
    def told(self) -> str | None:
        """The values in one line, for people; None where there are none."""
        if not self.origin:
            return None
        mend = "--generation-config vllm leaves the model's out"
        return f"sampling where a request says nothing: {self} ({self.origin}; {mend})"

    def __str__(self) -> str:
        named = {**{name: getattr(self, name) for name in _FIELDS}, "max_tokens": self.max_tokens}
        shown = [f"{name} {value if name == 'max_tokens' else format(value, 'g')}"
                 for name, value in named.items() if value is not None]  # fmt: skip
        if self.max_tokens_bound is not None:
            shown[-1] += " (at most)"
        return ", ".join(shown)


_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(model_dir: Path, place: str, override: str | None) -> SamplingDefaults:
    """``place`` and ``override``: values of the two settings.

    Raises ModelError for a value in a file that no request could have, ConfigError for one in ``override``, or for a
    place without a file. Logs the keys of ``override`` that have no effect.
    """
    generation = JsonObject(model_dir, {}) if place == NEUTRAL else read_generation(model_dir, place)
    values = {name: _number(generation, name) for name in _RANGES}
    over: dict[str, Any] = {} if override is None else json.loads(override)
    if unknown := [name[:40] for name in over if name not in _RANGES]:
        logger.warning("%s: %s left out; what counts is %s", OVERRIDE, ", ".join(unknown), ", ".join(_RANGES))
    told = {name: _overriding(over, name) for name in _RANGES if name in over}
    origins = [str(generation.path)] if any(value is not None for value in values.values()) else []
    origins += [OVERRIDE] if told else []
    values |= told
    length = values.pop("max_new_tokens")
    is_bound = length is not None and (place not in (AUTO, NEUTRAL) or "max_new_tokens" in told)
    return SamplingDefaults(
        **values, max_tokens=length, max_tokens_bound=length if is_bound else None, origin=" and ".join(origins)
    )


def _overriding(over: dict[str, Any], name: str) -> Any:
    try:
        return _number(JsonObject(Path(OVERRIDE), over), name)
    except ModelError as error:
        raise ConfigError(str(error).removesuffix(f"; {_MEND}")) from None


def _number(keys: JsonObject, name: str) -> Any:
    """A number in its range; a whole one may be written as 20.0. None where the key is missing."""
    value = keys.values.get(name)
    if value is None:
        return None
    low, high = _RANGES[name]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_whole = is_number and (isinstance(value, int) or value.is_integer())
    if not is_number or not low <= value <= high or value == math.inf or (name in _WHOLE and not is_whole):
        kind = "a whole number" if name in _WHOLE else "a number"
        wanted = f"{kind} from {low:g}" + ("" if high == math.inf else f" to {high:g}")
        wanted = wanted.replace(f"from {low:g} to", "above 0, up to") if name == "top_p" else wanted
        raise keys.fail(f"{name} is {short_repr(value)}, expected {wanted}; {_MEND}")
    return int(value) if name in _WHOLE else float(value)

