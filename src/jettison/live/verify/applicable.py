"""Which events a model can have at all: the closed list of reasons why not.

An event that a model can have is staged so that it happens (``live.verify.scenarios``): that it did not is a failure of
``jettison verify``, whatever the model. Not here: the events themselves.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from jettison.device.model.tokenizer_files import has_tokenizer
from jettison.live.engine.assembly import Assembly

GIB = 1 << 30


class Lack(StrEnum):
    """What is missing. There are no other reasons."""

    LAYERS = "layers"
    """Each stage of a pipeline takes a layer at least."""
    MEMORY = "memory"
    """Each instance has the parameters in memory of its own, and the reference has them, too."""
    ROWS = "rows"
    """Steps whose rows stop and go on later need kernels and a device that can do it."""
    TOKENIZER = "tokenizer"
    """What a grammar allows is a question of the tokens' texts."""


class Needs(NamedTuple):
    """What an event asks of a model and of the machine."""

    num_stages: int = 1
    """Of the longest pipeline in it."""
    num_instances: int = 1
    num_tokens: int = 4096
    """Of KV in one instance, at most about so many."""
    sheds_rows: bool = False
    """Steps shed rows in it."""
    has_tokenizer: bool = False
    """Requests follow grammars in it."""


class Has(NamedTuple):
    """What there is."""

    assembly: Assembly
    block_size: int
    memory: tuple[int, str] | None
    """Bytes that this process may use, and what bounds them; None where the system does not tell."""


def why_not(needs: Needs, has: Has) -> tuple[Lack, str] | None:
    """What is missing for an event, and a sentence about it; None: it can be had."""
    num_layers = has.assembly.shape.num_layers
    if needs.num_stages > num_layers:
        there = "1 layer" if num_layers == 1 else f"{num_layers} layers"
        return Lack.LAYERS, (
            f"a pipeline of {needs.num_stages} stages needs as many layers; this model has {there}"
        )
    if needs.sheds_rows and not has.assembly.limits.sheds_rows:
        return Lack.ROWS, f"with {has.assembly.kernels} a step's rows cannot go on later with the same results"
    if needs.has_tokenizer and not has_tokenizer(Path(has.assembly.config.model.model)):
        return Lack.TOKENIZER, "grammars need the model's tokenizer; this folder has none"
    if has.memory is None:
        return None
    each_bytes = has.assembly.memory_for_blocks(-(-needs.num_tokens // has.block_size))
    needed_bytes = needs.num_instances * each_bytes + has.assembly.shape.parameter_bytes
    there_bytes, bound = has.memory
    if needed_bytes <= there_bytes:
        return None
    instances = "1 instance" if needs.num_instances == 1 else f"{needs.num_instances} instances"
    return Lack.MEMORY, (
        f"{instances} and the reference need {needed_bytes / GIB:.1f} GiB; {bound} is {there_bytes / GIB:.1f} GiB"
    )
