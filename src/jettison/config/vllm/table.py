"""All verdicts by flag."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jettison.config.vllm.engine_rules import ENGINE
from jettison.config.vllm.rules import Rule
from jettison.config.vllm.serving_rules import SERVING

RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in (*SERVING, *ENGINE)})
