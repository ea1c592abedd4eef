"""vLLM's flags as data: names, kinds, defaults and choices of one version (``facts.json``), and of older ones
(``OLDER``), which public guides still name.

``facts.json`` is written by ``python -m jettison.cli.from_vllm facts`` from vLLM's own parser. What each flag means
here is in ``rules``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["switch", "boolean", "value", "values"]
"""``switch``: no value; ``boolean``: none, and a ``--no-`` twin; ``value``: one; ``values``: one or more."""

FACTS_FILE = Path(__file__).with_name("facts.json")


@dataclass(frozen=True, slots=True)
class Fact:
    """One flag, as vLLM's parser has it."""

    name: str
    """With dashes: ``--max-model-len``."""
    kind: Kind
    aliases: tuple[str, ...] = ()
    default: Any = None
    """As JSON has it; None also where it is an object of vLLM's own."""
    choices: tuple[str, ...] = ()
    is_older: bool = field(default=False, compare=False)
    """Whether the newest version that was looked at has it no more."""

    def to_json(self) -> dict[str, Any]:
        """Without what is empty."""
        told = {"name": self.name, "kind": self.kind, "aliases": list(self.aliases), "default": self.default,
                "choices": list(self.choices)}  # fmt: skip
        return {key: value for key, value in told.items() if value not in (None, [])}


def _older(kind: Kind, *names: str) -> tuple[Fact, ...]:
    return tuple(Fact(name, kind, is_older=True) for name in names)


OLDER: tuple[Fact, ...] = (
    *_older("switch", "--disable-log-requests", "--enable-reasoning", "--use-v2-block-manager", "--worker-use-ray",
            "--engine-use-ray", "--enable-prompt-adapter", "--disable-frontend-multiprocessing",
            "--disable-async-output-proc", "--disable-mm-preprocessor-cache", "--enable-lora-bias",
            "--enable-multimodal-encoder-data-parallel", "--disable-logprobs-during-spec-decoding",
            "--enable-microbatching", "--guided-decoding-disable-fallback", "--guided-decoding-disable-any-whitespace"),
    *_older("boolean", "--calculate-kv-scales", "--multi-step-stream-outputs"),
    *_older("value", "--swap-space", "--task", "--device", "--num-scheduler-steps", "--max-seq-len-to-capture",
            "--max-context-len-to-capture", "--guided-decoding-backend", "--speculative-model",
            "--num-speculative-tokens", "--speculative-draft-tensor-parallel-size", "--speculative-max-model-len",
            "--ngram-prompt-lookup-max", "--ngram-prompt-lookup-min", "--rope-scaling", "--rope-theta",
            "--quantization-param-path", "--preemption-mode", "--num-lookahead-slots", "--scheduler-delay-factor",
            "--tokenizer-pool-size", "--tokenizer-pool-type", "--max-paddings", "--long-lora-scaling-factors",
            "--lora-extra-vocab-size", "--max-prompt-adapters", "--max-prompt-adapter-token",
            "--override-pooler-config", "--override-neuron-config", "--max-num-partial-prefills",
            "--max-long-partial-prefills", "--logits-processor-pattern"),
    *_older("values", "--cuda-graph-sizes"),
)  # fmt: skip
"""Flags of earlier releases that guides still name."""


def read_facts(path: Path = FACTS_FILE) -> tuple[str, dict[str, Fact]]:
    """A version and its flags by name."""
    document = json.loads(path.read_text(encoding="utf-8"))
    flags = [
        Fact(entry["name"], entry["kind"], tuple(entry.get("aliases", ())), entry.get("default"),
             tuple(entry.get("choices", ())))
        for entry in document["flags"]
    ]  # fmt: skip
    return document["version"], {fact.name: fact for fact in flags}


@cache
def known_flags() -> Mapping[str, Fact]:
    """Every flag by name: those of ``facts.json``, then older ones that it lacks."""
    _, current = read_facts()
    return MappingProxyType(current | {fact.name: fact for fact in OLDER if fact.name not in current})


@cache
def known_aliases() -> Mapping[str, str]:
    """Alias -> name."""
    return MappingProxyType({alias: fact.name for fact in known_flags().values() for alias in fact.aliases})


def version() -> str:
    """The version of ``facts.json``."""
    return read_facts()[0]
